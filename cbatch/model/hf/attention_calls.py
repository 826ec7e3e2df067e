"""What is done when a model of transformers calls its AttentionInterface in a step, or when it is probed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cbatch.attention.base import AttentionBackend
from cbatch.attention.reference import ReferenceAttention
from cbatch.base.errors import ModelError
from cbatch.model.hf.mask_patterns import MaskPattern, pattern_of
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.kv_cache import KVCache, LayerShape

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
        """What the backend has prepared for the layers of a device."""
        if device not in self.metadata:
            assert self.batch is not None
            self.metadata[device] = self.backend.prepare(self.batch.on(device), self.kv_cache.block_size)
        return self.metadata[device]


@dataclass(slots=True)
class AttentionProbe:
    """Takes the place of AttentionCalls in a model's first pass, and records what each call stores and may see."""

    shapes: list[LayerShape] = field(default_factory=list)
    patterns: list[MaskPattern] = field(default_factory=list)
    devices: list[torch.device] = field(default_factory=list)
    index_dims: list[tuple[int, torch.device]] = field(default_factory=list)
    """Of the keys of each indexer (see `indexed`), and where they are."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        self.shapes.append(LayerShape(key.shape[1], key.shape[2], value.shape[2]))
        self.patterns.append(pattern_of(mask))
        self.devices.append(query.device)
        return query.new_zeros(*query.shape[:2], value.shape[2])


_current: ContextVar[AttentionCalls | AttentionProbe] = ContextVar("cbatch_step")
"""The current forward pass. It is not a keyword of the model's forward, because not every family passes those on."""


def current_pass() -> AttentionCalls | AttentionProbe | None:
    """What the calls of the running model go to; None if it computes as in transformers."""
    return _current.get(None)


def placeholder_mask(*, q_length: int, kv_length: int, device: torch.device | str = "cpu", **_: Any) -> Tensor:
    """A mask [1, 1, q_length, kv_length] without memory, for models that take it apart and do not use it."""
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device).expand(1, 1, q_length, kv_length)
    mask.is_placeholder = True  # type: ignore[attr-defined]
    return mask


@contextmanager
def attending(step: AttentionCalls | AttentionProbe) -> Iterator[None]:
    """While a model runs, its calls go to `step`."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


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
    """What transformers calls for each attention layer.

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
