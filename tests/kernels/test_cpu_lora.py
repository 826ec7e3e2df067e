"""Guards the kernels of adapters against plain products, in sizes of several tasks, and their activation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.kernels.cpu.activation import GELU, SILU, ActivationParams
from cbatch.kernels.cpu.matmul import linear, lora
from cbatch.kernels.cpu.matmul.formats import pack_weight
from cbatch.kernels.cpu.matmul.linear import ACTIVATED, GATED, WRITE, PackedMatrix, new_linear_workspace
from cbatch.kernels.cpu.work_queue import lone_worker
from cbatch.kernels.formats import FLOAT32
from cbatch.model.lora.cpu import CpuAdapters
from cbatch.model.lora.sites import Site
from cbatch.model.lora_files import LowRank
from cbatch.model.ops.all import Activation, Linear, Matrix, Weight
from cbatch.model.ops.cpu_layout import interleaved
from tests.support.kernels import callable_kernel

pytestmark = pytest.mark.kernels

add_adapters, activate_product, matmul = map(callable_kernel, (lora.add_adapters, lora.activate_product, linear.matmul))
DEPTH, COLUMNS, TOKENS = 70, 600, 29
RANKS = ((11, 3, 0), (0, 39, 17))
"""Of each of two sites, for three adapters."""
NOTHING = np.empty(0, np.float32)


def low_rank(rank: int, columns: int, generator: torch.Generator) -> LowRank | None:
    if rank == 0:
        return None
    shapes = (rank, DEPTH), (columns, rank)
    return LowRank(*(torch.randn(shape, generator=generator) for shape in shapes))


def make_linear(kind: str) -> Linear:
    activation = None if kind == "plain" else Activation("silu")
    factor = 1.0 if activation is not None else 0.5
    return Linear("a", "b", Matrix((Weight("w", (COLUMNS, DEPTH)),)), factor=factor, activation=activation)


def added_to(product: Tensor, a: Tensor, numbers: np.ndarray[Any, Any], kind: str) -> Tensor:
    """Adds to a product with the kernels: `plain` columns from 20 on, or `gated`, with gates and ups by turns."""
    one, generator = make_linear(kind), torch.Generator().manual_seed(3)
    places = [(20, 300), (320, 270)] if kind == "plain" else [(0, 300), (300, 300)]
    sites = [
        Site(column, columns, tuple(low_rank(rank, columns, generator) for rank in ranks))
        for (column, columns), ranks in zip(places, RANKS, strict=True)
    ]
    adapters = CpuAdapters({one: tuple(sites)}, 3, 1)
    place, first_tile = adapters.places[one]
    out = product.clone().numpy()
    step = adapters.step(numbers if numbers.any() else None)
    add_adapters(lone_worker(), 0, place, first_tile, DEPTH, a.numpy(), step, out)
    expected = torch.zeros(TOKENS, COLUMNS)
    for site in sites:
        for number, added in enumerate(site.added, 1):
            rows = torch.from_numpy(np.flatnonzero(numbers == number))
            if added is not None:
                delta = a[rows] @ added.down.T @ added.up.T * one.factor
                expected[rows, site.column : site.column + site.columns] += delta
    expected = expected if kind == "plain" else interleaved(expected.T).T
    width = expected.shape[1]
    torch.testing.assert_close(torch.from_numpy(out)[:, :width], product[:, :width] + expected, rtol=1e-4, atol=1e-4)
    return torch.from_numpy(out)


@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_what_is_added(kind: str) -> None:
    """Guards several tasks of ranks and columns, groups of more tokens than one, and adapters that add nothing."""
    generator = torch.Generator().manual_seed(0)
    a, product = (torch.randn(TOKENS, width, generator=generator) for width in (DEPTH, 608))
    numbers = np.random.default_rng(0).integers(0, 4, TOKENS)
    numbers[:12] = 2
    mixed = added_to(product, a, numbers, kind)
    for number in range(4):  # a row has the same bits in other company
        alone = np.where(np.arange(TOKENS) % 3 == 1, number, 0)
        found = added_to(product, a, alone, kind)
        same = torch.from_numpy(numbers == alone)
        assert same.any() and torch.equal(found[same], mixed[same])


@pytest.mark.parametrize(("mode", "kind"), [(GATED, SILU), (GATED, GELU), (ACTIVATED, GELU)])
def test_activation_of_a_product(mode: int, kind: int) -> None:
    """Guards products whose activation is a step of its own: the same numbers as of those that are one."""
    generator = torch.Generator().manual_seed(0)
    a, weight = (torch.randn(rows, 64, generator=generator).numpy() for rows in (TOKENS, 640))
    activation = ActivationParams(kind, NOTHING)
    workspace = new_linear_workspace(1, [FLOAT32], 64)
    matrix = PackedMatrix(pack_weight(weight), 0, FLOAT32, NOTHING, NOTHING)
    expected, found = (np.full((TOKENS, 320 if mode == GATED else 640), np.nan, np.float32) for _ in range(2))
    matmul(lone_worker(), 0, a, matrix, expected, mode, activation, workspace)
    product = np.empty((TOKENS, 640), np.float32)
    matmul(lone_worker(), 0, a, matrix, product, WRITE, activation, workspace)
    activate_product(lone_worker(), 0, product, mode, activation, workspace, found)
    np.testing.assert_array_equal(found, expected)
