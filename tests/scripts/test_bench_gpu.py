"""Guards the script that measures a GPU: it has to work at once when there is a GPU for a short time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.device import DEVICE

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from scripts import bench_gpu
from scripts.gpu import checks


@pytest.mark.slow
def test_every_part_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards attention, steps and whole runs from end to end, with tiny sizes and Triton's interpreter."""
    out = tmp_path / "results.json"
    options = ["--device", DEVICE.type, "--tiny", "--shapes", "8B", "--peer-requests", "2", "--only", "attention,model"]
    assert bench_gpu.main([*options, "--json", str(out)]) == 0, capsys.readouterr()
    results = json.loads(out.read_text())
    assert set(results) == {"machine", "attention", "model 8B"}
    assert len(results["attention"]) == 2 and len(results["model 8B"]) == 8
    assert all(line.get("figure", line.get("tokens_per_s")) > 0 for line in results["model 8B"])
    assert not any(line.get("error") for line in results["model 8B"])


def test_sampling_is_checked() -> None:
    """Guards the check of the sampler, whose requests no engine has made."""
    name, is_right, figure = checks.check_sampling(5, 300, DEVICE)
    assert name == "sampling" and is_right and figure.startswith("5 of 5")


@pytest.mark.slow
def test_load_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards `--load` from end to end, with tiny sizes."""
    out = tmp_path / "results.json"
    assert bench_gpu.main(["--device", DEVICE.type, "--tiny", "--load", "--json", str(out)]) == 0, capsys.readouterr()
    lines = json.loads(out.read_text())["load 8B"]
    assert [line["what"] for line in lines[:2]] == ["8B, 4 requests, step by step", "8B, 4 requests, overlapped"]
    assert all(line["tokens_per_s"] > 0 and 0 < line["idle_share"] < 1 for line in lines[:2])
    assert ["none:" in line for line in lines[2:4]] == [True, False] and "auto:" in lines[3]
    assert lines[4]["users"] == 2 and lines[4]["share"] == lines[5]["share"] == 1.0
    assert lines[-1].startswith("8B: the SLO holds for 2 users")


def test_a_part_that_fails_does_not_end_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the other parts, and the report of the failure."""
    report = bench_gpu.Report()
    report.part("one", lambda: iter([1 // 0]))
    report.part("two", lambda: iter(["fine"]))
    assert report.failed == ["one"] and report.results["two"] == ["fine"]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_machine_without_a_gpu_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards the sentences for a missing device and an unknown shape."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert bench_gpu.main([]) == 2 and "no CUDA device" in capsys.readouterr().err
    assert bench_gpu.main(["--device", "cpu", "--shapes", "9B"]) == 2 and "no shape '9B'" in capsys.readouterr().err
