"""Models that wrap a language model: text from their files, whatever these call its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cbatch.attention.cpu import CpuAttention
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ModelError
from cbatch.base.params import SamplingParams
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.config import UnsupportedConfig
from cbatch.model.cpu import CpuModel
from cbatch.model.load_plan import LoadPlan
from cbatch.model.loader import load_model
from scripts.real_checkpoints import DOCUMENT, wrapped
from tests.support.declared import has_declaration, wrappers
from tests.support.generation import generate
from tests.support.model_checks import is_greedy_output
from tests.support.programs import error_of, logits_in_chunks
from tests.support.published_configs import PROMPT
from tests.support.samples import sampled
from tests.support.tiny_models import make_prompts
from tests.support.wrappers import NOT_TRIED, published, saved_wrapper, text_logits, wrapper_kinds

_POPULAR = ["mistral3", "qwen2_5_vl", "qwen3_vl_moe"]


@pytest.mark.kernels
@pytest.mark.parametrize("kind", sampled(wrapper_kinds(), 4, keep=_POPULAR))
def test_text_from_published_names(kind: str) -> None:
    """Guards every wrapper on the fast path: its logits for text, whichever of the names its weights have."""
    saved = saved_wrapper(kind)
    for prefix, tensors in [("", saved.tensors), *published(saved)]:
        model = CpuModel(saved.config, tensors, torch.float32)
        prompt = PROMPT[: model.max_model_len]
        found = logits_in_chunks(model, CpuAttention(), prompt, [0, 3, len(prompt)])
        assert error_of(found, text_logits(saved.network, prompt)) < 2e-4, prefix


def test_all_wrappers_are_tried() -> None:
    """Guards the list of those that are not tried: it names none that could be."""
    tried = {kind for kind in wrappers() if has_declaration(kind)}
    assert tried >= NOT_TRIED.keys() and len(tried) - len(NOT_TRIED) > 60
    assert wrapped(", ".join(f"`{kind}`" for kind in wrapper_kinds())) in DOCUMENT.read_text(encoding="utf-8")


def test_weights_of_the_language_model_must_be_there() -> None:
    """Guards against taking a weight of the language model for one of the tower: one that is missing is missed."""
    saved = saved_wrapper("qwen3_vl")
    name = next(name for name in saved.tensors if name.endswith("layers.1.mlp.up_proj.weight"))
    tensors = {other: tensor for other, tensor in saved.tensors.items() if other != name}
    with pytest.raises(UnsupportedConfig, match=r"missing, or unknown in its family: model\.layers\.1\.mlp\.up_proj"):
        CpuModel(saved.config, tensors, torch.float32)
    extra = name.replace("up_proj", "side_proj")
    with pytest.raises(UnsupportedConfig, match="unknown in its family"):
        CpuModel(saved.config, {**saved.tensors, extra: saved.tensors[name]}, torch.float32)


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_wrapper_in_a_folder(is_fast: bool, tmp_path: Path) -> None:
    """Guards loading: models with pictures have another class in transformers than those of text alone."""
    saved = saved_wrapper("idefics3")
    saved.network.save_pretrained(tmp_path)
    loaded = load_model(LoadPlan(str(tmp_path), dtype="float32", fast=is_fast))
    assert loaded.path == ("fast" if is_fast else "transformers")
    engine = SteppingEngine(EngineConfig(device="cpu", kv_blocks=40, block_size=16), loaded)
    prompts = make_prompts([20, 31], seed=8)
    for prompt, output in zip(prompts, generate(engine, prompts, SamplingParams(max_tokens=6)), strict=True):
        assert is_greedy_output(saved.network, prompt, list(output.token_ids))


@pytest.mark.parametrize(
    ("version", "said"),
    [("99.1.0", "is of version 99.1.0: install that, or a newer one."), ("4.1.0", "needs code of its authors, which")],
)
def test_a_type_that_transformers_does_not_have(version: str, said: str, tmp_path: Path) -> None:
    """Guards models that are newer than transformers: the refusal names the version that their files name."""
    saved_wrapper("idefics3").network.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"model_type": "martian", "transformers_version": version}
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=rf"transformers \S+ has no model type 'martian'. .*{said}"):
        load_model(LoadPlan(str(tmp_path)))
