"""Faults planted into a running engine, which a comparison of outputs has to see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cbatch.attention import reference
from cbatch.model.hf import recurrent
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.state_pool import StatePool, StepStates


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


def keep_states_of_others(patch: pytest.MonkeyPatch) -> None:
    """A new request goes on from what the last owner has left in its slot."""
    patch.setattr(StatePool, "zero", lambda self, slots: None)
    pieces_of = recurrent.pieces_of
    patch.setattr(
        recurrent,
        "pieces_of",
        lambda *args, **options: (piece._replace(is_fresh=False) for piece in pieces_of(*args, **options)),
    )


def keep_stale_states(patch: pytest.MonkeyPatch) -> None:
    """A request that begins with what a snapshot knows, or comes back, goes on from what is in its slot."""
    patch.setattr(StatePool, "copy", lambda self, sources, targets: None)


def take_state_of_neighbour(patch: pytest.MonkeyPatch) -> None:
    _change_states(patch, lambda states: _first_is_second(states.slots))


def snapshot_one_token_off(patch: pytest.MonkeyPatch) -> None:
    """A snapshot lacks the last token that it stands for, or has one too many."""

    def change(states: StepStates) -> None:
        states.snapshot_counts[states.snapshot_counts > 1] -= 1
        states.snapshot_slots[states.snapshot_counts == 1] = -1

    _change_states(patch, change)


def _first_is_second(slots: Any) -> None:
    slots[:1] = slots[1:2] if len(slots) > 1 else slots[:1]


def _change_states(patch: pytest.MonkeyPatch, change: Callable[[StepStates], None]) -> None:
    of = StepStates.of

    def changed(*args: Any) -> StepStates:
        states = of(*args)
        change(states)
        return states

    patch.setattr(StepStates, "of", changed)


STATE_FAULTS = [keep_states_of_others, keep_stale_states, take_state_of_neighbour, snapshot_one_token_off]
"""For models with recurrent layers."""
