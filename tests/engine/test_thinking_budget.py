"""Reasoning ends when its budget does: the model is made to close it, and answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cbatch.base.config import EngineConfig
from cbatch.base.params import SamplingParams
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.loader import LoadedModel
from cbatch.requests.completion import Completion
from cbatch.text.tokenizer import CLOSING_SENTENCE
from tests.support.chat_templates import QWEN3
from tests.support.generation import generate
from tests.support.tiny_models import make_network
from tests.support.tool_calls import make_chat_tokenizer

OPENED = QWEN3.replace(r"{{- '<|im_start|>assistant\n' }}", r"{{- '<|im_start|>assistant\n<think>\n' }}")
VOCABULARY = 320
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def network() -> Any:
    return make_network("llama", vocab_size=VOCABULARY, max_position_embeddings=4096, eos_token_id=2)


@pytest.fixture
def engine(network: Any, request: pytest.FixtureRequest) -> Iterator[SteppingEngine]:
    """An engine for the template, and with the options, that the test is parametrized with."""
    template, options = request.param
    loaded = LoadedModel("tiny", lambda: network, make_chat_tokenizer(template), SamplingParams(), frozenset([2]))
    config = EngineConfig(device="cpu", kv_blocks=400, block_size=4, max_seqs=8, **options)
    with SteppingEngine(config, loaded) as made:
        yield made


def think(engine: SteppingEngine, budget: int | None, **params: Any) -> Completion:
    """A reply in which the model never closes its reasoning by itself."""
    assert engine.tokenizer is not None
    opening, closing = map(engine.tokenizer.backend.token_to_id, ("<think>", "</think>"))
    bias = {closing: -100, 2: -100} | ({opening: 100} if budget is not None and params.pop("opens", False) else {})
    asked = SamplingParams(thinking_budget=budget, logit_bias=bias, **{"max_tokens": 100} | params)
    (made,) = generate(engine, [HI], asked)
    assert made.error is None
    return made


EVERY = [(OPENED, {"run_ahead": ahead, "speculate": draft}) for ahead in (False, True) for draft in ("off", "auto")]


@pytest.mark.parametrize("engine", EVERY, indirect=True, ids=str)
def test_the_budget_ends_the_reasoning(engine: SteppingEngine) -> None:
    """Guards the number of tokens, what stands at the end, and the answer behind it, however steps are run."""
    without = think(engine, None)
    assert without.reasoning and not without.text and without.finish_reason == "length"
    for budget in (0, 1, 7, 20):
        made = think(engine, budget, n=2)
        assert made.reasoning is not None and made.reasoning.strip().endswith(CLOSING_SENTENCE.strip()) and made.text
        end = list(engine.tokenizer.reasoning_end)  # type: ignore[union-attr]
        tokens = list(made.choices[0].token_ids)
        assert tokens[:budget] == list(without.token_ids)[:budget] and tokens[budget : budget + len(end)] == end
        assert made.usage.reasoning_tokens and abs(made.usage.reasoning_tokens - 2 * (budget + len(end))) <= 4
        logged = think(engine, budget, logprobs=1)
        assert logged.token_ids == made.choices[0].token_ids and len(logged.choices[0].logprobs or ()) == 100


@pytest.mark.parametrize("engine", [(OPENED, {})], indirect=True, ids=["opened"])
def test_a_form_follows(engine: SteppingEngine) -> None:
    """Guards JSON behind reasoning: with a budget of its own, or when what is left would not hold the JSON."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    for budget in (5, None):
        made = think(engine, budget, **form)
        assert made.reasoning is not None and isinstance(json.loads(made.text)["n"], int)


@pytest.mark.parametrize("engine", [(QWEN3, {})], indirect=True, ids=["by the model"])
def test_the_model_may_open_it(engine: SteppingEngine) -> None:
    """Guards templates that leave the tag to the model, and replies without any reasoning, which have no budget."""
    made = think(engine, 4, opens=True)
    assert made.reasoning is not None and made.reasoning.strip().endswith(CLOSING_SENTENCE.strip()) and made.text
    plain = think(engine, 4)
    assert plain.reasoning is None and plain.token_ids == think(engine, None).token_ids
