"""Checks that sampling gives the tokens that its definition in torch gives."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cbatch.base.params import SamplingParams
from cbatch.engine.kernel_checks.kernel_check import KernelCheck, Workload, run_check
from cbatch.engine.kernel_checks.made_up_steps import draw, made_up_sequences
from cbatch.sample.row_masks import RowMasks
from cbatch.sample.sampler import Sampler
from cbatch.sample.structured.token_bitmask import bitmask_of
from cbatch.schedule.sequence import TokenSequence

_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 4.0, "top_k": 2},
    {"temperature": 4.0, "top_p": 0.05},
    {"temperature": 4.0, "min_p": 0.9},
    {"temperature": 1.5, "top_k": 50, "top_p": 0.3},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 4.0, "top_k": 1},
)
"""Each filter leaves out most of what would be drawn without it."""

_ROWS = 2 * len(_KINDS)
_TOLERANCE = 1.5 / _ROWS
"""One row may differ: two tokens may be equally good to the last bits of a float32."""

_WORKLOAD_ROWS = 64


def check_sampling(sampler: Sampler, vocabulary: int) -> KernelCheck:
    """Compares tokens for every kind of parameters; the error is the share of rows that differ."""
    measure, workload = partial(_error, sampler, vocabulary), partial(_workload, sampler, vocabulary)
    return run_check("sampling", sampler.device, _TOLERANCE, measure, workload, of_tokens=True)


def _error(sampler: Sampler, vocabulary: int) -> float:
    logits = _draw_logits(_ROWS + 1, vocabulary, sampler.device)
    logits[-1, vocabulary // 2] = math.nan
    sequences, positions = _requests(_ROWS + 1), list(range(3, _ROWS + 4))
    # The second half of the rows may take every other token only.
    index = np.where(np.arange(_ROWS + 1) < _ROWS // 2, -1, 0).astype(np.int32)
    bitmask = bitmask_of(range(vocabulary // 2 % 2, vocabulary, 2), vocabulary)
    masks = RowMasks(torch.from_numpy(bitmask)[None].clone(), index)
    tokens, largest = sampler.sample(logits, sequences, positions, masks=masks).get()
    # In float64 it takes no kernel on any device.
    allowed = logits.double()
    allowed[_ROWS // 2 :, 1 - vocabulary // 2 % 2 :: 2] = -math.inf
    definition = Sampler(sampler.device, kernel=False).sample(allowed, sequences, positions)
    expected, expected_largest = definition.get()
    if math.isfinite(largest[-1]):
        raise RuntimeError("a row that is not a number looks like one")
    if largest[:-1] != expected_largest[:-1]:
        raise RuntimeError("the largest logit of a row is another one")
    return sum(a != b for a, b in zip(tokens[:-1], expected[:-1], strict=True)) / _ROWS


def _workload(sampler: Sampler, vocabulary: int) -> Workload:
    logits, sequences = _draw_logits(_WORKLOAD_ROWS, vocabulary, sampler.device), _requests(_WORKLOAD_ROWS)
    positions = [5] * _WORKLOAD_ROWS
    return Workload(lambda: sampler.sample(logits, sequences, positions).get(), bytes_read=logits.nbytes)


def _requests(rows: int) -> list[TokenSequence]:
    return made_up_sequences([SamplingParams(**_KINDS[row % len(_KINDS)]) for row in range(rows)], range(rows))


def _draw_logits(rows: int, vocabulary: int, device: torch.device) -> Tensor:
    return 3 * draw(0, rows, vocabulary, dtype=torch.float32, device=device)
