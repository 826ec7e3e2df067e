"""Adapters on a device: all of a step multiply at once, each only the rows of its own tokens.

They add to the linears of a program, or by hooks to those of a transformers network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear as multiply

from cbatch.base.errors import ModelError
from cbatch.kernels.operands import ADAPTED_COLUMNS, AdapterRows, AdapterWeights
from cbatch.model.base import AddAdapters
from cbatch.model.lora.sites import Site
from cbatch.model.lora_files import Adapter, LowRank
from cbatch.model.ops.device_kernel import DeviceOps, by_torch, device_kernel
from cbatch.runtime.transfer import to_device

_ROWS_AT_ONCE = 512
"""Rows whose products torch holds beside the step's own."""

_LEAST_RANKS, _RANKS_AT_ONCE = 16, 64
"""Ranks are filled up to a power of two, or to a multiple of what a kernel takes at once."""


@device_kernel("lora:add_adapters", updates="out", is_product=True)
def add_adapters(source: Tensor, rows: AdapterRows, weights: AdapterWeights, out: Tensor) -> None:
    """out [T, columns] += source [T, depth] times both matrices of each token's adapter, if it has one."""
    slots = torch.empty_like(rows.numbers).index_copy_(0, rows.order.long(), weights.slots[rows.numbers])
    used, ranks, _ = weights.down.shape
    chosen = slots[:, None] == torch.arange(used, device=slots.device)
    down, width = weights.down.flatten(0, 1), weights.up.shape[2]
    for start in range(0, len(source), _ROWS_AT_ONCE):
        some = slice(start, start + _ROWS_AT_ONCE)
        inner = multiply(source[some], down).view(-1, used, ranks)
        inner = torch.where(chosen[some, :, None], inner, 0.0)
        for first, stop, rank in weights.ranges:
            product = torch.einsum("tsr,scr->tc", inner[:, :, rank : rank + width], weights.up[:, first:stop])
            out[some, first:stop] += product


def in_order(adapters: NDArray[np.int64]) -> list[NDArray[np.int32]]:
    """The arrays of `AdapterRows`.  adapters: [T] number of each token's adapter from 1 on, or 0"""
    order = np.argsort(-adapters, kind="stable")
    return [order.astype(np.int32), adapters[order].astype(np.int32)]


def rows_on(device: torch.device, adapters: NDArray[np.int64]) -> AdapterRows:
    return AdapterRows(*to_device(in_order(adapters), device))


def adapter_weights(sites: Sequence[Site], dtype: torch.dtype, device: torch.device) -> AdapterWeights:
    """The matrices of all adapters for a linear, of the type of its activations."""
    given = list(zip(*(site.added for site in sites), strict=True))  # of each adapter, for each site
    used = [number for number, added in enumerate(given) if any(added)]
    most = max(len(one.down) for added in given for one in added if one is not None)
    width = max(1 << (most - 1).bit_length(), _LEAST_RANKS)
    if width > _RANKS_AT_ONCE:
        width = -(-most // _RANKS_AT_ONCE) * _RANKS_AT_ONCE
    firsts: dict[Any, int] = {}  # parts of one stored matrix share the ranks of theirs
    ranges = []
    for site in sites:
        key = tuple(None if one is None else id(one.down) for one in site.added)
        rank = firsts.setdefault(key, len(firsts) * width)
        ranges.append((site.column, site.column + site.columns, rank))
    depth = next(one.down.shape[1] for one in sites[0].added if one is not None)
    down = torch.zeros(len(used), len(firsts) * width, depth)
    up = torch.zeros(len(used), ranges[-1][1], width)
    slots = torch.full((len(given) + 1,), -1, dtype=torch.int32)
    for slot, number in enumerate(used):
        slots[number + 1] = slot
        for (first, stop, rank), one in zip(ranges, given[number], strict=True):
            if one is not None:
                down[slot, rank : rank + len(one.down)] = one.down
                up[slot, first:stop, : len(one.down)] = one.up
    tiles = [
        (column, min(column + ADAPTED_COLUMNS, stop), rank)
        for first, stop, rank in ranges
        for column in range(first, stop, ADAPTED_COLUMNS)
    ]
    there = (slots.to(device), down.to(device, dtype), up.to(device, dtype), tuple(ranges))
    return AdapterWeights(*there, torch.tensor(tiles, dtype=torch.int32, device=device))


class DeviceAdapters:
    """The weights of all adapters on the device of a program, or of a network."""

    def __init__(self, sites: Mapping[Any, Sequence[Site]], dtype: torch.dtype, device: torch.device) -> None:
        self._weights = {linear: adapter_weights(own, dtype, device) for linear, own in sites.items()}

    def adding(self, ops: DeviceOps, rows: AdapterRows) -> AddAdapters:
        """rows: of a step, or of a graph that finds each step there"""

        def add(linear: Any, source: Tensor, out: Tensor) -> None:
            if (weights := self._weights.get(linear)) is not None:
                add_adapters(ops, source, rows, weights, out)

        return add


_HEADS = ("lm_head", "embed_out")


class ModuleAdapters:
    """Adapters of the linears of a network, each of which is a module."""

    def __init__(self, network: Any, adapters: Sequence[Adapter]) -> None:
        """Raises ModelError for an adapter that does not fit the network."""
        added: dict[Any, list[LowRank | None]] = {}
        for number, adapter in enumerate(adapters):
            for name, low_rank in adapter.modules.items():
                module = _linear(network, adapter, name)
                added.setdefault(module, [None] * len(adapters))[number] = low_rank
        self._parts = dict[Any, AdapterWeights]()
        for module, each in added.items():
            columns = next(len(one.up) for one in each if one is not None)
            site = Site(0, columns, tuple(each))
            self._parts[module] = adapter_weights([site], module.weight.dtype, module.weight.device)

    @contextmanager
    def applied(self, adapters: NDArray[np.int64]) -> Iterator[None]:
        """While the network runs a step.  adapters: [T] number of each token's adapter from 1 on, or 0"""
        ops, rows = by_torch(), list[AdapterRows]()

        def add(module: nn.Module, given: tuple[Any, ...], out: Tensor) -> None:
            source = given[0].reshape(-1, given[0].shape[-1])
            if len(source) != len(adapters):
                raise ModelError(f"{type(module).__name__} does not compute all tokens of a step, so no adapter can")
            if not rows:
                rows.append(rows_on(source.device, adapters))
            add_adapters(ops, source, rows[0], self._parts[module], out.view(len(adapters), -1))

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
