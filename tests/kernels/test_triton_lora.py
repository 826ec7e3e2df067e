"""Guards what adapters add to products, by Triton's kernels and by torch, against products in float64, row by row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.model.lora.device import adapter_weights, add_adapters, rows_on
from cbatch.model.lora.sites import Site
from cbatch.model.lora_files import LowRank
from cbatch.model.ops.device_kernel import DeviceOps, by_torch, by_triton
from tests.support.device import DEVICE
from tests.support.kernels import draw

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

pytestmark = pytest.mark.kernels

OPS = {"triton": by_triton(DEVICE), "torch": by_torch()}
STEPS = {
    "decoding": [2, 0, 1, 3, 1, 0, 2],
    "one": [3],
    "none": [0, 0, 0],
    "prompts": [0] * 5 + [1] * 21 + [3] * 2 + [2] * 40,
    "many rows": [0] * 30 + [4] * 60 + [1] * 90,
}
"""Numbers of the adapters of each token. Tiles have rows of several adapters, and of none."""


def low_rank(columns: int, depth: int, rank: int, seed: int) -> LowRank:
    return LowRank(draw(rank, depth, seed=seed).cpu() * depth**-0.5, draw(columns, rank, seed=seed + 1).cpu())


def sites(depth: int) -> list[Site]:
    """Those of four adapters: of several ranks, without some parts, of parts of one stored matrix, or without any."""
    whole = low_rank(170, depth, 6, 5)
    parts = [LowRank(whole.down, part) for part in torch.split(whole.up, [70, 100])]
    return [
        Site(0, 70, (low_rank(70, depth, 3, 1), None, parts[0], None)),
        Site(70, 100, (low_rank(100, depth, 70, 2), low_rank(100, depth, 16, 3), parts[1], None)),
        Site(180, 20, (low_rank(20, depth, 1, 4), None, None, None)),
    ]


def expected(given: Sequence[Site], numbers: Sequence[int], source: Tensor, out: Tensor) -> Tensor:
    wide = out.double()
    for row, number in enumerate(numbers):
        for site in given:
            if number and (one := site.added[number - 1]) is not None:
                down, up = (matrix.double().to(DEVICE) for matrix in (one.down, one.up))
                wide[row, site.column : site.column + site.columns] += up @ (down @ source[row].double())
    return wide


def added(ops: DeviceOps, given: Sequence[Site], numbers: Sequence[int], source: Tensor, out: Tensor) -> Tensor:
    rows, found = rows_on(DEVICE, np.array(numbers)), out.clone()
    add_adapters(ops, source, rows, adapter_weights(given, source.dtype, DEVICE), found)
    return found


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # Triton's interpreter cannot multiply bfloat16
@pytest.mark.parametrize("name", OPS)
def test_adapters(name: str, dtype: torch.dtype, step: str) -> None:
    """Guards each row: its own adapter, all its ranks and columns, a depth of several parts, and nothing else."""
    for depth in (40, 1100):
        numbers, given = STEPS[step], sites(depth)
        source, out = draw(len(numbers), depth, dtype=dtype), draw(len(numbers), 210, dtype=dtype, seed=9)
        found = added(OPS[name], given, numbers, source, out)
        wanted = expected(given, numbers, source, out)
        error = (found.double() - wanted).abs().amax(1) / wanted.abs().amax(1)
        assert float(error.max()) < (1e-5 if dtype == torch.float32 else 3e-3)
        assert torch.equal(found[:, 170:180], out[:, 170:180]) and torch.equal(found[:, 200:], out[:, 200:])
        untouched = [row for row, number in enumerate(numbers) if number in (0, 4)]
        assert torch.equal(found[untouched], out[untouched])


@pytest.mark.usefixtures("placeless_products")
def test_company_changes_no_bit() -> None:
    """Guards `--deterministic`: a row has the same bits alone, and in tiles with rows of other adapters."""
    numbers, given, ops = STEPS["many rows"] + [2] * 9, sites(1100), DeviceOps(True, True, True, 90)
    source, out = draw(len(numbers), 1100), draw(len(numbers), 210, seed=9)
    source[0] = torch.nan  # of no adapter
    together = added(ops, given, numbers, source, out)
    for row in (1, 30, 95, 185):
        alone = added(ops, given, [numbers[row]], source[row : row + 1], out[row : row + 1])
        assert torch.equal(alone[0], together[row])


def test_two_launches_for_all_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the number of launches, which was one for each adapter, part and matrix."""
    from cbatch.kernels.triton import lora

    launched = list[str]()
    for name in ("_shrink_kernel", "_expand_kernel"):
        kernel = getattr(lora, name)

        class Counted:
            def __getitem__(self, grid: object, kernel: object = kernel, name: str = name) -> object:
                launched.append(name)
                return kernel[grid]  # type: ignore[index]

        monkeypatch.setattr(lora, name, Counted())
    added(OPS["triton"], sites(40), [1, 2, 3, 0, 4], draw(5, 40), draw(5, 210, seed=9))
    assert launched == ["_shrink_kernel", "_expand_kernel"]
