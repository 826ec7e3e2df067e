"""Guards the benchmark of the host's time for launches."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

pytestmark = pytest.mark.slow


def test_steps_are_measured_launched_and_captured() -> None:
    """Guards the benchmark against steps that find no graph, and a model that its driver does not know any more."""
    command = [
        sys.executable,
        "-m",
        "scripts.benchmarks",
        "launches",
        "--shape",
        "0.6B",
        "--rows",
        "3",
        "--rounds",
        "1",
    ]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["0.6B"]
    assert set(found) == {"decode, 3 rows", "mixed, 3 rows"}
    assert all(0 < figures["captured"] < figures["launched"] for figures in found.values())
