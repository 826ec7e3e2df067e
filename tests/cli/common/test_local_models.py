"""Models on this machine: the list, what may be meant by a wrong name, and what is said without a network."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from cbatch.cli.common.local_models import local_models, suggest_models
from cbatch.cli.common.options import engine_options
from cbatch.cli.main import run_command

AddModel = Callable[..., Path]


@pytest.fixture
def add_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AddModel:
    """An empty home folder; adds models to the hub's cache in it, as a download would."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "CBATCH_GGUF_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / ".cache/huggingface/hub"))

    def add(name: str, files: tuple[str, ...] = ("config.json", "model.safetensors"), size: int = 10) -> Path:
        repository = tmp_path / ".cache/huggingface/hub" / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
        for folder in (snapshot, repository / "blobs", repository / "refs"):
            folder.mkdir(parents=True)
        (repository / "refs" / "main").write_text(snapshot.name)
        for file in files:
            (repository / "blobs" / file).write_bytes(b"x" * size)
            (snapshot / file).symlink_to(repository / "blobs" / file)
        return snapshot

    return add


def test_models_of_the_cache_and_gguf_files(
    add_model: AddModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the list: whole models with the size of their weights, in all places, and nothing that is broken."""
    add_model("Qwen/Qwen3-0.6B", ("config.json", "a.safetensors", "b.safetensors"), size=50)
    add_model("gpt2")
    add_model("no/weights", ("config.json",))
    add_model("no/config", ("model.safetensors",))
    (add_model("dangling/one") / "model.safetensors").resolve().unlink()
    (tmp_path / ".cache/huggingface/hub/models--no--folder").write_text("")
    for place in (".cache/llama.cpp/a.gguf", ".lmstudio/models/me/b/b.GGUF", "mine/c.gguf", "other/d.txt"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_bytes(b"1234")
    (tmp_path / "mine" / "dangling.gguf").symlink_to("nowhere")
    (tmp_path / "mine" / "circle").symlink_to(tmp_path / "mine")
    monkeypatch.setenv("CBATCH_GGUF_PATH", f"{tmp_path}/nowhere:{tmp_path}/other::{tmp_path}/mine")
    found = local_models()
    assert [(model.name, model.size_bytes) for model in found if model.kind == "hub"] == [
        ("gpt2", 10),
        ("Qwen/Qwen3-0.6B", 100),
    ]
    files = {Path(model.name).name: model for model in found if model.kind == "gguf"}
    assert files.keys() == {"a.gguf", "b.GGUF", "c.gguf"}
    assert files["a.gguf"].size_bytes == 4 and abs(files["a.gguf"].modified_at - time.time()) < 3600


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Qwen/Qwen3-0.6b", ["Qwen/Qwen3-0.6B"]),
        ("qwen3-0.6B", ["Qwen/Qwen3-0.6B"]),
        ("someone/qwen3-06b", ["Qwen/Qwen3-0.6B"]),
        ("Qwen/Qwen3-0.6B", []),
        ("completely-other", []),
        ("./my-modle", ["./my-model"]),
        ("my-modle", ["./my-model"]),
        ("folder/deep-modl", ["folder/deep-model"]),
    ],
)
def test_what_may_be_meant(name: str, meant: list[str], add_model: AddModel, tmp_path: Path) -> None:
    """Guards suggestions: slips of the pen, other case, a name without its owner, and folders; nothing far-fetched."""
    add_model("Qwen/Qwen3-0.6B")
    for folder in ("my-model", "folder/deep-model"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").touch()
    (tmp_path / "my-modla").mkdir()  # no model
    assert suggest_models(name) == meant


def test_the_table_of_models(add_model: AddModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards `cbatch models`: what computes each model and why, broken ones too; and words if there are none."""
    assert run_command(["models"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("There are no models in the hub's cache (~/.cache/huggingface/hub)")
    assert "~/.lmstudio/models" in said
    config: dict[str, object] = {"model_type": "qwen3", "max_position_embeddings": 40960}
    (add_model("me/tiny", size=2**20) / "config.json").resolve().write_text(json.dumps(config))
    (add_model("me/other") / "config.json").resolve().write_text(json.dumps({"model_type": "bloom"}))
    (add_model("me/wrong") / "config.json").resolve().write_text("[]")
    (tmp_path / ".cache/llama.cpp").mkdir()
    (tmp_path / ".cache/llama.cpp/x.gguf").touch()
    assert run_command(["models"]) == 0
    header, other, tiny, wrong, file = capsys.readouterr().out.splitlines()
    assert header.split() == ["model", "family", "context", "size", "fits", "date", "path"]
    assert other.split()[:2] == ["me/other", "bloom"] and "transformers: its model type bloom" in other
    assert tiny.split()[:6] == ["me/tiny", "qwen3", "40,960", "1.0", "MiB", "yes"] and tiny.endswith("  fast")
    assert "  refused: " in wrong
    assert file.startswith(f"{tmp_path}/.cache/llama.cpp/x.gguf ") and "refused: " in file


def test_the_models_of_a_folder(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards folders of models, whose names load, as JSON for scripts; and a folder that is not there."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "one").symlink_to(model_folder)
    assert run_command(["models", str(tmp_path / "mine"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["model"], found["kind"], found["path"]) == (str(tmp_path / "mine" / "one"), "folder", "fast")
    assert run_command(["models", str(tmp_path / "nowhere")]) == 2


def test_the_shell_completes_models(add_model: AddModel) -> None:
    """Guards completion of --model: the models of the cache, in any case, and folders."""
    add_model("Qwen/Qwen3-0.6B")
    add_model("me/tiny")
    command = click.command("x")(engine_options()(lambda **_: None))
    option = next(one for one in command.params if one.name == "model")
    items = option.shell_complete(click.Context(command), "qwen")
    assert [(item.type, item.value) for item in items] == [("dir", "qwen"), ("plain", "Qwen/Qwen3-0.6B")]


def test_a_wrong_name_ends_with_what_may_be_meant(
    add_model: AddModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Guards the sentence for a model that does not exist: from the hub, a folder, and on replicas."""
    add_model("Qwen/Qwen3-0.6B")
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    for extra in ([], ["--replicas", "1"]):
        assert run_command(["run", "in.jsonl", "-m", "Qwen/Qwen3-0.6", *extra]) == 2
        error = capfd.readouterr().err
        assert "Qwen/Qwen3-0.6 is not in the local cache and HF_HUB_OFFLINE is set; check the name" in error
        assert error.endswith("Did you mean Qwen/Qwen3-0.6B?\n")
    assert run_command(["run", "in.jsonl", "-m", "./Qwen3-0.6"]) == 2
    assert capfd.readouterr().err.endswith("There is no model folder ./Qwen3-0.6. Did you mean Qwen/Qwen3-0.6B?\n")


def test_a_misspelt_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards suggestions for commands: a command, and neither an option nor a model."""
    assert run_command(["modles"]) == 2
    assert "No such command 'modles'. Did you mean models?" in capsys.readouterr().err
    assert run_command(["xyz"]) == 2 and "mean" not in capsys.readouterr().err
