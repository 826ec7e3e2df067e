"""Adapters as the CPU's kernels take them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from cbatch.kernels.cpu.matmul.lora import LoraStep
from cbatch.kernels.cpu.matmul.microkernel import COLUMNS, MAX_ROWS, microkernel_address, pad_columns
from cbatch.model.lora.sites import Site, Sites
from cbatch.model.lora_files import LowRank
from cbatch.model.ops.cpu_layout import interleaved
from cbatch.model.ops.linear import Linear
from cbatch.runtime.cpu import empty


class CpuAdapters:
    """The weights of all adapters in one array, and which tokens of a step need them.

    places: of each linear that an adapter adds to, its number, and the first of its tiles
    """

    def __init__(self, sites: Sites, num_adapters: int, threads: int) -> None:
        self.places: dict[Linear, tuple[int, int]] = {}
        self._parts: list[NDArray[np.float32]] = []
        self._size, ranks, depth = 0, COLUMNS, 0
        shrinks: list[list[tuple[int, int]]] = []
        expands: list[list[tuple[int, int, int]]] = []
        for linear, own in sites.items():
            self.places[linear] = len(shrinks), len(expands)
            dense = [_dense(linear, own, number) for number in range(num_adapters)]
            shrinks.append([(0, 0) if one is None else self._place_down(one.down) for one in dense])
            tiles = [[] if one is None else self._place_up(one.up) for one in dense]
            most = max(map(len, tiles))
            expands += [[each[tile] if each else (0, 0, 0) for each in tiles] for tile in range(most)]
            ranks = max([ranks, *(pad_columns(len(one.down)) for one in dense if one is not None)])
            depth = max(depth, linear.matrix.depth)
        weights = empty(self._size, np.float32)
        np.concatenate(self._parts, out=weights)
        self._parts.clear()
        self._idle = LoraStep(
            microkernel_address(np.dtype(np.float32)),
            weights,
            np.array(shrinks, np.int64).reshape(-1, num_adapters, 2),
            np.array(expands, np.int64).reshape(-1, num_adapters, 3),
            np.empty(0, np.int64),
            np.empty((0, 3), np.int64),
            empty((0, ranks), np.float32),
            empty((threads, MAX_ROWS, depth), np.float32),
            empty((threads, MAX_ROWS, COLUMNS), np.float32),
            np.empty((threads, 4), np.int64),
        )
        self._inner = self._idle.inner

    def step(self, adapters: NDArray[np.int64] | None) -> LoraStep:
        """adapters: [T] number of each token's adapter from 1 on, or 0; None if no token has one"""
        if adapters is None:
            return self._idle
        tokens = np.flatnonzero(adapters)
        tokens = tokens[np.argsort(adapters[tokens], kind="stable")]
        if len(tokens) > len(self._inner):
            self._inner = empty((len(tokens), self._inner.shape[1]), np.float32)
        groups = np.array(list(_groups(adapters[tokens])), np.int64)
        return self._idle._replace(tokens=tokens, groups=groups, inner=self._inner[: len(tokens)])

    def _place_down(self, down: Tensor) -> tuple[int, int]:
        """Where the tiles of a first matrix begin, and how many there are."""
        start, ranks = self._size, pad_columns(len(down))
        for tile in torch.split(pad(down, (0, 0, 0, ranks - len(down))), COLUMNS):
            self._add(tile)
        return start, ranks // COLUMNS

    def _place_up(self, up: Tensor) -> list[tuple[int, int, int]]:
        """Where each tile of a second matrix begins, the first rank that it needs, and how many."""
        places = []
        for tile in torch.split(pad(up, (0, 0, 0, pad_columns(len(up)) - len(up))), COLUMNS):
            needed = tile.any(dim=0).nonzero().flatten().tolist()
            first, stop = (needed[0], needed[-1] + 1) if needed else (0, 0)
            places.append((self._size, first, stop - first))
            self._add(tile[:, first:stop])
        return places

    def _add(self, columns: Tensor) -> None:
        """Adds a tile [32, depth], one number of all columns after the other."""
        self._parts.append(columns.t().contiguous().numpy().reshape(-1))
        self._size += columns.numel()


def _dense(linear: Linear, sites: tuple[Site, ...], adapter: int) -> LowRank | None:
    """An adapter's matrices for a whole linear, with the ranks of all its sites; None if it adds nothing.

    `up` is in the order of the product's columns, with zeros where a site does not have a rank.
    """
    chosen = [(site, one) for site in sites if (one := site.added[adapter]) is not None]
    if not chosen:
        return None
    downs = {id(one.down): one.down for _, one in chosen}  # parts of one stored matrix share theirs
    starts = dict(zip(downs, np.cumsum([0, *map(len, downs.values())]).tolist(), strict=False))
    up = torch.zeros(linear.matrix.columns, sum(map(len, downs.values())))
    for site, one in chosen:
        start = starts[id(one.down)]
        up[site.column : site.column + site.columns, start : start + len(one.down)] = one.up * linear.factor
    return LowRank(torch.cat(list(downs.values())), interleaved(up) if linear.is_gated else up)


def _groups(numbers: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """A few tokens each that have the same adapter, whose numbers ascend."""
    changes = np.flatnonzero(np.diff(numbers)) + 1
    for start, stop in pairwise([0, *changes.tolist(), len(numbers)]):
        for first in range(start, stop, MAX_ROWS):
            yield int(numbers[start]) - 1, first, min(first + MAX_ROWS, stop)
