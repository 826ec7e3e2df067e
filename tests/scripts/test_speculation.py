"""The benchmark of speculation: what its work repeats, a model that follows its script, and the whole command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from scripts.benchmarks.harness import main
from scripts.benchmarks.shapes import SHAPES
from scripts.benchmarks.speculation.benchmark import measure
from scripts.benchmarks.speculation.model import load_scripted
from scripts.benchmarks.speculation.work import Copying, Work, random_text, rewriting


@pytest.mark.kernels
@pytest.mark.parametrize("make", [partial(rewriting, Copying(512, tokens=36, span=8)), partial(random_text, 512, 30)])
def test_the_model_says_its_script(make: Callable[[int, int], Work]) -> None:
    """Guards the measurement: the outputs are those of the script with drafts and without, and copies are accepted."""
    loaded, model = load_scripted("tiny", SHAPES["tiny"])
    work = make(2, 0)
    model.script = work.script
    plain, drafting = measure(loaded, work, "off"), measure(loaded, work, 6)
    assert plain.outputs == drafting.outputs == work.outputs and plain.drafted == 0 < drafting.drafted
    assert 0 < drafting.first_s < drafting.seconds
    if make.func is not random_text:
        assert drafting.steps < 0.75 * plain.steps and drafting.accepted > 20
    assert work.outputs is not None
    best = measure(loaded, work, "bound", work.outputs)
    assert best.outputs == work.outputs and best.drafted == best.accepted >= drafting.accepted
    wrong = replace(work, outputs=[*work.outputs[:-1], work.outputs[-1][::-1]])
    with pytest.raises(RuntimeError, match="are not those of the script"):
        measure(loaded, wrong, 6)


@pytest.mark.kernels
def test_all_work_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards the command from end to end: a table for people, and JSON, with the goals where there are any."""
    monkeypatch.setattr("scripts.benchmarks.speculation.work.DEMO_TOKENS", 9)
    options = ["--speculate", "4", "--shape", "tiny", "--tokens", "24", "--span", "6", "--rounds", "1"]
    file = tmp_path / "found.json"
    assert main(["speculation", *options, "--requests", "1", "--bound", "--json", str(file)]) == 0
    data = json.loads(file.read_text())
    assert data["work"].keys() == {"rewriting, 1", "extraction, 1", "random, 1", "demo, 1"}
    assert data["work"]["demo, 1"]["goal"] == 1.2
    for one in data["work"].values():
        assert one["bound"][0]["drafted"] == one["bound"][0]["accepted"]
        assert one["ratio"] > 0 and one["without"][0]["drafted"] == 0 < one["with"][0]["drafted"]
        assert one["without"][0]["tokens"] == one["with"][0]["tokens"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("machine") and any(line.startswith("rewriting, 1 at once") for line in lines)
