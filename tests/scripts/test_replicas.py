"""What the benchmark of replicas measures, on small numbers."""

from __future__ import annotations

import json

import pytest

from scripts.benchmarks.harness import main

pytestmark = pytest.mark.slow


def test_the_whole_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the benchmark from end to end: rows reach paced replicas and come back, at all three speeds."""
    rates = ["--rows-per-s", "300", "--alone-rows-per-s", "300", "--tail-rows-per-s", "400"]
    assert main(["replicas", "--replicas", "2", "--seconds", "0.3", *rates, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    counts = {name: (figures[name]["replicas"], figures[name]["rows"]) for name in ("alone", "many", "limit")}
    assert counts == {"alone": (1, 90), "many": (2, 180), "limit": (2, 180)}
    assert figures["linear"] > 0 and min(figures["tails"].values()) >= 0
