"""Benchmarks: their options, rounds by turns, results for people and for programs; and small ones from end to end."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from cbatch.kernels.formats import FP8, INT8
from scripts.benchmarks import company, products, rounding
from scripts.benchmarks.harness import BENCHMARKS, by_turns, main, median_by_name, parse
from scripts.benchmarks.lengths import mean_longest, read_lengths
from scripts.benchmarks.long_prompt import Gap, Pause, ratio_of
from scripts.benchmarks.models import in_float8
from scripts.benchmarks.shapes import SHAPES, TINY

Measure = Callable[[str], Any]


@pytest.fixture
def measure(capsys: pytest.CaptureFixture[str]) -> Measure:
    """Runs a benchmark. Returns its figures."""

    def run(command: str) -> Any:
        assert main([*command.split(), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


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


def test_random_float8_weights_are_the_same_numbers_on_every_device() -> None:
    """Guards FP8 weights on a CPU, which has int8 for them: bytes of e4m3 are no integers."""
    weights = in_float8({"up_proj.weight": torch.randn(8, 64, generator=torch.Generator().manual_seed(0))})
    rows, matrix = np.arange(8), weights.matrices["up_proj.weight"]
    numbers = matrix.values(rows)
    assert matrix.packing is not None
    assert torch.equal(matrix.integers(rows, FP8).values(FP8, matrix.packing.group), numbers)
    half_step = numbers.abs().max() / 127 * 0.51
    assert (matrix.integers(rows, INT8).values(INT8) - numbers).abs().max() < half_step


def test_the_host_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the names of the phases, with and without overlap scheduling, and the share beside a real model."""
    main(["host", "--rows", "3", "--context", "9", "--steps", "14"])
    lines = capsys.readouterr().out.splitlines()
    assert ["overlapped" in line for line in lines] == [False, True]
    assert all(phase in line for line in lines for phase in ("schedule", "build", "sample", "fetch", "update", "step"))
    main(["host", "--share", "--shape", "tiny", "--rounds", "2"])
    a_round, last = capsys.readouterr().out.splitlines()
    assert "ms a step" in a_round and 0 < float(last.removesuffix("%").rpartition(" ")[2]) < 100


def test_the_company_of_busy_processes(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the figures by their names, and that no neighbour is left."""
    monkeypatch.setattr(company, "WORK", {"prompts": (1, 4, 1)})
    before, children = torch.get_num_threads(), psutil.Process().children()
    found = measure("company --shape tiny --rounds 1 --threads 2")
    torch.set_num_threads(before)
    assert found["prompts"].keys() == {"alone", "in_company", "of_fair"} and found["prompts"]["alone"] > 0
    assert psutil.Process().children() == children


def test_lengths_of_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the readers: numbers and texts of CSV, JSON Lines and an array, without those below 1; and the table."""
    rows = [{"output": "four"}, {"output": ""}, {"output": 7}]
    (tmp_path / "b.json").write_text(json.dumps(rows))
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_lengths(tmp_path / "b.json", "output") == read_lengths(tmp_path / "c.jsonl", "output") == [4, 7]
    (tmp_path / "a.csv").write_text("time,n\n7,1\n8,0\n9,3\n")
    assert main(["lengths", str(tmp_path / "a.csv"), "--column", "n", "--slots", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["a.csv", "2", "2", "2", "3", "0.55", "1.25", "0.46"]
    counted = mean(max(batch) for batch in itertools.product([1.0, 2.0, 4.0, 10.0], repeat=3))
    assert mean_longest([1.0, 2.0, 4.0, 10.0], 3) == pytest.approx(counted)


@pytest.mark.slow
def test_long_prompts_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards lines and JSON for each target, and the ratio: gaps are compared with those of rows that are as long."""
    assert main(["fairness", "--tiny", "--json", str(tmp_path / "found.json"), "--fixed-ms", "7.5"]) == 0
    data = json.loads((tmp_path / "found.json").read_text())
    assert [one["target"] for one in data["found"]] == ["none", "auto", "7.5 ms"]
    for one in data["found"]:
        assert 0 < one["gaps"][0] <= one["gaps"][1] <= one["gaps"][2] and one["prompt_s"] > 0
        assert one["ratio"] > 0 and one["steady_ratio"] >= 1 and one["times_alone"] > 0 and min(one["short_s"]) > 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["none", "auto", "7.5 ms"]
    pauses = [Pause(0.0, 1.0, [Gap(9, 0.1), Gap(11, 0.1)]), Pause(5.0, 6.0, [Gap(29, 0.3), Gap(31, 0.3)])]
    assert ratio_of([Gap(10, 0.2), Gap(20, 0.4), Gap(30, 0.6)], pauses) == pytest.approx(2.0)


@pytest.mark.kernels
@pytest.mark.slow
def test_every_rounding_is_measured(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the losses of formats: more bits lose less, in cbatch and as llama.cpp rounds."""
    names = ["bfloat16", "int8, activations int8"]
    monkeypatch.setattr(rounding, "ROUNDINGS", {name: rounding.ROUNDINGS[name] for name in names})
    monkeypatch.setattr(rounding, "SHAPES", {"small": SHAPES["135m"] | TINY})
    found = measure("rounding --shape small --layers 2 --tokens 24")["small"]
    caches = ["float32, KV Q8_0 of llama.cpp", "float32, KV u8"]
    floats = ["float32, FP8, rows", "float32, FP8, rows, activations fp8"]
    assert list(found) == ["Q8_0 of llama.cpp", "Q4_0 of llama.cpp", *caches, *floats, *names]
    loss = {name: figures["divergence"] for name, figures in found.items()}
    assert 0 < loss[floats[0]] < loss[floats[1]] < loss["Q4_0 of llama.cpp"]
    assert 0 < loss["bfloat16"] < loss["int8, activations int8"] < loss["Q4_0 of llama.cpp"]
    assert all(0 < loss[cache] < loss["Q8_0 of llama.cpp"] < loss["Q4_0 of llama.cpp"] for cache in caches)


@pytest.mark.exhaustive  # compiles kernels of its own
@pytest.mark.kernels
def test_products_are_measured(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the kernels that are measured, and the figures of each format and number of rows."""
    monkeypatch.setattr(products, "SHAPES", {"small": (64, 96)})
    for name, value in {"_ARENA_BYTES": 2**21, "_SECONDS": 0.001, "_LOOPS": 100}.items():
        monkeypatch.setattr(products, name, value)
    found = measure("products --rows 1 --rows 3 --rounds 1")
    assert list(found) == ["small, bfloat16", "small, int8", "small, int4"]
    for by_rows in found.values():
        assert list(by_rows) == ["1", "3"]
        assert all(figure > 0 for figures in by_rows.values() for figure in figures.values())


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
def test_replicas_are_measured(measure: Measure) -> None:
    """Guards the benchmark of replicas: rows reach paced replicas and come back, at all three speeds."""
    rates = "--rows-per-s 300 --alone-rows-per-s 300 --tail-rows-per-s 400"
    figures = measure(f"replicas --replicas 2 --seconds 0.3 {rates}")
    counts = {name: (figures[name]["replicas"], figures[name]["rows"]) for name in ("alone", "many", "limit")}
    assert counts == {"alone": (1, 90), "many": (2, 180), "limit": (2, 180)}
    assert figures["linear"] > 0 and min(figures["tails"].values()) >= 0
