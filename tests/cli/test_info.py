"""`cbatch info` shows what a bug report needs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cbatch.api import Engine
from cbatch.cli.bench import roofline
from cbatch.cli.common.loading import show_loaded
from cbatch.cli.main import run_command
from cbatch.engine import loading, stepping_engine
from cbatch.engine.kernel_checks.kernel_check import KernelCheck, Workload
from tests.support.command import Command
from tests.support.gpu_machine import Machine


def test_info_names_versions_model_and_cache(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the figures, and scripts: --json has the same names and values in one object, alone on stdout."""
    options = ["info", "-m", str(model_folder), "--kv-blocks", "10", "--dtype", "float32"]
    assert run_command(options) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = dict(line.split(maxsplit=1) for line in lines)
    assert {"cbatch", "python", "torch", "transformers", "model", "device", "threads", "attention"} <= shown.keys()
    # 2 layers x (keys + values) x 2 heads x 16 dimensions x 4 bytes
    assert "512 bytes a token" in shown["KV"] and "160 tokens in 10 blocks of 16" in shown["KV"]
    assert "(llama)" in shown["model"]
    assert run_command([*options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [f"{name:<13} {value}" for name, value in found.items()] == lines
    assert run_command([*options, "--json", "--check"]) == 2 and "--json shows" in capsys.readouterr().err


def test_info_shows_kept_weights(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards the disk of somebody who looks for what fills it; an option that refuses the cache hides it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "cbatch" / "weights"
    folder.mkdir(parents=True)
    (folder / "0.weights").write_bytes(bytes(2048))
    options = ["info", "-m", str(model_folder), "--kv-blocks", "10", "--weight-cache-size", "4GiB"]
    assert run_command(options) == 0
    assert f"weight cache  2.0 KiB in {folder}, at most 4GiB\n" in capsys.readouterr().out
    assert run_command([*options, "--no-weight-cache"]) == 0
    assert "weight cache" not in capsys.readouterr().out


def test_info_says_what_lies_where(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards a bug report of a slow model: the reason stands in it. Limits that are no object are a sentence."""
    model = ["-m", str(model_folder), "--kv-blocks", "10", "--device", "cpu", "--device-map", "auto"]
    assert run_command(["info", *model, "--max-memory", '{"cpu": 0}']) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("placement", "step cost"))]
    assert "layers 0-1 on disk" in lines[0] and "A step reads up to" in lines[1]
    assert run_command(["info", *model, "--max-memory", '["cpu"]']) == 2
    assert 'such as {"cpu": "30GiB"}, not' in capsys.readouterr().err


def test_info_tells_of_a_gpu_that_cannot_be_used(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards the report of a broken machine, which once ended with an error of torch."""
    error = "Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display driver"
    Machine(tmp_path, monkeypatch, gpus=(), start_error=error).install()
    assert run_command(["info", "-m", str(model_folder), "--kv-blocks", "10", "--dtype", "float32"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["driver"] == "NVIDIA 580.95.05" and lines["device"] == "cpu"
    assert lines["cuda"] == (
        "not used: torch 2.11.0+cu130 cannot start CUDA on NVIDIA driver 580.95.05 (Error 803: system has unsupported "
        "display driver); the driver and its libraries are of different versions, so restart the machine"
    )


def test_a_fallback_is_told(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards users of slow kernels: `info` and `--stats` say why they are slow; without a reason there is no line."""
    choose = loading.choose_execution
    for sentence in ("", "Attention runs by operations of torch."):

        def choose_with(*arguments: Any, sentence: str = sentence) -> Any:
            return replace(choose(*arguments), fallback=sentence)

        monkeypatch.setattr(loading, "choose_execution", choose_with)
        options = ["--kv-blocks", "10", "--device", "cpu"]
        assert run_command(["info", "-m", str(command.model), *options]) == 0
        shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fallback")]
        assert shown == ([f"fallback      {sentence}"] if sentence else [])
        assert command.answer([{"prompt": "a", "max_tokens": 1}], "-q", *options)[0] == 0
        assert command.figures()["fallback"] == sentence


def run_check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[int, str]:
    """`info --check` on a CPU that moves 1 GB/s and computes 1 GFLOP/s."""
    monkeypatch.setattr(roofline, "measure_rates", lambda *_: roofline.DeviceRates(1e9, 1e9))
    monkeypatch.setattr(roofline, "best_time", lambda *_: 0.5)
    monkeypatch.setattr(roofline, "cache_bytes", lambda _: 10**8)
    code = run_command(["info", "--check", "-m", str(folder), "--device", "cpu"])
    return code, capsys.readouterr().out


def test_a_table_of_kernels(
    model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards what a person reads: an aligned line for each kernel, what a cache served, and the exit code."""
    checks = [
        KernelCheck("decode attention", 0.001, 0.03, workload=lambda: Workload(lambda: None, bytes_read=4e8)),
        KernelCheck("silu_and_mul", 0.001, 0.03, workload=lambda: Workload(lambda: None, bytes_read=1e8)),
        KernelCheck("linear", 1e-7, 1e-4, workload=lambda: Workload(lambda: None, flops=3e8)),
        KernelCheck("a whole step", 0.0, 0.0, skipped="there is no memory for it"),
    ]
    monkeypatch.setattr(stepping_engine.SteppingEngine, "check_kernels", lambda _: iter(checks))
    code, shown = run_check(capsys, monkeypatch, model_folder)
    assert code == 0 and "KV cache" not in shown
    assert shown.partition("\n\n")[2] == (
        "A copy moves 1.0 GB/s on cpu, and a product of matrices computes 1.0 GFLOP/s.\n\n"
        "kernel                                            agrees    error    limit  speed\n"
        "decode attention                                  yes     1.0e-03  3.0e-02   80% of the copy (0.8 GB/s)\n"
        "silu_and_mul                                      yes     1.0e-03  3.0e-02   20% of the copy "
        "(0.2 GB/s, in a cache)\n"
        "linear                                            yes     1.0e-07  1.0e-04   60% of the product "
        "(0.6 GFLOP/s)\n"
        "a whole step                                      not checked: there is no memory for it\n\n"
        "All kernels agree with plain torch.\n"
    )
    checks += [KernelCheck("sampling", 0.5, 0.1), KernelCheck("argmax", float("nan"), 0.1, "OutOfResources: too large")]
    code, shown = run_check(capsys, monkeypatch, model_folder)
    assert code == 1 and shown.endswith(
        "sampling                                          NO      5.0e-01  1.0e-01\n"
        "argmax                                            NO      OutOfResources: too large\n\n"
        "2 of 5 kernels differ from plain torch.\n"
    )
    checks.clear()
    code, shown = run_check(capsys, monkeypatch, model_folder)
    assert code == 0 and shown.endswith("There is nothing to check: torch computes everything on this device.\n")


def test_what_a_model_asks_for_in_vain_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards people against a generation_config.json that is followed only in part, also on replicas."""
    with Engine() as engine:
        assert "not applied" not in engine.core.describe()
        engine.core.loaded = replace(engine.core.loaded, not_applied=("num_beams", "eta_cutoff"))
        show_loaded(engine.core.describe(), is_demo=False, verbose=True)
    said = capsys.readouterr().err
    assert "the model's files ask for num_beams, eta_cutoff, which this version does not apply" in said
    assert "parameters: 4.7 million" in said and "context: 1,024 tokens" in said
