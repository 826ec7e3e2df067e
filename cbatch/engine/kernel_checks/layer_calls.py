"""The calls of a layer's operations that a model makes in a step, noted so that they can be made again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from cbatch.attention.base import AttendOptions
from cbatch.attention.reference import ReferenceAttention, ReferenceMetadata
from cbatch.engine.kernel_checks.made_up_steps import (
    empty_cache,
    empty_states,
    made_up_states,
    num_blocks,
    ragged_batch,
)
from cbatch.kernels.layer_ops import Addend, LayerOps, Positions, Routing
from cbatch.kernels.reference.layer import TorchLayerOps
from cbatch.model.cuda import CudaModel
from cbatch.runtime.kv_cache import LayerShape, Shape

CHUNKS = [(0, 3), (0, 2)]
"""Of the step whose calls are noted."""

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of an operation of `LayerOps`, with its arguments as they were before it."""

    name: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def with_tensors(self, change: Change) -> LayerCall:
        """With every tensor of the step changed; weights stay."""
        return LayerCall(self.name, tuple(_changed(one, change) for one in self.arguments), self.keywords)

    def __call__(self, ops: LayerOps) -> list[Tensor]:
        """Makes the call again, with copies. Returns what its tensors hold then, and its result."""
        mine = self.with_tensors(torch.clone)
        result = getattr(ops, self.name)(*mine.arguments, **self.keywords)
        found = [one for one in mine.arguments if isinstance(one, Tensor)]
        if isinstance(result, Routing):
            found += [result.weights, _experts_of(result), result.counts[:, None].float()]
        return [one for one in found if one.dim() > 1]


def _changed(value: Any, change: Change) -> Any:
    match value:
        case Tensor():
            return change(value)
        case Addend():
            return value._replace(value=change(value.value))
        case Positions() | Routing():
            return value._replace(**{name: change(one) for name, one in value._asdict().items() if one is not None})
        case tuple() if type(value) is tuple:
            return tuple(_changed(one, change) for one in value)
    return value


def _experts_of(routing: Routing) -> Tensor:
    """[T, top_k] the experts that were chosen. Where a pair stands among those of its expert does not matter."""
    return torch.searchsorted(routing.counts.cumsum(0), routing.places.long(), right=True).float()


class _NotingOps:
    """Operations by torch, each call of which is noted if there was none like it."""

    def __init__(self, plain: TorchLayerOps, calls: dict[Any, LayerCall]) -> None:
        self._plain, self._calls = plain, calls

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._plain, name)
        if not callable(operation) or name == "logits":
            return operation

        def noted(*arguments: Any, **keywords: Any) -> Any:
            call = LayerCall(name, arguments, keywords)
            key = name, _form(arguments), _form(tuple(sorted(keywords.items())))
            if key not in self._calls:
                self._calls[key] = call.with_tensors(torch.clone)
            return operation(*arguments, **keywords)

        return noted


def _form(value: Any) -> Any:
    """What a kernel is compiled for: everything but the numbers in tensors, and the number of their rows."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape[1:]
    return tuple(map(_form, value)) if isinstance(value, tuple) else value


class _HeadsFirstReference(ReferenceAttention):
    """The reference, over blocks as Triton's attention lays them out."""

    def block_shapes(self, layer: LayerShape, block_size: int, dtype: torch.dtype) -> tuple[Shape, Shape]:
        keys, values = super().block_shapes(layer, block_size, dtype)
        return (keys[1], keys[0], keys[2]), (values[1], values[0], values[2])

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, metadata: ReferenceMetadata, **options: Unpack[AttendOptions]
    ) -> Tensor:
        return super().attend(query, keys.transpose(1, 2), values.transpose(1, 2), metadata, **options)


def noted_calls(model: CudaModel, block_size: int, kv_dtype: torch.dtype | None) -> list[LayerCall]:
    """The different calls of a step of the model, by operations of torch. Keys go to two blocks, and one token has no
    slot."""
    calls: dict[Any, LayerCall] = {}
    first = model.ops.heads_first
    attention = _HeadsFirstReference(kv_dtype) if first else ReferenceAttention(kv_dtype)
    batch = ragged_batch(CHUNKS, block_size, model.device, model.vocab_size)
    kv_cache = empty_cache(
        attention, model.layers, num_blocks(CHUNKS, block_size), block_size, model.dtype, model.device
    )
    if model.states:
        batch = replace(batch, states=made_up_states(empty_states(model, len(CHUNKS)), batch))
    plain: Any = _NotingOps(TorchLayerOps(first), calls)
    model.with_ops(plain).forward(batch, kv_cache, attention)
    slots = torch.arange(len(batch.ids), device=model.device) + block_size - 2
    slots[len(slots) // 2] = -1
    for call in calls.values():
        for one in call.arguments:
            if isinstance(one, Positions):
                one.slots.copy_(slots)
    return list(calls.values())
