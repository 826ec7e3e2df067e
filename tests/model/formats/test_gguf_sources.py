"""GGUF models by the names that users give: files of the hub, and what the commands say of them."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from gguf import GGMLQuantizationType as Kind
from huggingface_hub.errors import EntryNotFoundError

from cbatch.base import hub
from cbatch.base.errors import ModelNotFound
from cbatch.base.hub import gguf_paths
from cbatch.cli.main import run_command
from tests.support.gguf_files import byte_level_metadata, gguf_model, write_model


@pytest.mark.kernels
def test_info_says_formats_and_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards `cbatch info -m model.gguf`, and the sentence and exit code for a damaged file."""
    path, metadata = tmp_path / "model.gguf", byte_level_metadata()
    write_model(path, gguf_model("llama", vocab_size=len(metadata["tokenizer.ggml.tokens"])), Kind.Q8_0, metadata)
    assert run_command(["info", "-m", str(path), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "GGUF with 8.59 bits a weight (tensors: 16 Q8_0, 5 F32)" in shown and "model.gguf (llama)" in shown
    path.write_bytes(path.read_bytes()[:-64])
    assert run_command(["info", "-m", str(path), "--device", "cpu"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "is damaged: the tensor" in said[0] and "is not within the file" in said[0]


def test_all_parts_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards split models on the hub, a revision, and a file that is not there."""
    asked = []

    def download(repository: str, name: str, *, revision: str | None) -> str:
        asked.append((repository, name, revision))
        if "none" in name:
            raise EntryNotFoundError("404")
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    found = gguf_paths("me/m-GGUF:q8/m-00002-of-00002.gguf", "main")
    assert found == [tmp_path / f"q8/m-0000{number}-of-00002.gguf" for number in (1, 2)]
    assert asked == [("me/m-GGUF", f"q8/m-0000{number}-of-00002.gguf", "main") for number in (1, 2)]
    with pytest.raises(ModelNotFound, match=r"me/m-GGUF has no file none\.gguf"):
        gguf_paths("me/m-GGUF:none.gguf", None)


def test_files_of_the_hub_are_looked_for_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the time until a wrong name is told, and files in the cache, which need no network."""
    asked = []
    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
    monkeypatch.setattr(hub, "_ask_hub", lambda repository, *_, **__: asked.append(repository))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    hub.check_hub_model("me/m-GGUF:m.gguf", None)
    assert asked == ["me/m-GGUF"]
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: str(tmp_path))
    hub.check_hub_model("me/m-GGUF:m.gguf", None)
    hub.check_hub_model(str(tmp_path / "m.gguf"), None)
    hub.check_hub_model("m.gguf", None)
    assert asked == ["me/m-GGUF"] and hub.is_gguf("me/m-GGUF:m.gguf")
