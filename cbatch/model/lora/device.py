"""Adapters by torch: the rows of an adapter are gathered, multiplied twice, and added where they were.

They add to the linears of a program, or by hooks to those of a transformers network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cbatch.base.errors import ModelError
from cbatch.model.base import AddAdapters
from cbatch.model.lora.sites import Sites
from cbatch.model.lora_files import Adapter, LowRank
from cbatch.runtime.transfer import to_device

ROWS_AT_ONCE = 512
"""Rows whose products are in memory beside the step's own, which the size of the KV cache has room for."""


class DeviceLowRank(NamedTuple):
    """An adapter's matrices for a linear.

    down: [depth, rank], and up: [rank, columns], of the type of the activations
    """

    down: Tensor
    up: Tensor

    @classmethod
    def of(cls, added: LowRank, dtype: torch.dtype, device: torch.device) -> DeviceLowRank:
        down, up = (matrix.to(device, dtype) for matrix in (added.down, added.up))
        return cls(down.t(), up.t().contiguous())

    def add_to(self, source: Tensor, rows: Tensor, out: Tensor) -> None:
        """out [T, columns] += source [T, depth] times both matrices, for some of the rows."""
        for part in torch.split(rows, ROWS_AT_ONCE):
            product = source.index_select(0, part) @ self.down @ self.up
            out.index_add_(0, part, product.to(out.dtype))


class DeviceAdapters:
    """The weights of all adapters on the device of a program."""

    def __init__(self, sites: Sites, dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        self._parts: dict[Any, list[tuple[slice, list[DeviceLowRank | None]]]] = {}
        for linear, own in sites.items():
            for site in own:
                added = [None if one is None else DeviceLowRank.of(one, dtype, device) for one in site.added]
                self._parts.setdefault(linear, []).append((slice(site.column, site.column + site.columns), added))

    def step(self, adapters: NDArray[np.int64]) -> AddAdapters:
        """adapters: [T] number of each token's adapter from 1 on, or 0"""
        numbers = np.unique(adapters[adapters > 0])
        places = to_device([np.flatnonzero(adapters == number) for number in numbers], self._device)
        rows = list(zip(map(int, numbers - 1), places, strict=True))

        def add(linear: Any, source: Tensor, out: Tensor) -> None:
            for columns, added in self._parts.get(linear, ()):
                for adapter, chosen in rows:
                    if (low_rank := added[adapter]) is not None:
                        low_rank.add_to(source, chosen, out[:, columns])

        return add


_HEADS = ("lm_head", "embed_out")


class ModuleAdapters(DeviceAdapters):
    """Adapters of the linears of a network, each of which is a module."""

    def __init__(self, network: Any, adapters: Sequence[Adapter]) -> None:
        """Raises ModelError for an adapter that does not fit the network."""
        self._parts = {}
        for number, adapter in enumerate(adapters):
            for name, low_rank in adapter.modules.items():
                module = _linear(network, adapter, name)
                weight: Tensor = module.weight
                if not self._parts:
                    self._device = weight.device
                [(_, added)] = self._parts.setdefault(module, [(slice(None), [None] * len(adapters))])
                added[number] = DeviceLowRank.of(low_rank, weight.dtype, weight.device)

    @contextmanager
    def applied(self, adapters: NDArray[np.int64]) -> Iterator[None]:
        """While the network runs a step.  adapters: [T] number of each token's adapter from 1 on, or 0"""
        add_to = self.step(adapters)

        def add(module: nn.Module, given: tuple[Any, ...], out: Tensor) -> None:
            source = given[0].reshape(-1, given[0].shape[-1])
            if len(source) != len(adapters):
                raise ModelError(f"{type(module).__name__} does not compute all tokens of a step, so no adapter can")
            add_to(module, source, out.view(len(adapters), -1))

        handles = [module.register_forward_hook(add) for module in self._parts]
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
    adapter.check_size(name, size)
    return module
