"""Texts of real models: those of transformers in float32, and those of llama.cpp from the same file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.real_model import GEMMA3, MODELS, SMOLLM2, RealModel
from tests.support.real_models import engine_of, need

pytestmark = pytest.mark.real

PROMPTS = {
    SMOLLM2.name: (
        "What is the capital of France?",
        "Write one sentence about the sea.",
        "Name three fruits, separated by commas.",
        "Translate to French: good morning",
    ),
    GEMMA3.name: ("The capital of France is", "Water boils at a temperature of"),
}
"""Of different lengths, so that a step mixes prefill and decoding. Gemma is no chat model."""

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "llama_cpp_outputs.json").read_text())
"""Written by `scripts.record_llama_cpp`."""

NEARLY, MOST_NEAR = 0.5, 5
"""How many nats a token may be behind the likeliest one, and how many of an output's may be behind at all."""


class Answer(NamedTuple):
    prompt_ids: list[int]
    token_ids: list[int]
    text: str


def answers_of_transformers(folder: Path, prompts: Sequence[str], num_tokens: int) -> list[Answer]:
    """One after the other, greedily, in float32."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt in prompts:
        if tokenizer.chat_template is not None:
            asked = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        output = network.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens)
        made = output[0, ids.shape[1] :].tolist()
        found.append(Answer(ids[0].tolist(), made, tokenizer.decode(made, skip_special_tokens=True)))
    return found


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_float32_equals_generate(model: RealModel) -> None:
    """Guards tokenizer, template, every weight and end tokens on real numbers, several requests in one batch."""
    prompts, num_tokens = PROMPTS[model.name], 24 if model is SMOLLM2 else 12
    expected = answers_of_transformers(need(model.folder), prompts, num_tokens)
    with engine_of(model.folder, dtype="float32") as engine:
        assert [engine.encode(prompt) for prompt in prompts] == [answer.prompt_ids for answer in expected]
        found = engine.generate(list(prompts), {"max_tokens": num_tokens})
    assert [list(one.token_ids) for one in found] == [answer.token_ids for answer in expected]
    assert [one.text for one in found] == [answer.text for answer in expected]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_gguf_follows_llama_cpp(model: RealModel) -> None:
    """Guards the tokenizer, template and integers of a GGUF file against llama.cpp's greedy output of the same file.

    Its tokens are the likeliest here, or nearly so where several are as likely: both round activations, in other ways.
    """
    with engine_of(model.gguf) as engine:
        rows = [row for row in RECORDED["outputs"] if row["model"] == model.name]
        assert rows
        for row in rows:
            assert engine.encode(row["prompt"], raw=row["raw"]) == row["prompt_ids"]
            tokens = engine.score(row["prompt_ids"], row["token_ids"], top=1).tokens
            behind = [token.top[0].logprob - token.logprob for token in tokens]
            assert len(behind) == len(row["token_ids"]) and max(behind) < NEARLY, (row["text"], behind)
            assert sum(gap > 0 for gap in behind) <= MOST_NEAR
            assert engine.detokenize(row["token_ids"]) == row["text"]
