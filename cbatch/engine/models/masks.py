"""Which earlier tokens a layer may see, learned from the mask function that the model hands to transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cbatch.engine.errors import ModelError

MaskFunction = Callable[..., Tensor]
"""Of transformers: from the index of a batch, a head, a query and a key, broadcast, to whether that key is seen."""


@dataclass(frozen=True, slots=True)
class Reach:
    """A token sees itself and what comes before it: all of it, the last window-1 tokens, or those of its chunk."""

    window: int | None = None
    chunk: int | None = None

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether tokens at places `query` see those at places `key`; the two are broadcast."""
        seen = key <= query
        if self.window is not None:
            seen = seen & (query - key < self.window)
        if self.chunk is not None:
            seen = seen & (query // self.chunk == key // self.chunk)
        return seen


def stand_in_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: MaskFunction,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """A mask function of transformers for the probe: a mask [1, 1, q_length, kv_length] that carries its Reach.

    A mask that no Reach describes, or one that the model computes from this one, is refused by `reach_of` if a layer
    uses it.
    """
    mask = torch.zeros(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
    mask.reach = _reach(mask_function, q_length, local_size, device)  # type: ignore[attr-defined]
    return mask


def reach_of(mask: Tensor | None) -> Reach:
    """The Reach of what `stand_in_mask` gave; all that came before where there is no mask.

    Raises ModelError for any other mask.
    """
    reach = Reach() if mask is None else getattr(mask, "reach", None)
    if not isinstance(reach, Reach):
        raise ModelError("its attention layers use a mask of their own")
    return reach


def _reach(
    mask_function: MaskFunction, length: int, local_size: int | None, device: torch.device | str
) -> Reach | None:
    """The Reach that a mask function has; None where there is none.

    length:     tokens of the pass
    local_size: the window or chunk, where there is one
    """
    size = local_size or length
    borders = torch.tensor([0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1], device=device)
    candidates = [Reach(), Reach(window=local_size), Reach(chunk=local_size)]
    try:
        seen = _seen(mask_function, borders, 2 * size + 4)
    except IndexError:  # It looks at what the tokens of this pass are. That cannot be more than text.
        borders = torch.arange(length, device=device)
        seen = _seen(mask_function, borders, length)
        candidates = [Reach(window=local_size)]
    keys = torch.arange(seen.shape[1], device=device)
    fitting = (reach for reach in candidates if torch.equal(seen, reach.allows(borders[:, None], keys)))
    return next(fitting, None)


def _seen(mask_function: MaskFunction, queries: Tensor, num_keys: int) -> Tensor:
    """Whether tokens at the places `queries` [Q] see those before place `num_keys`: [Q, num_keys]."""
    zero = torch.zeros(1, dtype=torch.long, device=queries.device)
    seen = mask_function(zero, zero, queries[:, None], torch.arange(num_keys, device=queries.device)[None, :])
    return seen.expand(len(queries), num_keys)
