"""Settings of models that no model can have are refused before anything is made of them, in one sentence."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from cbatch.base.errors import ModelError
from cbatch.base.model_files import InvalidFile, check_files, check_source, weight_files
from cbatch.model.config import check_model_config, read_generation_config, read_model_config
from tests.support.evil_configs import DEEP, EVIL, content, settings, write_evil

LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "vocab_size": 89}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that are read before a model's weights."""
    folder = tmp_path_factory.mktemp("whole")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        (folder / name).write_text(json.dumps(LLAMA if name == "config.json" else {}))
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (folder / name).write_bytes(b"")
    return folder


def read(folder: Path) -> None:
    check_files(folder)
    read_model_config(folder)
    read_generation_config(folder)
    weight_files(folder)


@pytest.mark.parametrize("name", EVIL)
def test_what_no_model_has_is_a_sentence(name: str, folder: Path, tmp_path: Path) -> None:
    """Guards against minutes, gigabytes and tracebacks from a folder whose settings cannot be true."""
    changed = write_evil(EVIL[name], folder, tmp_path / "changed")
    with pytest.raises(InvalidFile) as caught:
        read(changed)
    sentence = str(caught.value)
    assert sentence.startswith(str(changed)) and sentence.endswith(".") and sentence.isprintable()
    assert len(sentence) < 300 + len(str(changed))


@pytest.mark.parametrize(
    "odd",
    [
        {"head_dim": None, "sliding_window": None, "rope_scaling": None, "num_key_value_heads": None},
        {"eos_token_id": [1, 2], "pad_token_id": -1, "bos_token_id": None, "dtype": "bfloat16"},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}},
        {"rope_scaling": {"type": "longrope", "long_factor": [1, 1.5], "short_factor": [1.0, 1.0]}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 10000}}},
        {"rope_theta": [5e6, 10000]},
        {"intermediate_size": [64, 128], "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 0},
        {"max_position_embeddings": 4096.0, "model_max_length": 10**30, "time_step_limit": [0.0, math.inf]},
        {"text_config": LLAMA, "vision_config": {"num_hidden_layers": 0, "hidden_size": [64, 128]}},
        {"quantization_config": {"quant_method": "gptq", "dynamic": {f"{n}": {"bits": n} for n in range(30_000)}}},
        {"id2label": {str(n): str(n) for n in range(30_000)}, "tie_word_embeddings": 1, "rope_theta": 500_000},
    ],
)
def test_what_models_have_is_accepted(odd: dict[str, Any]) -> None:
    """Guards models of the hub with settings that are odd and legal."""
    check_model_config(LLAMA | odd, Path("config.json"))


def test_what_is_wrong_is_named(folder: Path, tmp_path: Path) -> None:
    """Guards people with a damaged file: which file, which setting, where it is, and what it may be."""
    changes = {
        "num_hidden_layers must be a whole number from 1 to 1024, not -1.": settings(num_hidden_layers=-1),
        "text_config.head_dim must be a whole number from 0 to 65536, not 0.5.": settings(
            text_config={"head_dim": 0.5}
        ),
        "rope_scaling.factor must be a number from 1e-06 to 1000000000, not 0.": settings(rope_scaling={"factor": 0}),
        "is not valid JSON: line 2, column 3 is not UTF-8.": content("config.json", b'{\n"a\xff'),
        "is not valid JSON: line 2, column 2: ": content("config.json", b'{"a": 1,\n x'),
        "is nested too deep.": content("config.json", b'{"a": ' + DEEP),
        "has more than 20000 settings.": settings(unknown=[[]] * 30_000),
    }
    for number, (sentence, change) in enumerate(changes.items()):
        with pytest.raises(InvalidFile) as caught:
            read(write_evil(change, folder, tmp_path / str(number)))
        assert sentence in str(caught.value)


def test_brackets_in_texts_are_no_nesting(folder: Path, tmp_path: Path) -> None:
    """Guards templates and vocabularies within a JSON file against the search for nesting, and the tests above."""
    text = '[{"' * 500 + "\\\\" * 501 + '\\"['
    read(write_evil(settings(chat_template=text, more=[[text]] * 200), folder, tmp_path / "changed"))


@pytest.mark.parametrize("name", ["a\0b", "x" * 10_000, "/" + "y" * 300, "a/" * 3000, "\ud800"], ids=ascii)
def test_a_name_that_cannot_be_a_path_is_a_sentence(name: str) -> None:
    """Guards `-m` and `--lora` against errors of the system that nobody catches."""
    with pytest.raises(ModelError, match=r"^The name of a model or an adapter has [^\n]{,60}\.$"):
        check_source(name)
    check_source("Qwen/Qwen3-0.6B")
