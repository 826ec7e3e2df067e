"""Faults planted into a running engine, which a comparison of outputs has to see."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cbatch.engine.attention import reference
from cbatch.engine.runtime.batch import RaggedBatch


def shift_positions(patch: pytest.MonkeyPatch) -> None:
    build = RaggedBatch.build

    def shifted(*args: Any) -> RaggedBatch:
        batch = build(*args)
        batch.position_ids.add_((batch.position_ids > 8).long())
        return batch

    patch.setattr(RaggedBatch, "build", shifted)


def leak_neighbour(patch: pytest.MonkeyPatch) -> None:
    prepare = reference.ReferenceAttention.prepare

    def leaking(self: Any, *args: Any) -> reference.ReferenceMetadata:
        metadata = prepare(self, *args)
        if len(metadata.sequences) > 1:
            metadata.sequences[0].blocks[0] = metadata.sequences[1].blocks[0]
        return metadata

    patch.setattr(reference.ReferenceAttention, "prepare", leaking)


def widen_window(patch: pytest.MonkeyPatch) -> None:
    attend = reference.ReferenceAttention.attend

    def wide(self: Any, *args: Any, window: int | None, **options: Any) -> torch.Tensor:
        return attend(self, *args, window=window + 1 if window else None, **options)

    patch.setattr(reference.ReferenceAttention, "attend", wide)
