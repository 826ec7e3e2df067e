"""The benchmark of long prompts: it runs from end to end, and its figures have the right form."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cbatch.base.config import EngineConfig
from scripts.benchmarks import long_prompt
from scripts.benchmarks.harness import main
from scripts.benchmarks.long_prompt import Clients, Gap, Pause, Sizes, ratio_of


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


class AsyncEngine:
    """Two requests and a prompt; a step takes 1 s, 10 s with a chunk of the prompt. Tokens may come one step late."""

    def __init__(self, ahead: bool) -> None:
        self.now = 0.0
        self.config, self.device = EngineConfig(run_ahead=ahead), torch.device("cpu")
        self.scheduler = SimpleNamespace(prefill_limit=None)
        self._in_flight = [0.0] * ahead

    def step(self) -> list[SimpleNamespace]:
        self._in_flight.append(1.0 if self.scheduler.prefill_limit == 0 else 10.0)
        self.scheduler.prefill_limit = None
        self.now += self._in_flight.pop(0)
        return [SimpleNamespace(error=None, request_id=row) for row in (1, 2)]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_pause_is_what_has_no_prompt(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards overlap scheduling: a step in flight with a prompt is outside the pause, and all other steps are in it."""
    engine: Any = AsyncEngine(ahead)
    monkeypatch.setattr(long_prompt.time, "perf_counter", lambda: engine.now)
    clients = Clients(engine)
    for _ in range(3):
        clients.step()
    begin, end, gaps = clients.pause([1, 2], 4)
    clients.step()
    assert [gap.seconds for gap in gaps] == [1.0] * 8 and end - begin == 4
    assert {gap.seconds for gap in clients.gaps([1, 2], end, engine.now)} == {10.0}
    assert {gap.seconds for gap in clients.gaps([1, 2], 0.0, begin)} <= {0.0, 10.0}


def test_the_cache_suffices() -> None:
    """Guards the measurement against preemption: the cache holds the tokens of the most steps that it can take."""
    sizes = Sizes(rows=2, row_tokens=8, prompt_tokens=100, short_tokens=4, steady_steps=5, budget=32)
    steps = 9 * 5 + 2 * (116 // 4)
    assert sizes.blocks(16, 4) * 16 >= 2 * (8 + steps) + 116 + 7 * 16
