"""A step's plan as tensors: all slices in one row, without padding."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from cbatch.engine.scheduler import StepPlan


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """S slices of T tokens in all, concatenated; R of them get a next token.

    input_ids      [T] int64
    position_ids   [T] int64, place of each token in its own sequence
    slot_mapping   [T] int64, place of each token in the KV cache: block * block_size + offset
    logit_rows     [R] int64, rows of the T whose logits are sampled
    block_tables   [S, B] int32, block ids of each sequence, 0 after its last
    starts, stops  S ints on the host: slice i computes tokens starts[i] .. stops[i]-1 of its sequence,
                   and each of them attends to the tokens of that sequence up to itself, nobody else's
    """

    input_ids: Tensor
    position_ids: Tensor
    slot_mapping: Tensor
    logit_rows: Tensor
    block_tables: Tensor
    starts: list[int]
    stops: list[int]

    @classmethod
    def build(cls, plan: StepPlan, block_size: int, device: torch.device) -> RaggedBatch:
        slices = plan.slices
        starts = [slice_.start for slice_ in slices]
        stops = [slice_.stop for slice_ in slices]
        lengths = torch.tensor([slice_.count for slice_ in slices])
        ends = lengths.cumsum(0)
        samples = torch.tensor([slice_.is_last for slice_ in slices])
        tables = _block_tables([slice_.request.blocks for slice_ in slices])
        sequence = torch.repeat_interleave(lengths)
        positions = torch.arange(int(ends[-1])) - (ends - lengths - torch.tensor(starts))[sequence]
        blocks = tables[sequence, positions // block_size].long()
        ids = chain.from_iterable(s.request.token_ids[s.start : s.stop] for s in slices)
        return cls(
            input_ids=torch.tensor(list(ids)).to(device, non_blocking=True),
            position_ids=positions.to(device, non_blocking=True),
            slot_mapping=(blocks * block_size + positions % block_size).to(device, non_blocking=True),
            logit_rows=(ends - 1)[samples].to(device, non_blocking=True),
            block_tables=tables.to(device, non_blocking=True),
            starts=starts,
            stops=stops,
        )


def _block_tables(tables: list[list[int]]) -> Tensor:
    width = max(map(len, tables))
    return torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)
