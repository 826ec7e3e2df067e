"""Damaged and hostile folders of quantized models: one sentence each, quickly, in little memory."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from cbatch.engine.base.errors import ModelError
from cbatch.engine.base.model_files import WEIGHTS_INDEX
from cbatch.engine.models.checkpoint import NoFastPath, load_fast_model
from cbatch.engine.models.loader import load_model
from tests.support.damaged_folders import Folder, damaged
from tests.support.quantized_folders import (
    Encoder,
    awq,
    awq_settings,
    compressed,
    compressed_settings,
    fp8,
    fp8_settings,
    gptq,
    gptq_settings,
    mxfp4,
    tiny_model,
    whole_int8,
    write_folder,
)

pytestmark = pytest.mark.kernels

CPU = torch.device("cpu")
MOST_BYTES = 100 * 2**20
COUNT = int(os.environ.get("CBATCH_FUZZ_FOLDERS", "360"))

KINDS: dict[str, tuple[dict[str, Any], Encoder, str]] = {
    "awq": (awq_settings(32), awq(32), "qwen3"),
    "gptq": (gptq_settings(4, 32, desc_act=True), gptq(4, 32, act_order=True), "llama"),
    "w4a16": (compressed_settings(group_size=32, symmetric=False), compressed(4, 32, symmetric=False), "qwen3"),
    "w8a8": (compressed_settings("int-quantized", strategy="channel", num_bits=8), whole_int8(), "qwen2"),
    "fp8": (fp8_settings((32, 32)), fp8((32, 32)), "qwen3"),
    "mxfp4": ({"quant_method": "mxfp4"}, mxfp4, "gpt_oss"),
}


def written(name: str, path: Path) -> Path:
    settings, encode, kind = KINDS[name]
    write_folder(path, tiny_model(kind, hidden_size=64, intermediate_size=64, head_dim=16), settings, encode)
    return path


def resident_bytes(field: str) -> int:
    """VmRSS: what is resident; VmHWM: the most that was since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def refusal(path: Path) -> str | None:
    """Why a folder is not read, None if it is, after a check of the time and memory that it took.

    Raises what is neither a ModelError nor a NoFastPath, with which transformers gets it.
    """
    forget_peak()
    before, start, sentence = resident_bytes("VmRSS"), time.process_time(), None
    try:
        load_fast_model(str(path), None, CPU, "auto")
    except ModelError as error:
        sentence = str(error)
        assert sentence.endswith(".")
    except NoFastPath as error:
        sentence = str(error)
    assert time.process_time() - start < 1
    assert resident_bytes("VmHWM") - before < MOST_BYTES
    return sentence


@pytest.mark.skipif(sys.platform != "linux", reason="The peak of memory is read from /proc.")
@pytest.mark.parametrize("name", KINDS)
def test_random_damage(name: str, tmp_path: Path) -> None:
    """Guards what nobody thought of: settings, headers, tensors, indices and bytes that are not what they should be."""
    path, refused, count = tmp_path / "damaged", 0, -(-COUNT // len(KINDS))
    load_fast_model(str(written(name, tmp_path / "whole")), None, CPU, "auto")  # may compile kernels
    for number, files in enumerate(damaged(Folder.read(tmp_path / "whole"), count, seed=0)):
        path.mkdir()
        for file, content in files.items():
            (path / file).write_bytes(content)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                sentence = refusal(path)
            except Exception as error:
                raise AssertionError(f"folder {number} of {name}") from error
        if sentence is not None:
            assert "\n" not in sentence and len(sentence) < 700 and "memory" not in sentence, (number, sentence)
            refused += 1
        shutil.rmtree(path)
    assert count / 2 < refused < count


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
    "layers": (set_config(num_hidden_layers=2**31), "a size of 2147483648, and 1024 are the most"),
    "width": (set_config(hidden_size=2**40), "a size of 1099511627776"),
    "heads": (set_config(num_attention_heads=2**30), "a size of"),
    "vocabulary": (set_config(vocab_size=2**40), "a size of 1099511627776"),
    "epsilon": (set_config(rms_norm_eps=[]), "the epsilon of its norms is []"),
    "nested": (nested, "is nested too deep"),
    "group": (set_config(quantization_config=awq_settings(10**30)), "should be F16 or BF16 or F32 [1, 64]"),
    "index is a list": (set_index([1]), "names [1], which is no file"),
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


@pytest.mark.skipif(sys.platform != "linux", reason="The peak of memory is read from /proc.")
@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_folder_gets_one_sentence(name: str, tmp_path: Path) -> None:
    """Guards sizes, types and names that cost memory or raised other errors, or were waited for."""
    change, expected = FAULTS[name]
    change(written("awq", tmp_path / "model"))
    found = refusal(tmp_path / "model")
    assert found is not None and expected in found


def test_both_reasons_are_told(tmp_path: Path) -> None:
    """Guards a sentence that says to install a package, though the files are damaged."""
    set_config(num_hidden_layers=3)(written("awq", tmp_path / "model"))
    with pytest.raises(ModelError, match="without transformers one of its weights is missing") as caught:
        load_model(str(tmp_path / "model"), None, CPU, "auto", fast=True)
    assert "\n" not in str(caught.value)
