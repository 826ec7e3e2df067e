"""Whether the device of the tests has products of FP8."""

from __future__ import annotations

import pytest
import torch

from cbatch.model.float8 import float8_problem
from tests.support.device import DEVICE

NO_FLOAT8 = float8_problem(DEVICE, torch.float16)
"""The reason why it has none; empty if it has."""

needs_float8 = pytest.mark.skipif(bool(NO_FLOAT8), reason=NO_FLOAT8 or "products of FP8 work")
