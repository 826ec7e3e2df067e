"""Adapters over weights that stay the integers of their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from cbatch.base.config import EngineConfig
from cbatch.base.errors import ModelError
from cbatch.base.params import SamplingParams
from cbatch.engine.stepping_engine import SteppingEngine
from tests.support.adapters import draw_adapter, merged_by_peft, save_adapter
from tests.support.generation import generate
from tests.support.gguf_files import gguf_model, write_model
from tests.support.model_checks import is_greedy_output
from tests.support.quantized_folders import awq, awq_settings, tiny_model, write_folder
from tests.support.tiny_models import make_prompts

pytestmark = pytest.mark.kernels

PROMPTS = make_prompts([41, 9], seed=8)


def outputs_of(model: Path, lora: dict[str, str] | None, names: list[str], **config: Any) -> list[list[int]]:
    settings: dict[str, Any] = {"block_size": 16, "kv_blocks": 60, "device": "cpu"} | config
    engine = SteppingEngine(EngineConfig(model=str(model), lora=lora, **settings))
    asked = [SamplingParams(max_tokens=10, ignore_eos=True, lora=name) for name in names for _ in PROMPTS]
    outputs = generate(engine, PROMPTS * len(names), asked)
    assert not any(output.error for output in outputs)
    return [list(output.token_ids) for output in outputs]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_gguf_files(kind: str, tmp_path: Path) -> None:
    """Guards rows that such files hold in another order, the integers, and adapters of another model."""
    path = tmp_path / "model.gguf"
    network = write_model(path, gguf_model(kind), Kind.Q8_0)
    place = save_adapter(tmp_path / "adapter", draw_adapter(network, seed=1))
    lora = {"own": str(place)}
    mixed = outputs_of(path, lora, ["", "own"], dtype="float32")
    for reference, outputs in ((network, mixed[:2]), (merged_by_peft(network, place), mixed[2:])):
        assert all(is_greedy_output(reference, prompt, output) for prompt, output in zip(PROMPTS, outputs, strict=True))
    kept = outputs_of(path, lora, ["", "own"])
    assert kept[:2] == outputs_of(path, None, [""]) and kept[2:] != kept[:2]
    other = save_adapter(tmp_path / "other", draw_adapter(tiny_model("qwen3").network, seed=1))
    with pytest.raises(ModelError, match="it was made for another model"):
        outputs_of(path, {"own": str(other)}, ["own"])


def test_quantized_checkpoints(tmp_path: Path) -> None:
    """Guards packed matrices of other programs: an adapter adds to their products, and leaves other rows alone."""
    saved = tiny_model()
    network = write_folder(tmp_path / "model", saved, awq_settings(), awq())
    place = save_adapter(tmp_path / "adapter", draw_adapter(network, seed=1))
    lora, merged = {"own": str(place)}, merged_by_peft(network, place)
    mixed = outputs_of(tmp_path / "model", lora, ["own"], dtype="float32")
    assert all(is_greedy_output(merged, prompt, output) for prompt, output in zip(PROMPTS, mixed, strict=True))
    kept = outputs_of(tmp_path / "model", lora, ["", "own"], weight_cache=False)
    assert kept[:2] == outputs_of(tmp_path / "model", None, [""], weight_cache=False) and kept[2:] != kept[:2]
