"""The tokens that the rows of a step allow: a request's own list, its constraint, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.device import pins_memory
from cbatch.runtime.transfer import padded, to_device
from cbatch.sample.structured.masks import TokenMasks
from cbatch.sample.structured.token_bitmask import bitmask_of, to_bools
from cbatch.schedule.sequence import TokenSequence

_known_lists: WeakValueDictionary[bytes, NDArray[np.int32]] = WeakValueDictionary()
"""Lists of allowed tokens in use, by their bytes: the same list in all rows of a file is one mask."""


@dataclass(frozen=True, slots=True)
class RowMasks:
    """The allowed tokens of R rows.

    bitmasks: [M, bitmask_size] int32 on the CPU (see `token_bitmask`), in pinned memory for a GPU
    index:    [R] int32, the mask of each row; -1: it allows all tokens
    """

    bitmasks: Tensor
    index: NDArray[np.int32]

    @classmethod
    def build(
        cls,
        sequences: Sequence[TokenSequence],
        masks: TokenMasks | None,
        constrained_rows: Sequence[int],
        logits: Tensor,
    ) -> RowMasks | None:
        """The masks of a step; None if all rows allow all tokens.

        masks:  of the rows `constrained_rows`
        logits: [R, V]
        """
        listed = [row for row, sequence in enumerate(sequences) if sequence.params.allowed_token_ids is not None]
        if masks is None and not listed:
            return None
        index = np.full(len(sequences), -1, np.int32)
        index[constrained_rows] = range(len(constrained_rows))
        if not listed:
            assert masks is not None
            return cls(masks.bitmasks, index)
        found: list[NDArray[np.int32]] = [] if masks is None else list(masks.bitmasks.numpy())
        numbers: dict[int, int] = {}
        for row in listed:
            bitmask = _allowed_bitmask(sequences[row], logits.shape[1])
            if index[row] >= 0:
                found[index[row]] = found[index[row]] & bitmask
                continue
            index[row] = number = numbers.setdefault(id(bitmask), len(found))
            if number == len(found):
                found.append(bitmask)
        stacked = torch.empty(len(found), len(found[0]), dtype=torch.int32, pin_memory=pins_memory(logits.device))
        np.stack(found, out=stacked.numpy())
        return cls(stacked, index)

    def apply(self, logits: Tensor) -> Tensor:
        """A copy of logits [R, V] in float32, with minus infinity for tokens that are not allowed."""
        bitmasks, vocab_size = self.bitmasks.numpy(), logits.shape[1]
        if not (len(bitmasks) == len(self.index) and (self.index == np.arange(len(bitmasks))).all()):
            bitmasks = padded(bitmasks, len(bitmasks) + 1, -1)[self.index]  # -1 is the last
        if logits.device.type == "cpu":
            allowed = torch.from_numpy(to_bools(bitmasks, vocab_size))
        else:
            allowed = bools_on_device(to_device([bitmasks], logits.device)[0], vocab_size)
        return torch.where(allowed, logits.float(), -torch.inf)


def bools_on_device(bitmasks: Tensor, vocab_size: int) -> Tensor:
    """Sets of tokens [M, bitmask_size] as booleans [M, vocab_size] on the same device."""
    (places,) = to_device([np.left_shift(np.uint8(1), np.arange(8, dtype=np.uint8))], bitmasks.device)
    bits = bitmasks.view(torch.uint8)[:, :, None] & places
    return bits.flatten(1)[:, :vocab_size] != 0


def _allowed_bitmask(sequence: TokenSequence, vocab_size: int) -> NDArray[np.int32]:
    """The list of a request as a set of tokens. Made once, because it may be as long as the vocabulary."""
    if not isinstance(sequence.allowed_bitmask, np.ndarray):
        bitmask = bitmask_of(sequence.params.allowed_token_ids or (), vocab_size)
        sequence.allowed_bitmask = _known_lists.setdefault(bitmask.tobytes(), bitmask)
    return sequence.allowed_bitmask
