"""Model files: a folder and the hub's cache are read alike, and broken files are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cbatch.base.errors import ModelError
from cbatch.base.model_files import WEIGHTS_INDEX, model_folder, read_json_object, weight_files


def test_a_hub_id_is_its_snapshot_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards machines without a network: what was downloaded is found, and what the model does not have is empty."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--cbatch--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"a": 1}')
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for revision in (None, commit):
        folder = model_folder("cbatch/tiny", revision, ["config.json", "generation_config.json"])
        assert folder == snapshot and read_json_object(folder / "config.json") == {"a": 1}
        assert read_json_object(folder / "generation_config.json") == {}
    assert model_folder(str(snapshot), None) == snapshot
    with pytest.raises(OSError):
        model_folder("cbatch/no-such-model", None)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"{", "is not valid JSON: "), (b"\xff", "is not valid JSON: "), (b"[]", "is not a JSON object.")],
)
def test_a_broken_file_is_named(content: bytes, sentence: str, tmp_path: Path) -> None:
    """Guards people with a torn download: they are told which file it is."""
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="config.json " + sentence):
        read_json_object(path)


def test_weights_are_the_files_that_transformers_loads(tmp_path: Path) -> None:
    """Guards against other exports of the weights that lie beside them."""
    assert weight_files(tmp_path) == []
    (tmp_path / WEIGHTS_INDEX).write_text(json.dumps({"weight_map": {"a": "2.safetensors", "b": "1.safetensors"}}))
    assert weight_files(tmp_path) == [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    (tmp_path / "model.safetensors").touch()
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
