"""`cbatch info` shows what a bug report needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cbatch.cli.main import run_command


def test_info_names_versions_model_and_cache(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the figures: bytes of a token over all layers, and a cache of whole blocks."""
    assert run_command(["info", "-m", str(model_folder), "--kv-blocks", "10", "--dtype", "float32"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert {"cbatch", "python", "torch", "transformers", "model", "device", "attention"} <= lines.keys()
    # 2 layers x (keys + values) x 2 heads x 12 dimensions x 4 bytes
    assert "384 bytes a token" in lines["KV"] and "160 tokens in 10 blocks of 16" in lines["KV"]
    assert "(llama)" in lines["model"]
