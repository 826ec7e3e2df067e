"""Learns which earlier tokens a layer may see from the mask function that the model passes to transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cbatch.base.errors import ModelError

MaskFunction = Callable[..., Tensor]
"""A mask function of transformers: the indices of batch, head, query and key, broadcast, to whether the key is seen."""


@dataclass(frozen=True, slots=True)
class MaskPattern:
    """A token sees itself and earlier tokens: all of them, the last window-1, or those of its chunk."""

    window: int | None = None
    chunk: int | None = None

    @property
    def kind(self) -> str:
        """What transformers calls a layer with this pattern."""
        return "sliding_attention" if self.window else "chunked_attention" if self.chunk else "full_attention"

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether tokens at positions `query` see those at positions `key`; the two are broadcast."""
        seen = key <= query
        if self.window is not None:
            seen = seen & (query - key < self.window)
        if self.chunk is not None:
            seen = seen & (query // self.chunk == key // self.chunk)
        return seen


def probe_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: MaskFunction,
    local_size: int | None = None,
    allow_is_causal_skip: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """Makes the masks of the probe: [1, 1, q_length, kv_length], with a MaskPattern as an attribute.

    `pattern_of` refuses a mask that no MaskPattern describes, or that the model computed from this one.
    """
    mask = torch.zeros(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
    # If transformers combines its pattern with another, that one may look at the tokens of this pass, and has no answer
    # beyond them. These are text, so among them it shows whether the mask is causal for text.
    length = 2 * (local_size or q_length) + 4 if allow_is_causal_skip else q_length
    return _with_pattern(mask, _pattern(mask_function, length, local_size, device))


def _with_pattern(mask: Tensor, pattern: MaskPattern | None) -> Tensor:
    """The mask with an attribute that its copies on other devices have, too, and what is computed from it has not."""
    copy_to = mask.to

    def to(*arguments: Any, **options: Any) -> Tensor:
        moved = copy_to(*arguments, **options)
        return moved if moved is mask or moved.dtype != mask.dtype else _with_pattern(moved, pattern)

    mask.pattern, mask.to = pattern, to  # type: ignore[attr-defined, method-assign]
    return mask


def pattern_of(mask: Tensor | None) -> MaskPattern:
    """The MaskPattern of a mask from `probe_mask`; without a mask, a token sees all earlier ones.

    Raises ModelError for any other mask.
    """
    pattern = MaskPattern() if mask is None else getattr(mask, "pattern", None)
    if not isinstance(pattern, MaskPattern):
        raise ModelError("it uses attention masks of its own")
    return pattern


def _pattern(
    mask_function: MaskFunction, length: int, local_size: int | None, device: torch.device | str
) -> MaskPattern | None:
    """The MaskPattern of a mask function in a text of `length` tokens, checked around every border; None if none fits.

    local_size: the window or chunk, if there is one
    """
    size = local_size or length
    borders = [0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, length - 1]
    queries = torch.tensor([border for border in borders if border < length], device=device)[:, None]
    keys = torch.arange(length, device=device)[None, :]
    zero = torch.zeros(1, dtype=torch.long, device=device)
    seen = mask_function(zero, zero, queries, keys).expand(len(queries), length)
    candidates = [MaskPattern(window=local_size), MaskPattern(chunk=local_size)] if local_size else [MaskPattern()]
    return next((pattern for pattern in candidates if torch.equal(seen, pattern.allows(queries, keys))), None)
