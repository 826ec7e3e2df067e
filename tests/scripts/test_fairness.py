"""The benchmark of long prompts: it runs from end to end, and compares gaps of rows that are as long."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.benchmarks.harness import main
from scripts.benchmarks.long_prompt import Gap, Pause, ratio_of


@pytest.mark.slow
def test_all_targets_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the whole benchmark with tiny sizes, its lines and its JSON: requests and prompts for each target."""
    assert main(["fairness", "--tiny", "--json", str(tmp_path / "found.json"), "--fixed-ms", "7.5"]) == 0
    data = json.loads((tmp_path / "found.json").read_text())
    assert data["sizes"]["rows"] == 2 and data["device"] == "cpu"
    assert [one["target"] for one in data["found"]] == ["none", "auto", "7.5 ms"]
    for one in data["found"]:
        before, after = one["steady"]
        assert 0 < before[0] <= before[1] and 0 < after[0] <= after[1]
        assert 0 < one["gaps"][0] <= one["gaps"][1] <= one["gaps"][2] and one["prompt_s"] > 0
        assert one["ratio"] > 0 and one["steady_ratio"] >= 1 and one["times_alone"] > 0
        assert len(one["short_s"]) == 3 and min(one["short_s"]) > 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("135m on cpu, torch ") and "prompt_tokens 200" in lines[0]
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["none", "auto", "7.5 ms"]
    assert all("x steady (steady " in line and "x alone; short prompts" in line for line in lines[1:])


def test_gaps_are_compared_with_those_of_rows_as_long() -> None:
    """Guards the ratio: requests grow longer while a prompt comes in, and so does the steady gap."""
    pauses = [Pause(0.0, 1.0, [Gap(9, 0.1), Gap(11, 0.1)]), Pause(5.0, 6.0, [Gap(29, 0.3), Gap(31, 0.3)])]
    assert ratio_of([Gap(10, 0.2), Gap(20, 0.4), Gap(30, 0.6)], pauses) == pytest.approx(2.0)
