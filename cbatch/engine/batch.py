"""A step's plan as tensors: all slices in one row, without padding."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.engine.plan import StepPlan
from cbatch.engine.transfer import to_device


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """S slices of T tokens in all, concatenated; the logits of R of them are asked for.

    input_ids      [T] int64
    position_ids   [T] int64, place of each token in its own sequence
    slot_mapping   [T] int64, place of each token in the KV cache: block * block_size + offset
    logit_rows     [R] int64, rows of the T whose logits are wanted, to get a next token or to score the prompt's
    block_tables   [S, B] int32, block ids of each sequence, 0 after its last
    tables         the same on the host
    starts, stops  S ints on the host: slice i computes tokens starts[i] .. stops[i]-1 of its sequence,
                   and each of them attends to the tokens of that sequence up to itself, nobody else's
    scored         [R] bool, which of the R rows score a prompt; None where none does
    """

    input_ids: Tensor
    position_ids: Tensor
    slot_mapping: Tensor
    logit_rows: Tensor
    block_tables: Tensor
    tables: NDArray[np.int32]
    starts: list[int]
    stops: list[int]
    scored: Tensor | None = None

    @classmethod
    def build(cls, plan: StepPlan, block_size: int, device: torch.device) -> RaggedBatch:
        slices = plan.slices
        starts = [slice_.start for slice_ in slices]
        stops = [slice_.stop for slice_ in slices]
        # numpy, because each small operation of torch lets other threads take the interpreter from this one.
        lengths = np.array([slice_.count for slice_ in slices])
        ends = lengths.cumsum()
        samples = np.array([slice_.is_last for slice_ in slices])
        tables = _block_tables([slice_.request.blocks for slice_ in slices])
        sequence = np.repeat(np.arange(len(slices)), lengths)
        positions = np.arange(ends[-1]) - (ends - lengths - np.array(starts))[sequence]
        slots = tables[sequence, positions // block_size] * np.int64(block_size) + positions % block_size
        sampled = (ends - 1)[samples]
        scored = _scored_rows(plan)
        rows = np.union1d(sampled, scored) if len(scored) else sampled
        ids = chain.from_iterable(s.request.token_ids[s.start : s.stop] for s in slices)
        arrays = [np.fromiter(ids, np.int64, ends[-1]), positions, slots, rows, tables]
        if len(scored):
            arrays.append(np.isin(rows, scored))
        input_ids, position_ids, slot_mapping, logit_rows, block_tables, *scores = to_device(arrays, device)
        return cls(
            input_ids=input_ids,
            position_ids=position_ids,
            slot_mapping=slot_mapping,
            logit_rows=logit_rows,
            block_tables=block_tables,
            tables=tables,
            starts=starts,
            stops=stops,
            scored=scores[0] if scores else None,
        )


def _block_tables(tables: list[list[int]]) -> NDArray[np.int32]:
    width = max(map(len, tables))
    return np.array([table + [0] * (width - len(table)) for table in tables], np.int32)


def _scored_rows(plan: StepPlan) -> NDArray[np.int64]:
    """Rows of the ragged batch whose logits score a prompt; most steps have none."""
    rows: list[int] = []
    if any(slice_.request.scores_prompt for slice_ in plan.slices):
        first = 0
        for slice_ in plan.slices:
            rows += [first + place - slice_.start for place in slice_.to_score]
            first += slice_.count
    return np.array(rows, np.int64)
