"""Guards the benchmark of matrix products: what its shares mean, and that it measures every format."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from cbatch.kernels.cpu.jit import HAS_VNNI
from cbatch.kernels.cpu.matmul.formats import matrix_bytes
from cbatch.kernels.cpu.thread_pool import shared_thread_pool
from cbatch.kernels.formats import BFLOAT16, INT8
from scripts.benchmarks import products
from scripts.benchmarks.harness import main

DEPTH, COLUMNS = 64, 96


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that take milliseconds."""
    monkeypatch.setattr(products, "SHAPES", {"small": (DEPTH, COLUMNS)})
    for name, value in {"_ARENA_BYTES": 2**21, "_SECONDS": 0.001, "_LOOPS": 100}.items():
        monkeypatch.setattr(products, name, value)


@pytest.mark.kernels
@pytest.mark.parametrize("kind", [BFLOAT16, INT8])
def test_shares_are_those_of_the_medians(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the arithmetic: bytes are those of the packed matrix, operations two for each product of numbers."""
    measured = products._Products(shared_thread_pool(1), kind, DEPTH, COLUMNS, 4, 1)
    seconds = iter((1.0, 9.0, 2.0))
    monkeypatch.setattr(measured, "seconds_of", lambda rows: lambda: next(seconds))
    monkeypatch.setattr(measured, "bandwidth", lambda: 1e4)
    monkeypatch.setattr(measured, "matrix_rate", lambda: 1e5)
    size, operations = matrix_bytes(kind, COLUMNS, DEPTH), 2 * 4 * DEPTH * COLUMNS
    assert measured.measure([4], 3) == {
        4: {
            "seconds": 2.0,
            "bytes/s": size / 2,
            "share of bandwidth": size / 2 / 1e4,
            "flop/s": operations / 2,
            "share of matrix rate": operations / 2 / 1e5,
        }
    }


@pytest.mark.kernels
def test_products_take_all_matrices_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards measurements against weights that stay in a cache: each product goes on where the last one ended."""
    calls: list[tuple[int, int]] = []
    measured = products._Products(shared_thread_pool(1), INT8, DEPTH, COLUMNS, 2, 1)

    def record(function: Any, left: Any, matrix: Any, size: int, first: int, times: int, *rest: Any) -> None:
        assert len(matrix.data) // size > 100 and len(matrix.data) % size == 0
        calls.append((first, times))

    monkeypatch.setattr(measured, "pool", type("Pool", (), {"run": staticmethod(record)}))
    measured.seconds_of(2)()
    assert len(calls) == 5
    assert all(after[0] == before[0] + before[1] for before, after in pairwise(calls))


@pytest.mark.kernels
@pytest.mark.skipif(not HAS_VNNI, reason="needs AVX-512 VNNI")
def test_every_format_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the benchmark from end to end, with the kernels that it measures."""
    assert main(["products", "--rows", "1", "--rows", "3", "--rounds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["small, bfloat16", "small, int8", "small, int4"]
    for by_rows in found.values():
        assert list(by_rows) == ["1", "3"]
        assert all(figure > 0 for figures in by_rows.values() for figure in figures.values())


def test_other_processors_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards processors without the instructions: they get a sentence and not a crash."""
    monkeypatch.setattr(products, "HAS_VNNI", False)
    assert main(["products"]) == 1
    assert "AVX-512" in capsys.readouterr().err
