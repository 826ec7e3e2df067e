"""A forced call is a call: whatever the model draws, `OutputStream` reads it, and its arguments fit their schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cbatch.base.errors import RequestError
from cbatch.base.params import SamplingParams
from cbatch.base.request import ToolChoice
from cbatch.sample.structured.compiler import ConstraintCompiler
from cbatch.sample.structured.grammar import GrammarState
from cbatch.sample.structured.lark import MAX_TOOLS, request_constraint
from cbatch.sample.structured.token_bitmask import bitmask_size, to_bools
from tests.support.chat_templates import MISTRAL_NAMED, QWEN3
from tests.support.tool_calls import CALL_TEMPLATES, TOOLS, make_chat_tokenizer, parse, tool

STOP = 2


@pytest.fixture(scope="module")
def compilers() -> Iterator[dict[tuple[str, bool], ConstraintCompiler]]:
    pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
    made = {
        (name, are_special): ConstraintCompiler(make_chat_tokenizer(template, are_special=are_special), 330)
        for name, template in CALL_TEMPLATES.items()
        for are_special in (True, False)
    }
    yield made
    for compiler in made.values():
        compiler.close()


def begin(compiler: ConstraintCompiler, choice: ToolChoice, tools: list[dict[str, Any]] = TOOLS) -> GrammarState:
    constraint = request_constraint(SamplingParams(), compiler._tokenizer, tools, choice)
    assert constraint is not None
    return GrammarState(compiler.compile(constraint), [STOP])


def allowed_tokens(state: GrammarState) -> list[int]:
    bitmask = np.zeros(bitmask_size(state.vocab_size), np.int32)
    assert state.fill(bitmask) is None
    return np.flatnonzero(to_bools(bitmask[None], state.vocab_size)).tolist()


ANY, NAMED = ToolChoice(), ToolChoice("get")


CALLS = [
    {"id": "abcdEF123", "type": "function", "function": {"name": name, "arguments": arguments}}
    for name, arguments in (("get_weather", {"city": "Ulm ñ", "days": 2, "unit": "C"}), ("now", {}))
]


@pytest.mark.parametrize("are_special", [True, False], ids=["special tags", "plain tags"])
@pytest.mark.parametrize("name", CALL_TEMPLATES)
def test_calls_are_written_as_the_template_writes_them(compilers: Any, name: str, are_special: bool) -> None:
    """Guards the format that the model was trained on, token by token, against one that only the parser understands."""
    compiler = compilers[name, are_special]
    tokenizer = compiler._tokenizer
    calls = CALLS[:1] if name == "Llama" else CALLS
    question = {"role": "user", "content": "?"}
    before = len(tokenizer.encode_chat([question]))
    ids = tokenizer.encode_chat([question, {"role": "assistant", "content": "", "tool_calls": calls}])
    written = ids[before : ids.index(STOP, before)]
    if name == "Hermes":  # this template writes an empty think block first
        written = written[written.index(tokenizer.backend.token_to_id("<tool_call>")) :]
    text, state = tokenizer.decode(written, skip_special_tokens=False), begin(compiler, ANY)
    for token in written:
        assert token in allowed_tokens(state), text
        state.accept(token)
    assert state.is_complete
    parsed = parse(tokenizer.reply_format, text, tools=TOOLS)
    assert [call.name for call in parsed.tool_calls] == [call["function"]["name"] for call in calls]


def test_tags_that_are_special_tokens_are_written_as_such(compilers: Any) -> None:
    """Guards against a tag spelt in letters, which the model was never trained on."""
    for name, tag in (("Mistral, list", "[TOOL_CALLS]"), ("Hermes", "<tool_call>")):
        compiler = compilers[name, True]
        expected = {tag} | ({"\n"} if name == "Hermes" else set())
        found = allowed_tokens(begin(compiler, ANY))
        assert {compiler._tokenizer.decode([token], skip_special_tokens=False) for token in found} == expected


def test_line_breaks_may_come_between_reasoning_and_a_call(compilers: Any) -> None:
    """Guards models that leave a line free behind their think tag; other models begin with the call."""
    compiler = compilers["Hermes", True]
    state, line_break = begin(compiler, NAMED), compiler._tokenizer.encode("\n")[-1]
    for _ in range(2):
        assert line_break in allowed_tokens(state)
        state.accept(line_break)
    assert allowed_tokens(state) == [compiler._tokenizer.backend.token_to_id("<tool_call>")]
    for name in ("Llama", "Mistral, list"):
        assert len(allowed_tokens(begin(compilers[name, True], NAMED))) == 1


def test_a_forced_call_is_the_constraint_of_its_request() -> None:
    """Guards the way to the engine."""
    tokenizer, regex = make_chat_tokenizer(QWEN3), SamplingParams(regex="a+")
    assert request_constraint(SamplingParams(), tokenizer, TOOLS) is None
    assert request_constraint(regex, None) == regex.constraint
    forced, named = (request_constraint(SamplingParams(), tokenizer, TOOLS, choice) for choice in (ANY, NAMED))
    assert forced is not None and named is not None and forced != named


@pytest.mark.parametrize(
    ("params", "template", "tools", "sentence"),
    [
        ({"regex": "a+"}, QWEN3, TOOLS, "cannot be combined with another constraint"),
        ({}, QWEN3, [], "forces a call, but the request has no tools"),
        ({}, "{{ tools }}<|tool_call>call:", TOOLS, "chat template shows no format of tool calls that can be enforced"),
        ({}, QWEN3, [tool("f", {"type": "string"})], "of the tool 'f' must be of the type object"),
        ({}, QWEN3, [tool("f", {"x-guidance": {}})], "of the tool 'f' cannot be used: the keyword x-guidance"),
        ({}, QWEN3, [tool(f"f{n}", {}) for n in range(MAX_TOOLS + 1)], "from at most 128 tools, not 129"),
        ({}, MISTRAL_NAMED, [tool("a b", {})], "no room for the name 'a b'"),
    ],
)
def test_what_cannot_be_enforced_is_said(params: Any, template: str, tools: list[Any], sentence: str) -> None:
    """Guards against a model that writes something else than it was asked for, and says nothing."""
    with pytest.raises(RequestError, match=sentence) as caught:
        request_constraint(SamplingParams(**params), make_chat_tokenizer(template), tools, ANY)
    assert caught.value.code == "invalid_row"


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"properties": {"a": {"type": "strin"}}}, "The JSON schema of the tool 'bad' cannot be used: .*strin"),
        ({"properties": {"a": {"unheardOf": 1, "not": {}}}}, "The JSON schema of the tool 'bad' cannot be used: "),
        ({"description": "x" * (1 << 20)}, "The call of a tool cannot be used: It has 10"),
    ],
)
def test_the_tool_with_a_wrong_schema_is_named(compilers: Any, parameters: dict[str, Any], sentence: str) -> None:
    """Guards the search for one wrong schema among many tools."""
    with pytest.raises(RequestError, match=sentence) as caught:
        begin(compilers["Hermes", True], ANY, [*TOOLS, tool("bad", parameters)])
    assert caught.value.code == "invalid_row"
    begin(compilers["Hermes", True], NAMED, [*TOOLS, tool("bad", parameters)])
