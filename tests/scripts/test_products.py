"""Guards the benchmark of matrix products from end to end, with sizes that take milliseconds."""

from __future__ import annotations

import json

import pytest

from cbatch.kernels.cpu.jit import HAS_VNNI
from scripts.benchmarks import products
from scripts.benchmarks.harness import main


@pytest.mark.kernels
@pytest.mark.skipif(not HAS_VNNI, reason="needs AVX-512 VNNI")
def test_every_format_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the kernels that it measures, and the figures of each format and number of rows."""
    monkeypatch.setattr(products, "SHAPES", {"small": (64, 96)})
    for name, value in {"_ARENA_BYTES": 2**21, "_SECONDS": 0.001, "_LOOPS": 100}.items():
        monkeypatch.setattr(products, name, value)
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
