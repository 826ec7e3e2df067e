"""Samples of parametrized tests: the rest is run by `pytest -m exhaustive`."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], count: int, *, keep: Iterable[Any] = (), seed: int = 0) -> list[Any]:
    """Parameters of a test, all but so many of them exhaustive. These are drawn by a seed, beside those to keep."""
    every = list(cases)
    kept = {repr(case) for case in keep}
    assert kept <= {repr(case) for case in every}
    others = [case for case in every if repr(case) not in kept]
    kept |= {repr(case) for case in random.Random(seed).sample(others, count - len(kept))}
    return [case if repr(case) in kept else pytest.param(case, marks=pytest.mark.exhaustive) for case in every]
