"""Which earlier tokens a layer may see, learned from the mask function that the model hands to transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cbatch.engine.base.errors import ModelError

MaskFunction = Callable[..., Tensor]
"""Of transformers: from the index of a batch, a head, a query and a key, broadcast, to whether that key is seen."""


@dataclass(frozen=True, slots=True)
class MaskPattern:
    """A token sees itself and what comes before it: all of it, the last window-1 tokens, or those of its chunk."""

    window: int | None = None
    chunk: int | None = None

    @property
    def kind(self) -> str:
        """What transformers calls a layer that sees this."""
        return "sliding_attention" if self.window else "chunked_attention" if self.chunk else "full_attention"

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether tokens at places `query` see those at places `key`; the two are broadcast."""
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
    """A mask function of transformers for the probe: a mask [1, 1, q_length, kv_length] that carries its Reach.

    A mask that no Reach describes, or one that the model computes from this one, is refused by `pattern_of` if a layer
    uses it.
    """
    mask = torch.zeros(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
    # Where transformers lays something over its own pattern, that may look at what the tokens of this pass are, and
    # has no answer beyond them. Their being text then shows that among them it is causal.
    length = 2 * (local_size or q_length) + 4 if allow_is_causal_skip else q_length
    mask.pattern = _pattern(mask_function, length, local_size, device)  # type: ignore[attr-defined]
    return mask


def pattern_of(mask: Tensor | None) -> MaskPattern:
    """The Reach of what `probe_mask` gave; all that came before where there is no mask.

    Raises ModelError for any other mask.
    """
    pattern = MaskPattern() if mask is None else getattr(mask, "pattern", None)
    if not isinstance(pattern, MaskPattern):
        raise ModelError("its attention layers use a mask of their own")
    return pattern


def _pattern(
    mask_function: MaskFunction, length: int, local_size: int | None, device: torch.device | str
) -> MaskPattern | None:
    """The Reach that a mask function has in a text of `length` tokens, looked at around every border; None for none.

    local_size: the window or chunk, where there is one
    """
    size = local_size or length
    borders = [0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, length - 1]
    queries = torch.tensor([border for border in borders if border < length], device=device)[:, None]
    keys = torch.arange(length, device=device)[None, :]
    zero = torch.zeros(1, dtype=torch.long, device=device)
    seen = mask_function(zero, zero, queries, keys).expand(len(queries), length)
    candidates = [MaskPattern(window=local_size), MaskPattern(chunk=local_size)] if local_size else [MaskPattern()]
    return next((pattern for pattern in candidates if torch.equal(seen, pattern.allows(queries, keys))), None)
