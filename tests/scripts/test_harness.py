"""What all benchmarks share: their options, rounds by turns, and results for people and for programs."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.benchmarks import harness
from scripts.benchmarks.harness import BENCHMARKS, Report, by_turns, main, median_by_name, parse


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_options_and_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards benchmarks that no other test runs: they import, and `-h` shows their options."""
    assert parse([name]).json is None and parse([name, "--json"]).json == "-"
    with pytest.raises(SystemExit, match="0"):
        parse([name, "-h"])
    assert "--json" in capsys.readouterr().out


def test_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the list that a wrong name or none gets, with a line on each benchmark."""
    assert main([]) == main(["nothing"]) == 2 and main(["--help"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines[2 : 2 + len(BENCHMARKS)]] == list(BENCHMARKS)
    assert all(line.endswith(".") for line in lines[2 : 2 + len(BENCHMARKS)])


def test_rounds_alternate() -> None:
    """Guards comparisons against a machine that drifts: no way runs twice before all others have run."""
    order: list[str] = []
    found = by_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert order == ["a", "b"] * 3 and {way: len(results) for way, results in found.items()} == {"a": 3, "b": 3}
    assert median_by_name([{"x": 1.0}, {"x": 9.0}, {"x": 2.0}]) == {"x": 2.0}


@dataclass(frozen=True)
class Figures:
    speed: float


def test_results_are_lines_or_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards both forms of results: with `--json` stdout is one object; a file gets it beside the lines."""

    def run(options: argparse.Namespace, report: Report) -> int:
        report.line("a line")
        report.figures["found"] = [Figures(1.5)]
        return 0

    benchmark = SimpleNamespace(add_options=lambda parser: None, run=run)
    monkeypatch.setattr(harness, "load_benchmark", lambda name: benchmark)
    assert main(["rows", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"found": [{"speed": 1.5}]}
    assert main(["rows", "--json", str(tmp_path / "figures.json")]) == 0
    assert capsys.readouterr().out == "a line\n"
    assert json.loads((tmp_path / "figures.json").read_text()) == {"found": [{"speed": 1.5}]}
