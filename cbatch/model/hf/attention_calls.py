"""Calls of the AttentionInterface by models of transformers, in a step and when they are probed.

The probe learns which earlier tokens a layer may see from the mask function that the model passes to transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cbatch.attention.base import AttentionBackend
from cbatch.attention.reference import ReferenceAttention
from cbatch.base.errors import ModelError
from cbatch.model.hf.recurrent import holding
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.kv_cache import KVCache, LayerShape

MaskFunction = Callable[..., Tensor]
"""A mask function of transformers: the indices of batch, head, query and key, broadcast, to whether the key is seen."""


@dataclass(frozen=True, slots=True)
class MaskPattern:
    """A token sees itself and earlier tokens: all of them, the last window-1, or those of its chunk."""

    window: int | None = None
    chunk: int | None = None

    @property
    def kind(self) -> str:
        """The name in transformers of a layer with this pattern."""
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


IGNORED_KEYWORDS = frozenset({"dropout", "is_causal", "logits_to_keep", "position_ids", "sliding_window", "use_cache"})
"""Keywords of an attention call that can be ignored, because attention is causal, paged and for inference only.

The mask already contains the window. Keywords that begin with `output_` are ignored too: they ask for other results.
"""


@dataclass(slots=True)
class AttentionCalls:
    """The attention calls of one forward pass, each with a cache of its own. Their order identifies them.

    A layer may call attention twice, or run several times, as long as every step makes the same calls.

    batch:    the step; None if the metadata is there
    metadata: what the backend has prepared, for each device that has layers
    """

    kv_cache: KVCache
    backend: AttentionBackend
    batch: RaggedBatch | None
    windows: list[int | None]
    metadata: dict[torch.device, Any] = field(default_factory=dict)
    calls: int = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        """Stores the step's keys and values [T, heads, dim], then attends with query [T, heads, dim]."""
        if mask is not None and not getattr(mask, "is_placeholder", False):
            raise ModelError("it uses attention masks of its own")
        call, self.calls = self.calls, self.calls + 1
        if call == len(self.windows):
            raise ModelError(f"it calls attention more than {call} times in a step, unlike when it was loaded")
        keys, values, metadata = self.kv_cache.keys[call], self.kv_cache.values[call], self.metadata_on(query.device)
        self.backend.store_kv(keys, values, key, value, metadata)
        indices, window = options.pop("indices"), self.windows[call]
        if indices is None:
            return self.backend.attend(query, keys, values, metadata, window=window, **options)
        if not isinstance(self.backend, ReferenceAttention):
            raise ModelError("its sparse attention needs --attention reference")
        return self.backend.attend_to(indices, query, keys, values, metadata, window=window, **options)

    def metadata_on(self, device: torch.device) -> Any:
        """The metadata that the backend has prepared for the layers of a device."""
        if device not in self.metadata:
            assert self.batch is not None
            self.metadata[device] = self.backend.prepare(self.batch.on(device), self.kv_cache.block_size)
        return self.metadata[device]


@dataclass(slots=True)
class AttentionProbe:
    """Takes the place of AttentionCalls in a model's first pass, and records what each call stores, where, and may see.

    indices: what each indexer stores (see `indexed`), and where
    """

    stored: list[tuple[LayerShape, torch.device]] = field(default_factory=list)
    patterns: list[MaskPattern] = field(default_factory=list)
    indices: list[tuple[LayerShape, torch.device]] = field(default_factory=list)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        self.stored.append((LayerShape(key.shape[1], key.shape[2], value.shape[2]), query.device))
        self.patterns.append(pattern_of(mask))
        return query.new_zeros(*query.shape[:2], value.shape[2])

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Takes the place of that of an `IndexView`, too."""
        self.indices.append((LayerShape(1, indexer_key_states.shape[-1], 0), indexer_key_states.device))
        return indexer_key_states


_current: ContextVar[AttentionCalls | AttentionProbe] = ContextVar("cbatch_step")
"""The current forward pass. It is not a keyword of the model's forward, because not every family passes those on."""


def current_pass() -> AttentionCalls | AttentionProbe | None:
    """The receiver of the running model's calls; None if it computes as in transformers."""
    return _current.get(None)


def placeholder_mask(*, q_length: int, kv_length: int, device: torch.device | str = "cpu", **_: Any) -> Tensor:
    """A mask [1, 1, q_length, kv_length] without memory, for models that take it apart and do not use it."""
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device).expand(1, 1, q_length, kv_length)
    mask.is_placeholder = True  # type: ignore[attr-defined]
    return mask


attending = partial(holding, _current)
"""While a model runs, its calls go to a step."""


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls for each attention layer.

    query, key, value: [1, heads, T, dim]
    indices:           [1, T, K] positions that each token may see (see `indexed`); None for all before it
    """
    unknown = sorted(
        name
        for name, value in keywords.items()
        if value is not None and name not in IGNORED_KEYWORDS and not name.startswith("output_")
    )
    if unknown:
        raise ModelError(f"its attention layers use {', '.join(unknown)}, which this engine does not support")
    out = _current.get().attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        attention_mask,
        scale=float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
        softcap=softcap,
        sinks=s_aux,
        indices=None if indices is None else indices[0],
    )
    return out[None], None
