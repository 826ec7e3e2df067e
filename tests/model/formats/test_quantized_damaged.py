"""Damaged and hostile folders of quantized models: one sentence each, quickly, in little memory."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from cbatch.base.errors import ModelError
from cbatch.base.model_files import WEIGHTS_INDEX
from cbatch.model.load_plan import LoadPlan
from cbatch.model.loader import NoFastPath, load_fast_model, load_model
from tests.support.model_fuzzer.kinds import WholeModels
from tests.support.model_fuzzer.weight_damage import Folder
from tests.support.quantized_folders import awq_settings

pytestmark = pytest.mark.kernels

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WholeModels(tmp_path_factory.mktemp("whole")).path("awq")


def change_config(path: Path, **values: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | values))


def set_config(**values: Any) -> Any:
    return lambda path: change_config(path, **values)


def set_index(places: Any) -> Any:
    """Gives the weights another name, which an index tells."""

    def change(path: Path) -> None:
        (path / "model.safetensors").rename(path / "part.safetensors")
        (path / WEIGHTS_INDEX).write_text(json.dumps({"weight_map": places}))

    return change


def pipe(path: Path) -> None:
    set_index({"x": "pipe"})(path)
    os.mkfifo(path / "pipe")


def nested(path: Path) -> None:
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace('"bits": 4', '"bits": ' + "[" * 10**5 + "]" * 10**5))


FAULTS: dict[str, tuple[Any, str]] = {
    "layers": (set_config(num_hidden_layers=2**31), "num_hidden_layers must be a whole number from 1 to 1024"),
    "width": (set_config(hidden_size=2**40), "hidden_size must be a whole number from 1 to 1048576"),
    "heads": (set_config(num_attention_heads=2**30), "num_attention_heads must be a whole number"),
    "vocabulary": (set_config(vocab_size=2**40), "vocab_size must be a whole number"),
    "epsilon": (set_config(rms_norm_eps=[]), "rms_norm_eps must be a number from 0 to 1, not []"),
    "nested": (nested, "is nested too deep"),
    "group": (set_config(quantization_config=awq_settings(10**30)), "should be F16 or BF16 or F32 [1, 64]"),
    "index is a list": (set_index([1]), "has no weight_map that names a file"),
    "index names a number": (set_index({"x": 1}), "names 1, which is no file"),
    "index names a device": (set_index({"x": "/dev/zero"}), "names '/dev/zero', which is no file of its folder"),
    "index leaves the folder": (set_index({"x": "../part.safetensors"}), "which is no file of its folder"),
    "index names what is missing": (set_index({"x": "model.safetensors"}), "There is no file"),
    "index names a pipe": (pipe, "There is no file"),
    "float8 that is not quantized": (
        lambda path: put(path, "model.norm.weight", "F8_E5M2", [64]), "norm.weight is F8_E5M2 [64], which is not"
    ),
    "complex numbers": (
        lambda path: put(path, "model.norm.weight", "C64", [64]), "norm.weight is C64 [64], which is not quantized"
    ),
    "type": (lambda path: put(path, "model.layers.0.mlp.up_proj.scales", "I16", [2, 64]), "scales is I16 [2, 64]"),
}  # fmt: skip


def put(path: Path, name: str, kind: str, shape: list[int]) -> None:
    """Replaces a tensor by zeros."""
    folder = Folder.read(path)
    size = torch.Size(shape).numel() * {"F8_E5M2": 1, "C64": 8, "I16": 2}[kind]
    folder.put(name, kind, shape, bytes(size))
    for file, content in folder.files().items():
        (path / file).write_bytes(content)


@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_folder_gets_one_sentence(name: str, whole: Path, tmp_path: Path) -> None:
    """Guards sizes, types and names that cost memory or raised other errors, or were waited for."""
    change, expected = FAULTS[name]
    path = Path(shutil.copytree(whole, tmp_path / "model"))
    change(path)
    with pytest.raises((ModelError, NoFastPath)) as caught:
        load_fast_model(LoadPlan(str(path)))
    sentence = str(caught.value)
    assert expected in sentence and "\n" not in sentence and len(sentence) < 700


def test_both_reasons_are_told(whole: Path, tmp_path: Path) -> None:
    """Guards a sentence that says to install a package, though the files are damaged."""
    path = Path(shutil.copytree(whole, tmp_path / "model"))
    set_config(num_hidden_layers=3)(path)
    with pytest.raises(ModelError, match="without transformers one of its weights is missing") as caught:
        load_model(LoadPlan(str(path)))
    assert "\n" not in str(caught.value)
