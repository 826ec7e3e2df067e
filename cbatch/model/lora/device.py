"""Adapters on a device, by torch: the rows of an adapter are gathered, multiplied twice, and added where they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.model.lora.sites import Sites
from cbatch.model.lora_files import LowRank
from cbatch.model.ops.linear import Linear

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


class _Part(NamedTuple):
    """The columns of a site, and what each adapter adds to them."""

    columns: slice
    added: tuple[DeviceLowRank | None, ...]


class StepAdapters:
    """The adapters of a model, and the rows of a step that each of them adds to."""

    def __init__(self, parts: Mapping[Linear, Sequence[_Part]], rows: Sequence[tuple[int, Tensor]]) -> None:
        self._parts, self._rows = parts, rows

    def add_to(self, linear: Linear, source: Tensor, out: Tensor) -> None:
        """out [T, columns], the linear's product with source [T, depth], plus what adapters add to it."""
        for part in self._parts.get(linear, ()):
            for adapter, rows in self._rows:
                added = part.added[adapter]
                if added is not None:
                    added.add_to(source, rows, out[:, part.columns])


class DeviceAdapters:
    """The weights of all adapters on the device of a program."""

    def __init__(self, sites: Sites, dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        self._parts = {
            linear: [
                _Part(
                    slice(site.column, site.column + site.columns),
                    tuple(None if one is None else DeviceLowRank.of(one, dtype, device) for one in site.added),
                )
                for site in own
            ]
            for linear, own in sites.items()
        }

    def step(self, adapters: NDArray[np.int64]) -> StepAdapters:
        """adapters: [T] number of each token's adapter from 1 on, or 0"""
        return StepAdapters(self._parts, rows_by_adapter(adapters, self._device))


def rows_by_adapter(adapters: NDArray[np.int64], device: torch.device) -> list[tuple[int, Tensor]]:
    """The adapters that any token has, numbered from 0 on, and their tokens."""
    numbers = np.unique(adapters[adapters > 0])
    return [(int(one) - 1, torch.from_numpy(np.flatnonzero(adapters == one)).to(device)) for one in numbers]
