"""A GPU that cannot be used, as a user of the command sees it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from cbatch.cli.main import run_command
from tests.support.gpu_machine import Machine

OLD = "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver."
REASON = (
    "torch 2.11.0+cu130 needs an NVIDIA driver of version 580 or newer, and this machine has NVIDIA driver 535.183.01"
)


@pytest.fixture(autouse=True)
def old_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
    Machine(tmp_path, monkeypatch, gpus=(), driver=driver, start_error=OLD).install()


def run_on(device: str, folder: Path) -> int:
    rows = folder / "in.jsonl"
    rows.write_text('{"prompt": "Hi"}\n')
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of torch, which would say the same in other words
        return run_command(["run", str(rows), "--device", device, "--kv-blocks", "40", "--max-tokens", "2"])


def test_auto_runs_on_the_cpu_and_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards a GPU machine against a quiet run on its CPU: one line on stderr, which names the way out."""
    assert run_on("auto", tmp_path) == 0
    out, err = capfd.readouterr()
    told = [line for line in err.splitlines() if "driver" in line]
    assert len(out.splitlines()) == 1 and len(told) == 1
    assert told[0].startswith(
        f"cbatch: The CPU is used: {REASON}; update the driver, or install a build for CUDA 12: pip"
    )
    assert run_on("cpu", tmp_path) == 0 and "driver" not in capfd.readouterr().err


def test_a_named_gpu_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards scripts that need the GPU: nothing runs, and the reason is the same."""
    assert run_on("cuda", tmp_path) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith(f"cbatch: Device 'cuda' cannot be used: {REASON}; ") and err.count("\n") == 1
