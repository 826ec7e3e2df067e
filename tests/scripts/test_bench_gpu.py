"""Guards the script that measures a GPU: it has to work at once when there is a GPU for a short time."""

from __future__ import annotations

import json
import logging
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.device import DEVICE, HAS_GPU

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from scripts import bench_gpu
from scripts.gpu import runs, suite
from scripts.gpu.goals import GoalResult, check_goals
from scripts.gpu.load import Served, Steady
from scripts.gpu.runs import Run
from scripts.gpu.speed import Line

TINY = ["--device", DEVICE.type, "--tiny"]


Measure = Callable[..., dict[str, Any]]


@pytest.fixture
def measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Measure:
    """Runs the script with tiny sizes. Returns what it wrote as JSON, with all that it printed as `log`."""

    def run(*options: str) -> dict[str, Any]:
        assert bench_gpu.main([*TINY, *options, "--out", str(tmp_path / "out")]) == 0, capsys.readouterr()
        results: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
        log = (tmp_path / "out.log").read_text()
        assert capsys.readouterr().out == log
        return results | {"log": log}

    return run


@pytest.mark.slow
def test_attention_is_measured(measure: Measure) -> None:
    """Guards the script from end to end, with Triton's interpreter: a sample of `test_every_part_runs`."""
    results = measure("--shapes", "0.6B", "--only", "attention")
    assert results.keys() - {"warnings"} == {"machine", "attention", "log"} and len(results["attention"]) >= 2
    assert results["machine"]["name"] in results["log"].splitlines()[0]


@pytest.mark.exhaustive
def test_every_part_runs(measure: Measure) -> None:
    """Guards attention, steps and whole runs from end to end, with tiny sizes and Triton's interpreter."""
    results = measure("--shapes", "0.6B", "--peer-requests", "2", "--only", "checks,attention,yardstick,model")
    assert results["checks"][0] == "0.6B, stepped down: no" and len(results["checks"]) > 5
    assert all(check["agrees"] and check["what"].startswith("0.6B, ") for check in results["checks"][1:])
    assert any(check["share"] for check in results["checks"][1:])
    assert len(results["attention"]) >= 2 and len(results["model 0.6B"]) >= 6
    assert all(line.get("figure", line.get("tokens_per_s")) > 0 for line in results["model 0.6B"])
    assert not any(line.get("error") for line in results["model 0.6B"])
    assert results["yardstick"][0] == "256 requests, 142,827 prompt tokens, 133,966 output tokens"
    assert all(line["tokens_per_s"] > 0 and line["requests"] == 8 for line in results["yardstick"][1:])


def test_the_yardstick_is_that_of_the_field() -> None:
    """Guards the draw: with the same numbers of tokens for each request, figures of others can stand beside ours."""
    work = runs.yardstick()
    assert (len(work.prompts), work.output_tokens) == (256, 133_966)
    assert {100 <= len(prompt) <= 1024 for prompt in work.prompts} == {True}
    assert (work.output_lengths[:3], work.prompts[0][:3]) == ([845, 312, 607], [6311, 6890, 663])


@pytest.mark.slow
def test_load_runs(measure: Measure) -> None:
    """Guards `--load` from end to end, with tiny sizes."""
    lines = measure("--load")["load 8B"]
    assert [line["overlapped"] for line in lines[:2]] == [False, True]
    assert all(line["tokens_per_s"] > 0 and 0 <= line["idle_share"] < 1 for line in lines[:2])
    assert all((line["gap_share"] is not None) == HAS_GPU for line in lines[:2])
    assert lines[4]["users"] == 2 and lines[4]["share"] == lines[5]["share"] == 1.0
    assert lines[-1].startswith("8B: the SLO holds for 2 users")


@pytest.mark.slow
def test_the_cost_of_determinism_is_measured(measure: Measure) -> None:
    """Guards `--deterministic`, on the fast path of the device: both runs, their ratio, bits alone and together."""
    results = measure("--deterministic", "--shapes", "0.6B")
    plain, fixed, cost, without, with_ = results["deterministic 0.6B"]
    assert plain["by"] == "cbatch" and fixed["by"] == "cbatch, deterministic" and not fixed["error"]
    assert cost["ratio"] == pytest.approx(plain["tokens_per_s"] / fixed["tokens_per_s"])
    assert not without["deterministic"] and with_["deterministic"]
    assert (with_["requests"], with_["same_bits"], with_["same_tokens"]) == (2, 2, 2)


def test_a_part_that_fails_does_not_end_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the other parts, and the report of the failure."""
    report = bench_gpu.Report()
    report.part("one", lambda: iter([1 // 0]))
    report.part("two", lambda: iter(["fine"]))
    assert report.failed == ["one"] and report.results["two"] == ["fine"]
    assert report.results["one"] == [{"failed": "ZeroDivisionError: integer division or modulo by zero"}]
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_warnings_of_the_engine_are_reported(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards figures of an engine that has stepped down: the log and the JSON say so."""
    warn = logging.getLogger("cbatch").warning
    monkeypatch.setattr(bench_gpu, "parts_of", lambda *_: {"one": lambda: iter([warn("It is slow: %s.", "no graphs")])})
    monkeypatch.setattr(bench_gpu, "describe", lambda *_: None)
    results = measure()
    assert results["warnings"] == ["It is slow: no graphs."] and "warning: It is slow: no graphs." in results["log"]


def test_failing_tests_fail_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the exit status, tests that hang, and the report: failures and their sum, without dots."""
    commands: list[list[str]] = []
    printed = ["..F.x  [ 50%]", ".....  [100%]", "", "FAILED tests/a.py::b - assert 0", "1 failed in 3s"]

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if len(commands) == 3:
            raise subprocess.TimeoutExpired(command, options["timeout"], b"tests/a.py::b\n")
        return subprocess.CompletedProcess(command, len(commands) - 1, "\n".join(printed))

    monkeypatch.setattr(subprocess, "run", run)
    assert list(suite.test_lines(on_gpu=True, few=False)) == printed[-2:]
    assert commands[0][-len(suite.modules()) - 2 :] == ["-m", "gpu", *suite.modules()]
    for reason in ("pytest ended with exit code 1.", "The tests were not finished after 450 s."):
        with pytest.raises(RuntimeError, match=f"^{re.escape(reason)}$"):
            list(suite.test_lines(on_gpu=False, few=True))
    assert commands[1][-2:] == ["kernels", "tests/kernels/test_triton_layer.py"]
    assert {Path(path).name for path in suite.modules()} >= {"test_triton_attention.py", "test_cuda_graphs.py"}


DECODE = Line("a", 1.0, "GB/s", 0.86, "decode attention", 256)
RUN, SMALL_RUN = (Run("c", shape, 512, "cbatch", 1.0, share) for shape, share in (("8B", 0.76), ("0.6B", 0.7)))
STEADY = Steady("b", 256, True, 1.0, 0.01, 0.009, 0.04)
SERVED = Served("d", "8B", 128, 1.0, 0.4, 0.019, 1.0, "")
OTHERS = [
    "text",
    replace(DECODE, kind="prefill attention", share=0.2),
    replace(RUN, requests=128, share=0.2),
    replace(RUN, by="transformers-cb", share=0.2),
    replace(STEADY, overlapped=False, idle_share=0.3),
    replace(SERVED, users=256, ttft_p99_s=4.0),
]


def test_goals_are_found() -> None:
    """Guards each goal: its own figure decides, and what was not measured is neither reached nor missed."""

    def reached(*lines: Any) -> list[bool | None]:
        return [result.is_reached for result in check_goals([*OTHERS, *lines])]

    assert reached() == [None] * 5
    assert reached(DECODE, RUN, SMALL_RUN, STEADY, SERVED) == [True] * 5
    missed = replace(DECODE, share=0.84), replace(RUN, share=0.74), replace(SMALL_RUN, share=0.69)
    assert reached(*missed, replace(STEADY, idle_share=0.011), replace(SERVED, ttft_p99_s=0.51)) == [False] * 5
    for bad in ({"error": "nan_logits"}, {"ttft_p99_s": None}, {"tpot_p99_s": 0.021}):
        assert reached(replace(SERVED, **bad))[4] is False  # type: ignore[arg-type]
    text = str(next(check_goals([DECODE])))
    assert text == "goal reached: decode attention reads 256 ragged sequences at 85% of the copy rate (86.0%)"
    assert "not measured: x (measured by --load)" in str(GoalResult("x", None, "measured by --load"))


def test_a_machine_without_a_gpu_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards the sentences for a missing device and an unknown shape."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert bench_gpu.main([]) == 2 and "no CUDA device" in capsys.readouterr().err
    assert bench_gpu.main(["--device", "cpu", "--shapes", "9B"]) == 2 and "no shape '9B'" in capsys.readouterr().err
