"""Benchmarks: their options, rounds by turns, results for people and for programs; and small ones from end to end."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import pytest

from scripts.benchmarks import harness
from scripts.benchmarks.harness import BENCHMARKS, Report, by_turns, main, median_by_name, parse
from scripts.benchmarks.lengths import mean_longest, read_lengths


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_options(name: str) -> None:
    """Guards benchmarks that no other test runs: they import and take options."""
    assert parse([name]).json is None and parse([name, "--json"]).json == "-"


def test_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the list that a wrong name gets, with a line on each benchmark."""
    assert main(["nothing"]) == 2
    assert re.findall(r"^ +(\S+) .*\.$", capsys.readouterr().err, re.MULTILINE) == list(BENCHMARKS)


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


def test_every_phase_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the names of the phases, with and without overlap scheduling, from end to end."""
    main(["host", "--rows", "3", "--context", "9", "--steps", "14"])
    lines = capsys.readouterr().out.splitlines()
    assert ["overlapped" in line for line in lines] == [False, True]
    assert all(phase in line for line in lines for phase in ("schedule", "build", "sample", "fetch", "update", "step"))


def test_the_share_beside_a_real_model_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards `--share` on a small model: a line for each round, and a share between 0 and 100%."""
    main(["host", "--share", "--shape", "tiny", "--rounds", "2"])
    *rounds, last = capsys.readouterr().out.splitlines()
    assert len(rounds) == 1 and all("ms a step" in line for line in rounds)
    assert 0 < float(last.removesuffix("%").rpartition(" ")[2]) < 100


def test_lengths_of_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the readers: numbers and texts of CSV, JSON Lines and an array, without those below 1; and the table."""
    (tmp_path / "a.csv").write_text("TIMESTAMP,GeneratedTokens\n1,44\n2,0\n3,109\n")
    rows = [{"output": "four"}, {"output": ""}, {"output": 7}]
    (tmp_path / "b.json").write_text(json.dumps(rows))
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_lengths(tmp_path / "a.csv", "GeneratedTokens") == [44, 109]
    assert read_lengths(tmp_path / "b.json", "output") == read_lengths(tmp_path / "c.jsonl", "output") == [4, 7]
    with pytest.raises(ValueError, match="row 1: there is no column 'text', but output"):
        read_lengths(tmp_path / "b.json", "text")
    (tmp_path / "a.csv").write_text("n\n1\n3\n")
    assert main(["lengths", str(tmp_path / "a.csv"), "--column", "n", "--slots", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["a.csv", "2", "2", "2", "3", "0.55", "1.25", "0.46"]
    counted = mean(max(batch) for batch in itertools.product([1.0, 2.0, 4.0, 10.0], repeat=3))
    assert mean_longest([1.0, 2.0, 4.0, 10.0], 3) == pytest.approx(counted)


@pytest.mark.slow
def test_steps_are_measured_launched_and_captured() -> None:
    """Guards the benchmark of launches against steps that find no graph, and a model that its driver does not know."""
    pytest.importorskip("triton", reason="the kernels for a GPU need Triton")
    options = "launches --shape 0.6B --rows 3 --rounds 1 --json".split()
    done = subprocess.run([sys.executable, "-m", "scripts.benchmarks", *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["0.6B"]
    assert set(found) == {"decode, 3 rows", "mixed, 3 rows"}
    assert all(0 < figures["captured"] < figures["launched"] for figures in found.values())


@pytest.mark.slow
def test_replicas_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the benchmark of replicas: rows reach paced replicas and come back, at all three speeds."""
    rates = ["--rows-per-s", "300", "--alone-rows-per-s", "300", "--tail-rows-per-s", "400"]
    assert main(["replicas", "--replicas", "2", "--seconds", "0.3", *rates, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    counts = {name: (figures[name]["replicas"], figures[name]["rows"]) for name in ("alone", "many", "limit")}
    assert counts == {"alone": (1, 90), "many": (2, 180), "limit": (2, 180)}
    assert figures["linear"] > 0 and min(figures["tails"].values()) >= 0
