"""Requests with a forced call get one from a model that knows nothing: from the messages to the parsed answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cbatch.base.chat_template_options import TemplateOptions
from cbatch.base.config import EngineConfig
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request, ToolChoice
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.loader import LoadedModel
from cbatch.requests.completion import Completion
from tests.support.chat_templates import QWEN3
from tests.support.tiny_models import make_network
from tests.support.tool_calls import CALL_TEMPLATES, WEATHER, make_chat_tokenizer, tool

VOCABULARY = 320
STOP = 2
LIGHT = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
TOOLS = [tool("get_weather", WEATHER), tool("set_light", LIGHT), tool("now", None)]
SCHEMAS = {"get_weather": WEATHER, "set_light": LIGHT, "now": {"type": "object", "maxProperties": 0}}
ANY, NAMED = ToolChoice(), ToolChoice("set_light")
OPENED = QWEN3.replace(r"{{- '<|im_start|>assistant\n' }}", r"{{- '<|im_start|>assistant\n<think>\n' }}")
LIKELY = 4.0
"""A bias with which a token comes within some dozens of tokens."""
QUESTION = {"role": "user", "content": "What now?"}


@pytest.fixture(scope="module")
def network() -> Any:
    pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
    return make_network("llama", vocab_size=VOCABULARY, max_position_embeddings=4096, eos_token_id=STOP)


@pytest.fixture
def engine(network: Any, request: pytest.FixtureRequest) -> Iterator[SteppingEngine]:
    """An engine for the template that the test is parametrized with."""
    loaded = LoadedModel(
        "tiny", lambda: network, make_chat_tokenizer(request.param), SamplingParams(), frozenset([STOP])
    )
    with SteppingEngine(EngineConfig(device="cpu", kv_blocks=2000, block_size=16, max_seqs=32), loaded) as made:
        yield made


def ask(engine: SteppingEngine, *requests: Request) -> list[Completion]:
    """Runs requests side by side."""
    inputs = engine.input_processor()
    encoded = [inputs.encode(request) for request in requests]
    outputs = {engine.add_request(one): engine.output_processor(one) for one in encoded}
    while engine.has_work:
        for event in engine.step():
            outputs[event.request_id].take(event)
    return [output.completion() for output in outputs.values()]


def request(choice: ToolChoice | None, *more: dict[str, Any], seed: int = 0, **fields: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 300} | fields.pop("params", {}))
    return Request(messages=[QUESTION, *more], tools=TOOLS, choice=choice, params=params, seed=seed, **fields)


def check_calls(completion: Completion, choice: ToolChoice) -> None:
    """At least one call, or one of the function that was named; valid arguments; no other text, unless cut off."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema, of the extra `dev`, is not installed")
    for made in completion.choices:
        assert made.tool_calls, made
        for call in made.tool_calls:
            jsonschema.Draft202012Validator(SCHEMAS[call.name]).validate(json.loads(call.arguments))
        if choice.name is not None:
            assert [call.name for call in made.tool_calls] == [choice.name]
            assert made.finish_reason == "tool_calls"
        assert not made.text or made.finish_reason == "length"


@pytest.mark.parametrize(("engine"), CALL_TEMPLATES.values(), ids=CALL_TEMPLATES, indirect=True)
def test_a_random_model_calls_tools_in_every_format(engine: SteppingEngine) -> None:
    """Guards `required` and a named function, greedy and at temperature 1, from the prompt to the parsed calls."""
    hot = {"temperature": 1.0, "n": 2}
    asked = [(choice, params) for choice in (ANY, NAMED) for params in ({}, hot)]
    requests = [request(choice, params=params, seed=seed) for seed, (choice, params) in enumerate(asked)]
    for (choice, _), completion in zip(asked, ask(engine, *requests), strict=True):
        check_calls(completion, choice)


def tags_of(engine: SteppingEngine) -> tuple[int, int]:
    assert engine.tokenizer is not None
    opening, closing = (engine.tokenizer.backend.token_to_id(tag) for tag in ("<think>", "</think>"))
    return opening, closing


def likely_end(engine: SteppingEngine) -> dict[str, Any]:
    """Parameters with which a model often ends its reasoning."""
    return {"temperature": 1.0, "n": 4, "max_tokens": 200, "logit_bias": {tags_of(engine)[1]: LIKELY}}


@pytest.mark.parametrize("engine", [OPENED], ids=["opened"], indirect=True)
def test_a_call_comes_after_the_reasoning(engine: SteppingEngine) -> None:
    """Guards models whose template opens the think tag: they reason freely, and the call, or the form, follows."""
    asked = [request(choice, params=likely_end(engine)) for choice in (ANY, NAMED)]
    for choice, completion in zip((ANY, NAMED), ask(engine, *asked), strict=True):
        check_calls(completion, choice)
        assert any(made.reasoning for made in completion.choices)
    for answer, text in (("hm</think>", "Hi"), ("hm</think>\n\nOh", "\n\nHi")):
        (completion,) = ask(engine, request(None, answer=answer, params={"regex": "\n\nHi"}))
        assert (completion.text, completion.reasoning, completion.finish_reason) == (text, None, "stop")


BEGUN = {"<think>\nI should": True, "<think>\nhm\n</think>": False, "": False}
"""The text of a message that is continued, and whether it leaves reasoning open."""


@pytest.mark.parametrize("engine", [QWEN3], ids=["Hermes"], indirect=True)
def test_reasoning_of_its_own(engine: SteppingEngine) -> None:
    """Guards calls of a model that would begin a think block, and `continue_final_message`: what was begun goes on."""
    opening = {"logit_bias": {tags_of(engine)[0]: 100.0}}
    template = TemplateOptions(continue_final_message=True)
    begun = [{"role": "assistant", "content": content} for content in BEGUN]
    asked = [request(NAMED, one, template=template, params=likely_end(engine)) for one in begun]
    free, called, *continued = ask(
        engine,
        request(None, params=opening | {"max_tokens": 5}),
        request(NAMED, params=opening),
        *asked,
    )
    assert free.reasoning is not None or free.text == "", "the bias makes it begin a think block"
    check_calls(called, NAMED)
    assert called.reasoning is None
    for one, completion, thinks in zip(asked, continued, BEGUN.values(), strict=True):
        assert engine.input_processor().encode(one).is_thinking is thinks
        check_calls(completion, NAMED)
        assert all("should" not in (made.reasoning or "") for made in completion.choices)
        assert any(made.reasoning for made in completion.choices) is thinks
