"""The command for a borrowed GPU: a stage that hangs costs no other, and calls go on from each other."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu import first_half_hour, page
from scripts.gpu.first_half_hour import CALL_S, Folder, Stage, make_stages, run_call

WRITE = "import json, sys; json.dump({'speed': ['0.6B, decode: 7 tokens/s']}, open('{out}.json', 'w'))"


def stage(name: str, code: str, part: int = 1, limit_s: float = 20.0) -> Stage:
    return Stage(name, part, limit_s, (sys.executable, "-c", code))


def run(path: Path, stages: Sequence[Stage], part: int = 1, call_s: float = 60.0) -> tuple[list[str], dict[str, Any]]:
    folder = Folder(path)
    folder.state["machines"] = [{"device": "a GPU", "versions": "torch 1"}]
    lines = list(run_call(folder, stages, part, call_s, "a GPU"))
    return lines, json.loads((path / "state.json").read_text())["stages"]


def test_a_stage_that_hangs_or_fails_costs_no_other(tmp_path: Path) -> None:
    """Guards the rest of a borrowed half hour, and the figures that a stage has written before it was killed."""
    hang = f"{WRITE}; import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    stages = [stage("hangs", hang, limit_s=2.0), stage("fails", "raise SystemExit('no driver')"), stage("good", WRITE)]
    began = time.monotonic()
    lines, found = run(tmp_path, stages)
    assert time.monotonic() - began < 20
    assert [found[one.name]["status"] for one in stages] == ["killed", "failed", "done"]
    assert found["hangs"]["results"] == found["good"]["results"] == {"speed": ["0.6B, decode: 7 tokens/s"]}
    assert "left for other calls: nothing" in lines and any("no driver" in line for line in lines)
    text = (tmp_path / "page.md").read_text()
    assert "| good | 0.6B, decode | 7 tokens/s |" in text and "| hangs | it was killed after 2 s |" in text
    assert "| fails | it ended with status 1 |" in text


def test_calls_go_on_from_each_other(tmp_path: Path) -> None:
    """Guards figures that are measured twice or never: each call has the stages that fit, and leaves the others."""
    stages = [stage("one", WRITE), stage("large", WRITE, limit_s=50.0), stage("two", WRITE, part=2)]
    lines, found = run(tmp_path, stages, call_s=40.0)
    assert list(found) == ["one", "two"] and lines[-1] == "left for other calls: large"
    assert "| large | not run yet |" in (tmp_path / "page.md").read_text()
    lines, found = run(tmp_path, stages, part=3)
    assert list(found) == ["one", "two", "large"] and lines[0] == "large ..."
    assert run(tmp_path, stages)[0] == ["left for other calls: nothing"]


def test_a_call_that_was_killed_is_noticed(tmp_path: Path) -> None:
    """Guards a stage during which a machine was taken away: it is said to be missing, and not begun for ever."""
    folder = Folder(tmp_path)
    folder.state["stages"]["one"] = {"status": "begun", "device": "a GPU", "results": {}}
    folder.save([])
    assert Folder(tmp_path).state["stages"]["one"]["reason"] == "the call ended while it ran"


def test_a_call_that_gets_term_leaves_its_page(tmp_path: Path) -> None:
    """Guards what a stage has measured when a scheduler ends the call: it stands on the page, and nothing runs on."""
    end = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with pytest.raises(SystemExit):
            run(tmp_path, [stage("one", f"{WRITE}; {end}"), stage("two", WRITE)])
    finally:
        signal.signal(signal.SIGTERM, before)
    text = (tmp_path / "page.md").read_text()
    assert "| one | 0.6B, decode | 7 tokens/s |" in text and "| one | the call ended while it ran |" in text
    assert "| two | not run yet |" in text


def test_what_failed_runs_again(tmp_path: Path) -> None:
    """Guards `--again`: `failed` is all that was not done, a name is that stage, and no other name is taken."""
    folder = Folder(tmp_path)
    for name, status in (("one", "done"), ("two", "failed"), ("three", "killed"), ("four", "done")):
        folder.state["stages"][name] = {"status": status, "device": "a GPU", "results": {}}
    folder.forget(["failed", "four"])
    assert list(folder.state["stages"]) == ["one"]
    assert first_half_hour.main([str(tmp_path), "--again", "fail"]) == 2


def test_of_a_sweep_the_best_stands_on_the_page() -> None:
    """Guards the page's length, and the point to choose: the largest share of each kind, not the first or last."""
    points = [
        {"text": f"{kind}, {warps} warps: {share} GB/s", "kind": kind, "share": share}
        for kind, warps, share in (("decode", 2, 0.5), ("decode", 4, 0.9), ("prefill", 8, 0.4), ("decode", 8, 0.7))
    ]
    assert list(page.figures({"sweep": [*points, {"failed": "OutOfResources"}]})) == [
        ("best of 3, decode, 4 warps", "0.9 GB/s"),
        ("best of 1, prefill, 8 warps", "0.4 GB/s"),
    ]


@pytest.mark.parametrize("rehearse", [True, False])
def test_stages_fit_into_three_calls(rehearse: bool) -> None:
    """Guards a call that a borrowed machine ends: the limits of its stages are less than it has."""
    stages = make_stages(rehearse=rehearse)
    assert len({one.name for one in stages}) == len(stages)
    for part in (1, 2, 3):
        assert sum(one.limit_s for one in stages if one.part == part) <= CALL_S


def test_missing_packages_are_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a bare machine: what it lacks, and what is lost by that."""
    find = first_half_hour.find_spec
    monkeypatch.setattr(first_half_hour, "find_spec", lambda name: None if name in ("gguf", "pytest") else find(name))
    assert "missing: pytest; no tests" in first_half_hour.missing_packages()
    assert "missing: gguf; no tests of GGUF files and adapters" in first_half_hour.missing_packages()
