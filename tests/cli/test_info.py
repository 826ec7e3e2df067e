"""`cbatch info` shows what a bug report needs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cbatch.cli.main import run_command
from cbatch.engine import stepping_engine
from tests.support.gpu_machine import Machine


def test_info_names_versions_model_and_cache(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the figures: bytes of a token over all layers, and a cache of whole blocks."""
    assert run_command(["info", "-m", str(model_folder), "--kv-blocks", "10", "--dtype", "float32"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert {"cbatch", "python", "torch", "transformers", "model", "device", "attention"} <= lines.keys()
    # 2 layers x (keys + values) x 2 heads x 12 dimensions x 4 bytes
    assert "384 bytes a token" in lines["KV"] and "160 tokens in 10 blocks of 16" in lines["KV"]
    assert "(llama)" in lines["model"]


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
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards users of slow kernels: `info` and `--stats` say why they are slow; without a reason there is no line."""
    choose = stepping_engine.choose_execution
    for sentence in ("", "Attention runs by operations of torch."):

        def choose_with(*arguments: Any, sentence: str = sentence) -> Any:
            return replace(choose(*arguments), fallback=sentence)

        monkeypatch.setattr(stepping_engine, "choose_execution", choose_with)
        model = ["-m", str(model_folder), "--kv-blocks", "10", "--device", "cpu"]
        assert run_command(["info", *model]) == 0
        shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fallback")]
        assert shown == ([f"fallback      {sentence}"] if sentence else [])
        (tmp_path / "in.jsonl").write_text('{"prompt": "a", "max_tokens": 1}\n')
        files = [
            f"{tmp_path}/in.jsonl",
            "-o",
            f"{tmp_path}/out.jsonl",
            "--overwrite",
            "--stats",
            f"{tmp_path}/stats.json",
        ]
        assert run_command(["run", "-q", *files, *model]) == 0
        assert json.loads((tmp_path / "stats.json").read_text())["fallback"] == sentence
