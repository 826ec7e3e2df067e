"""Adapters of a transformers network: hooks on its linears, while a step runs in which requests have adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from cbatch.base.errors import ModelError
from cbatch.model.lora.device import DeviceLowRank, rows_by_adapter
from cbatch.model.lora_files import Adapter

_HEADS = ("lm_head", "embed_out")


class ModuleAdapters:
    """Adapters of the linears of a network."""

    def __init__(self, network: Any, adapters: Sequence[Adapter]) -> None:
        """Raises ModelError for an adapter that does not fit the network."""
        self._added: dict[nn.Module, list[DeviceLowRank | None]] = {}
        for number, adapter in enumerate(adapters):
            for name, low_rank in adapter.modules.items():
                module = _linear(network, adapter, name)
                weight: Tensor = module.weight
                added = self._added.setdefault(module, [None] * len(adapters))
                added[number] = DeviceLowRank.of(low_rank, weight.dtype, weight.device)

    @contextmanager
    def applied(self, adapters: NDArray[np.int64]) -> Iterator[None]:
        """While the network runs a step.  adapters: [T] number of each token's adapter from 1 on, or 0"""
        device = next(module.weight.device for module in self._added if isinstance(module.weight, Tensor))
        rows = rows_by_adapter(adapters, device)

        def add(module: nn.Module, given: tuple[Any, ...], out: Tensor) -> None:
            source = given[0].reshape(-1, given[0].shape[-1])
            if len(source) != len(adapters):
                raise ModelError(f"{type(module).__name__} does not compute all tokens of a step, so no adapter can")
            for number, tokens in rows:
                added = self._added[module][number]
                if added is not None:
                    added.add_to(source, tokens, out.view(len(adapters), -1))

        handles = [module.register_forward_hook(add) for module in self._added]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _linear(network: Any, adapter: Adapter, name: str) -> Any:
    """The linear of that name. Raises ModelError if there is none of the adapter's sizes."""
    try:
        module = network.get_submodule(name)
    except AttributeError:
        raise adapter.refused(
            f"it was made for another model: there is no {name} in a {type(network).__name__}"
        ) from None
    kind = type(module).__name__
    if kind not in ("Linear", "Conv1D") or module.weight.is_meta:
        raise adapter.refused(f"{name} is a {kind}, and only linears can be adapted")
    if name.rpartition(".")[2] in _HEADS:
        raise adapter.refused(f"it adapts the output head ({name}), and only the linears of layers can be")
    size = tuple(module.weight.shape[::-1] if kind == "Conv1D" else module.weight.shape)
    if adapter.modules[name].size != size:
        columns, depth = adapter.modules[name].size
        raise adapter.refused(
            f"it was made for another model: {name} is {size[0]} x {size[1]} here, and {columns} x {depth} there"
        )
    return module
