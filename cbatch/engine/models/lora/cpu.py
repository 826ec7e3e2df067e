"""Adapters as the CPU's kernels take them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from cbatch.engine.base.errors import ModelError
from cbatch.engine.kernels.cpu.matmul.lora import TOKENS_PER_GROUP, LoraStep
from cbatch.engine.kernels.cpu.matmul.microkernel import COLUMNS, LANES
from cbatch.engine.models.lora.sites import Site, Sites
from cbatch.engine.models.lora_files import LowRank
from cbatch.engine.models.programs.program import Linear
from cbatch.engine.runtime.cpu import empty


class CpuAdapters:
    """The weights of all adapters in one array, and which tokens of a step need them.

    places: of each linear that an adapter adds to, the first of its sites, and how many it has
    """

    def __init__(self, sites: Sites, num_adapters: int) -> None:
        """Raises ModelError for a linear that the kernels do not add to."""
        self.places: dict[Linear, tuple[int, int]] = {}
        self._parts: list[NDArray[np.float32]] = []
        self._size = self._ranks = 0
        rows: list[tuple[int, int, int]] = []
        matrices: list[list[tuple[int, int, int]]] = []
        for linear, own in sites.items():
            split = [part for site in own for part in _split(linear, site)]
            self.places[linear] = len(rows), len(split)
            for row, added in split:
                rows.append(row)
                matrices.append([self._place(linear, one) for one in added])
            ranks = np.array(matrices[len(rows) - len(split) :])[:, :, 2]
            self._ranks = max(self._ranks, int(ranks.sum(axis=0).max()))
        nothing = np.empty(0, np.int64)
        self._idle = LoraStep(
            empty(self._size, np.float32),
            np.array(rows, np.int64),
            np.array(matrices, np.int64).reshape(len(rows), num_adapters, 3),
            nothing,
            nothing.reshape(0, 3),
            empty((0, self._ranks), np.float32),
        )
        np.concatenate(self._parts, out=self._idle.weights)
        self._parts.clear()
        self._inner = self._idle.inner

    def step(self, adapters: NDArray[np.int64] | None) -> LoraStep:
        """adapters: [T] number of each token's adapter from 1 on, or 0; None if no token has one"""
        if adapters is None:
            return self._idle
        tokens = np.flatnonzero(adapters)
        tokens = tokens[np.argsort(adapters[tokens], kind="stable")]
        numbers = adapters[tokens]
        if len(tokens) > len(self._inner):
            self._inner = empty((len(tokens), self._ranks), np.float32)
        groups = np.array(list(_groups(numbers)), np.int64)
        return self._idle._replace(tokens=tokens, groups=groups, inner=self._inner[: len(tokens)])

    def _place(self, linear: Linear, added: LowRank | None) -> tuple[int, int, int]:
        """Where both matrices of an adapter begin, and its rank."""
        if added is None:
            return 0, 0, 0
        start = self._size
        up = added.up.T * linear.factor
        for matrix in (added.down, up):
            self._parts.append(matrix.to(torch.float32).contiguous().numpy().reshape(-1))
            self._size += matrix.numel()
        return start, start + added.down.numel(), added.down.shape[0]


def _groups(numbers: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """A few tokens each that have the same adapter, whose numbers ascend."""
    changes = np.flatnonzero(np.diff(numbers)) + 1
    for start, stop in pairwise([0, *changes.tolist(), len(numbers)]):
        for first in range(start, stop, TOKENS_PER_GROUP):
            yield int(numbers[start]) - 1, first, min(first + TOKENS_PER_GROUP, stop)


def _split(linear: Linear, site: Site) -> Iterator[tuple[tuple[int, int, int], tuple[LowRank | None, ...]]]:
    """The site as the kernels see the columns of a product: gates and ups take turns, 16 of each."""
    if linear.activation is None or not linear.activation.gated:
        yield (site.column, site.columns, LANES), site.added
        return
    half = linear.matrix.columns // 2
    for is_up in (0, 1):
        first, stop = max(site.column, is_up * half), min(site.column + site.columns, (1 + is_up) * half)
        if first >= stop:
            continue
        if (first - is_up * half) % LANES:
            raise ModelError(f"Adapters cannot be added to parts of {linear.matrix.parts[0].name}.")
        rows = slice(first - site.column, stop - site.column)
        added = tuple(None if one is None else LowRank(one.down, one.up[rows]) for one in site.added)
        column = (first - is_up * half) // LANES * COLUMNS + is_up * LANES
        yield (column, stop - first, COLUMNS), added
