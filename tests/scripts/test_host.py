"""Guards the benchmark of the host's part of a step."""

from __future__ import annotations

import pytest

from scripts.benchmarks.harness import main


def test_every_phase_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the names of the phases, with and without overlap scheduling, from end to end."""
    main(["host", "--rows", "3", "--context", "9", "--steps", "14"])
    lines = capsys.readouterr().out.splitlines()
    assert ["overlapped" in line for line in lines] == [False, True]
    assert all(phase in line for line in lines for phase in ("schedule", "build", "sample", "fetch", "update", "step"))


def test_the_share_beside_a_real_model_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards `--share` on a small model: a line for each round, and a share between 0 and 100%."""
    main(["host", "--share", "--shape", "tiny", "--rounds", "3"])
    *rounds, last = capsys.readouterr().out.splitlines()
    assert len(rounds) == 2 and all("ms a step" in line for line in rounds)
    assert 0 < float(last.removesuffix("%").rpartition(" ")[2]) < 100
