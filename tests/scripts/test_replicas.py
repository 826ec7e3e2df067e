"""What the benchmark of replicas measures, on small numbers."""

from __future__ import annotations

import json

import pytest

from scripts.benchmarks.harness import main

pytestmark = pytest.mark.slow


def test_the_whole_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the benchmark: rows reach paced replicas and come back, and copies shorten the end of a batch."""
    rates = ["--rows-per-s", "300", "--alone-rows-per-s", "300", "--tail-rows-per-s", "400"]
    assert main(["replicas", "--replicas", "2", "--seconds", "0.3", *rates, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert 0.5 < figures["linear"] < 1.1 and figures["limit"]["rows_per_s"] > figures["many"]["rows_per_s"]
    assert figures["tails"]["copies"] < figures["tails"]["none"]
