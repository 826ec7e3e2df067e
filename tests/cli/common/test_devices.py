"""A GPU that cannot be used, as a user of the command sees it."""

from __future__ import annotations

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


@pytest.mark.filterwarnings("error::UserWarning")  # of torch, which would say the same in other words
@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_a_gpu_that_cannot_be_used_is_told(device: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards a GPU machine against a quiet run on its CPU, and scripts that need the GPU: nothing runs without it."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n')
    arguments = ["run", f"{tmp_path}/in.jsonl", "--device", device, "--kv-blocks", "40", "--max-tokens", "2"]
    assert run_command(arguments) == (2 if device == "cuda" else 0)
    out, err = capfd.readouterr()
    told = [line for line in err.splitlines() if "driver" in line]
    assert len(out.splitlines()) == (device != "cuda") and len(told) == (device != "cpu")
    if device == "auto":
        way_out = "update the driver, or install a build for CUDA 12: pip"
        assert told[0].startswith(f"cbatch: The CPU is used: {REASON}; {way_out}")
    elif device == "cuda":
        assert err.startswith(f"cbatch: Device 'cuda' cannot be used: {REASON}; ") and err.count("\n") == 1
