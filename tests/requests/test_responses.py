"""OpenAI's Responses API: its requests are those of chat completions, and the `openai` package accepts the answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cbatch import Choice, Completion, ToolCall, Usage
from cbatch.api import Engine
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request, RequestDefaults
from cbatch.batch.line_processor import LineProcessor
from cbatch.batch.lines import Line, RowOptions, parse_line
from cbatch.cli.main import run_command
from cbatch.requests.completion import TokenLogprob
from cbatch.requests.responses import FIELDS
from tests.support.command import Command

USER, SYSTEM = {"role": "user", "content": "hi"}, {"role": "system", "content": "Be brief."}
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TOOL = {"type": "function", "name": "look", "description": "looks", "parameters": SCHEMA, "strict": True}
OF_CHAT = {"type": "function", "function": {name: TOOL[name] for name in TOOL if name != "type"}}
LOGPROBS = "message.output_text.logprobs"


def ask(body: dict[str, Any], url: str = "/v1/responses") -> dict[str, Any]:
    return {"custom_id": "r-1", "method": "POST", "url": url, "body": {"model": "gpt-x", **body}}


def parse(**body: Any) -> Request:
    """The row of a request, which says hi unless it has an input."""
    return parse_line(Line(0, json.dumps(ask({"input": "hi", **body})).encode()), RowOptions())


def read(completion: Completion) -> Any:
    """The answer in a row, as the `openai` package reads it, strictly."""
    return read_body(completion.to_dict()["response"]["body"])


def read_body(body: dict[str, Any]) -> Any:
    from openai.types.responses import Response  # takes a second, which not every worker needs to spend

    return Response.model_validate(body, strict=True)


def part(text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": text}


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "id": "x", "status": "completed", **fields}


CALLS = [
    item("function_call", call_id="c1", name="look", arguments='{"a": 1}'),
    item("function_call", call_id="c2", name="look", arguments="{}"),
]
CALLED = [
    {"id": one["call_id"], "type": "function", "function": {"name": "look", "arguments": one["arguments"]}}
    for one in CALLS
]
SAID = item("message", role="assistant", content=[part("well", "output_text") | {"annotations": []}], phase=None)
THOUGHT = item("reasoning", summary=[], content=[part("hm", "reasoning_text"), part(" hm", "reasoning_text")])
RESULTS = [item("function_call_output", call_id=name, output=text) for name, text in (("c1", "one"), ("c2", "two"))]
TOLD = [{"role": "tool", "tool_call_id": name, "content": text} for name, text in (("c1", "one"), ("c2", "two"))]
ANSWER = {"role": "assistant", "content": "well"}

SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({"input": "Hello"}, {"messages": [{"role": "user", "content": "Hello"}]}),
    "instructions": ({"instructions": "Be brief."}, {"messages": [SYSTEM, USER]}),
    "no instructions": ({"instructions": ""}, {"messages": [USER]}),
    "parts": (
        {"input": [{"role": "user", "content": [part("a"), part("b", "text")]}, item("message", **USER)]},
        {"messages": [{"role": "user", "content": "ab"}, USER]},
    ),
    "roles": (
        {"input": [{"role": "developer", "content": "x"}, {"type": None, **SYSTEM}, SAID, USER]},
        {"messages": [{"role": "developer", "content": "x"}, SYSTEM, ANSWER, USER]},
    ),
    "calls": (
        {"instructions": "Be brief.", "input": [USER, SAID, *CALLS, *RESULTS, SAID]},
        {"messages": [SYSTEM, USER, {**ANSWER, "tool_calls": CALLED}, *TOLD, ANSWER]},
    ),
    "reasoning": (
        {"input": [USER, THOUGHT, SAID, *CALLS, *RESULTS, THOUGHT, CALLS[0], RESULTS[0], THOUGHT, USER]},
        {
            "messages": [
                USER,
                {**ANSWER, "reasoning": "hm hm", "tool_calls": CALLED},
                *TOLD,
                {"role": "assistant", "content": "", "reasoning": "hm hm", "tool_calls": CALLED[:1]},
                TOLD[0],
                {"role": "assistant", "content": "", "reasoning": "hm hm"},
                USER,
            ]
        },
    ),
    "several answers": (
        {"input": [THOUGHT, THOUGHT, SAID, SAID, THOUGHT, SAID, USER]},
        {
            "messages": [
                {**ANSWER, "reasoning": "hm hmhm hm"},
                ANSWER,
                {**ANSWER, "reasoning": "hm hm"},
                USER,
            ]
        },
    ),
    "summary": (
        {"input": [item("reasoning", summary=[part("so", "summary_text")], encrypted_content=None), SAID]},
        {"messages": [{**ANSWER, "reasoning": "so"}]},
    ),
    "empty reasoning": ({"input": [USER, item("reasoning", summary=[])]}, {"messages": [USER]}),
    "parts of a result": (
        {"input": [CALLS[0], {**RESULTS[0], "output": [part("o"), part("ne")]}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": CALLED[:1]}, TOLD[0]]},
    ),
    "tools": (
        {"tools": [TOOL, {"type": "function", "name": "b", "strict": None}]},
        {"tools": [OF_CHAT, {**OF_CHAT, "function": {"name": "b"}}]},
    ),
    "a forced call": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "look"}, "parallel_tool_calls": False},
        {
            "tools": [OF_CHAT],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
            "parallel_tool_calls": False,
        },
    ),
    "any call": ({"tools": [TOOL], "tool_choice": "required"}, {"tools": [OF_CHAT], "tool_choice": "required"}),
    "no call": ({"tools": [TOOL], "tool_choice": "none"}, {"tools": [OF_CHAT], "tool_choice": "none"}),
    "plain text": ({"text": {"format": {"type": "text"}}}, {"response_format": {"type": "text"}}),
    "JSON": ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    "a schema": (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
            }
        },
    ),
    "log-probabilities": ({"include": [LOGPROBS], "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
    "sampling": (
        {"max_output_tokens": 5, "temperature": 0.5, "top_p": 0.9, "reasoning": {"effort": "low"}, "stop": "x"},
        {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "reasoning_effort": "low", "stop": "x"},
    ),
    "the template": ({"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"a": 1}}),
    "other columns": ({"whim": 1, "priority": 2}, {"whim": 1, "priority": 2}),
    "bookkeeping": (
        dict.fromkeys(["user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"], "x")
        | {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "truncation": "disabled", "stream": False}
        | {"background": False, "n": 1, "text": {"verbosity": "medium"}, "top_logprobs": 0, "include": []}
        | dict.fromkeys([*FIELDS - {"input", "text", "include", "background"}, "truncation", "reasoning"]),
        {"n": 1},
    ),
}  # fmt: skip
"""Bodies of requests, and of chat completions that ask for the same."""


@pytest.mark.parametrize("name", SAME)
def test_a_request_is_that_of_a_chat(name: str) -> None:
    """Guards instructions, results of tools and everything else of a request against getting lost on its way."""
    body, chat = SAME[name]
    made = parse(**body)
    line = ask({"messages": [USER], **chat}, "/v1/chat/completions")
    expected = parse_line(Line(0, json.dumps(line).encode()), RowOptions())
    assert made.error is expected.error is None
    fields = ("messages", "tools", "choice", "max_calls", "given", "given_template", "extra", "priority", "id")
    for field in fields:
        assert getattr(made, field) == getattr(expected, field), field
    assert json.dumps(made.given.get("response_format")) == json.dumps(expected.given.get("response_format"))
    assert made.call is not None and made.call.is_chat and made.call.model == "gpt-x"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id is not available: nothing is stored"),
    ({"conversation": {"id": "c"}}, "conversation is not available"),
    ({"background": True}, "background is not available"),
    ({"background_options": {}}, "background_options is not available"),
    ({"max_tool_calls": 3}, "max_tool_calls is not available"),
    ({"context_management": []}, "context_management is not available"),
    ({"access_programs": {}}, "access_programs is not available"),
    ({"image": {}}, "image is not available"),
    ({"response_format": {"type": "text"}}, "response_format is not available: text.format says it"),
    ({"stream": True}, "stream is not available"),
    ({"truncation": "auto"}, "truncation is not available: truncate_prompt"),
    ({"moderation": {}}, "moderation is not available"),
    ({"modalities": ["audio"]}, "modalities is not available"),
    ({"prompt": {"id": "p"}}, "this url takes input, not prompt"),
    ({"messages": [USER]}, "this url takes input, not messages"),
    ({"text": {"verbosity": "low"}}, "verbosity is not available"),
    ({"text": {"voice": "x"}}, "text.voice is not available: there are format, verbosity"),
    ({"text": "a"}, "text must not be a string"),
    ({"text": {"format": {"type": "x"}}}, "text.format.type must be text, json_object or json_schema, not 'x'"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name must not be null"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "json_schema": {}}}}, "text.format.json_schema is not"),
    ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema is not available"),
    ({"reasoning": {"effort": "low", "summary": "auto"}}, "reasoning.summary is not available"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort must be one of"),
    ({"tools": [TOOL, {"type": "web_search"}]}, "tools[1] is 'web_search', which is not available: tools are"),
    ({"tools": ["function"]}, "tools[0] is 'a string', which is not available"),
    ({"tools": [{**TOOL, "type": ["a"]}]}, "tools[0] is ['a'], which is not available"),
    ({"tools": [OF_CHAT]}, "tools[0].function is not available: there are name, description, parameters, strict"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading is not available"),
    ({"tools": [{**TOOL, "parameters": "x"}]}, "tools[0].parameters must not be a string"),
    ({"tools": TOOL}, "tools must not be an object"),
    ({"tools": [TOOL], "tool_choice": {"type": "web_search"}},
     'tool_choice must be auto, none, required or {"type": "function", "name": ...}'),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "allowed_tools is not"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "b"}}, "tool_choice names 'b'"),
    ({"include": ["reasoning.encrypted_content"]}, "include has 'reasoning.encrypted_content', which is not available"),
    ({"include": LOGPROBS}, "include must not be a string"),
    ({"top_logprobs": 2}, f'top_logprobs needs include to be ["{LOGPROBS}"]'),
    ({"metadata": {"a": 1}}, "metadata.a must not be a number"),
    ({"metadata": ["a"]}, "metadata must not be a list"),
    ({"instructions": [SYSTEM]}, "instructions must not be a list"),
    ({"input": ""}, "input is empty"),
    ({"input": []}, "input is empty"),
    ({"input": [item("reasoning", summary=[])]}, "input is empty"),
    ({"input": None}, "input must not be null"),
    ({"input": ["message"]}, "input[0] is 'a string', which is not available: there are reasoning, message"),
    ({"input": [USER, item("item_reference")]}, "input[1] is 'item_reference', which is not available"),
    ({"input": [{**USER, "role": "tool"}]}, "input[0].role must be one of user, assistant, system, developer"),
    ({"input": [{"role": "user"}]}, "input[0].content must not be null"),
    ({"input": [{**USER, "name": "me"}]}, "input[0].name is not available: there are role, content"),
    ({"input": [{**USER, "content": [part("a"), {"type": "input_image", "file_id": "x"}]}]}, "image 1 of message 1"),
    ({"input": [item("reasoning", summary=[{"type": "input_image", "image_url": "x"}])]}, "type 'input_image'"),
    ({"input": [{**USER, "content": [{"type": "input_file", "file_id": "x"}]}]}, "type 'input_file'"),
    ({"input": [{**USER, "content": [{"type": "input_audio"}]}]}, "input[0] has content of the type 'input_audio'"),
    ({"input": [{**USER, "content": ["text"]}]}, "input[0] has content of the type 'a string'"),
    ({"input": [item("reasoning", summary=[], encrypted_content="x")]}, "input[0].encrypted_content is not available"),
    ({"input": [{**CALLS[0], "arguments": {"a": 1}}]}, "input[0].arguments must not be an object"),
    ({"input": [{**CALLS[0], "namespace": "n"}]}, "input[0].namespace is not available"),
    ({"input": [CALLS[0], RESULTS[1]]}, "input[1].call_id is 'c2', which no function_call before it has"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_what_is_not_available_is_named(body: dict[str, Any], message: str) -> None:
    """Guards each refusal: what a request asks for and a model here cannot do is never left out silently."""
    row = parse(**body)
    assert row.error is not None and row.error.code == "invalid_row" and message in str(row.error), row.error
    assert str(row.error).startswith("line 1: ") and row.id == "r-1" and row.call is not None


def test_no_refusal_is_untested() -> None:
    """Guards fields that are added to those of a request: each is translated or refused, and tested above."""
    named = {name for body, _ in REFUSED for name in body} | {name for body, _ in SAME.values() for name in body}
    assert named >= FIELDS
    from openai.types.responses.response_create_params import ResponseCreateParamsBase

    unknown = {name for name in ResponseCreateParamsBase.__annotations__ if parse(**{name: None}).extra}
    assert not unknown, "fields of the API that would pass for columns"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("instruction", "instructions"),
        ("inputs", "input"),
        ("includes", "include"),
        ("max_output_token", "max_output_tokens"),
        ("previous_response_ids", "previous_response_id"),
        ("maxToolCalls", "max_tool_calls"),
    ],
)
def test_misspelt_names(name: str, meant: str) -> None:
    """Guards fields against passing for columns because of a letter."""
    error = parse(**{name: "x"}).error
    assert error is not None and error.code == "unknown_parameter" and f"did you mean {meant!r}?" in str(error)


KEY = "0" * 32
CALL = ToolCall("look", '{"a": "é"}', "abc123xyz")
SCORED = [TokenLogprob("a", 4, -0.125, b"a", (TokenLogprob("b", 5, -2.0, b"b"),))]
USAGE = Usage(7, 3, 4, 2)


def answer(choice: Choice, **body: Any) -> Completion:
    row = replace(parse(**body), key=KEY)
    row.params = SamplingParams().merged(row.given)
    return Completion(row, choices=[choice], usage=USAGE)


FORM = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}


def test_an_answer_repeats_its_request() -> None:
    """Guards fields of the request that a Response has, their order, and what stands for those that it lacks."""
    asked = {"instructions": "Be brief.", "tools": [TOOL], "tool_choice": "required", "temperature": 0.5, "top_p": 0.25}
    asked |= {"max_output_tokens": 9, "metadata": {"b": "c", "a": "d"}, "parallel_tool_calls": False, "text": FORM}
    body = answer(Choice(text="well"), **asked).to_dict()["response"]["body"]
    assert json.dumps({name: body[name] for name in asked}) == json.dumps(asked)
    response = read_body(body)
    assert response.text.format.schema_ == SCHEMA and response.tools[0].name == "look" and response.model == "gpt-x"
    response = read(answer(Choice(text="well"), tool_choice=None, metadata=None, text=None))
    assert (response.instructions, response.max_output_tokens, response.metadata) == (None, None, {})
    assert (response.tools, response.tool_choice, response.parallel_tool_calls) == ([], "auto", True)
    assert (response.temperature, response.top_p, response.text.format.type) == (0.0, 1.0, "text")
    forced = read(answer(Choice(), tools=[TOOL], tool_choice={"type": "function", "name": "look"}))
    assert forced.tool_choice.name == "look"


@pytest.mark.parametrize(
    ("choice", "kinds", "status"),
    [
        (Choice(text="well"), ["message"], "completed"),
        (Choice(), ["message"], "completed"),
        (Choice(text="we", finish_reason="length"), ["message"], "incomplete"),
        (Choice(text="{}", finish_reason="length", closed=True), ["message"], "incomplete"),
        (Choice(text="well", reasoning="hm"), ["reasoning", "message"], "completed"),
        (Choice(reasoning="hm", finish_reason="length"), ["reasoning"], "incomplete"),
        (Choice(text="hm", note="It was not closed."), ["message"], "completed"),
        (Choice(tool_calls=(CALL, replace(CALL, id="z")), finish_reason="tool_calls"), ["function_call"] * 2,
         "completed"),
        (Choice(text="w", reasoning="h", tool_calls=(CALL,), finish_reason="tool_calls"),
         ["reasoning", "message", "function_call"], "completed"),
        (Choice(text="w", tool_calls=(CALL,), finish_reason="length"), ["message", "function_call"], "incomplete"),
        (Choice(reasoning="h", logprobs=SCORED, finish_reason="length"), ["reasoning", "message"], "incomplete"),
    ],
)  # fmt: skip
def test_an_answer_comes_back(choice: Choice, kinds: list[str], status: str) -> None:
    """Guards every kind of output: the package's types take it, it is read again, and its conversation goes on."""
    completion = answer(choice)
    row = json.loads(json.dumps(completion.to_dict()))
    assert row["id"] == f"batch_req_{KEY}" and row["custom_id"] == "r-1" and row["error"] is None
    response = read(completion)
    assert (response.id, response.object, response.created_at) == (f"resp_{KEY}", "response", 0)
    assert [one.type for one in response.output] == kinds and response.output_text == choice.text
    assert response.status == status and response.error is None
    details = response.incomplete_details
    assert (details and details.reason) == ("max_output_tokens" if status == "incomplete" else None)
    own = [one.status for one in response.output if one.type != "function_call"]
    assert all(one.status == "completed" for one in response.output if one.type == "function_call")
    assert own == ["completed"] * (len(own) - 1) + [status] * bool(own)
    assert len({one.id for one in response.output}) == len(kinds)
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (7, 3, 10)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 2)
    again = Completion.from_row(row)
    assert again.to_dict() == row and again.choices == (replace(choice, logprobs=again.logprobs),)
    assert again.usage == replace(USAGE, cached_tokens=0)
    assert (again.logprobs is None) == (choice.logprobs is None)
    if choice.logprobs is not None:
        assert [(one.token, one.top[0].token) for one in again.logprobs or ()] == [("a", "b")]
    following = parse(input=[USER, *row["response"]["body"]["output"], USER])
    assert following.error is None and following.messages is not None
    assert following.messages[1] == completion.to_message()


def test_what_an_answer_repeats_is_in_its_key(engine: Engine) -> None:
    """Guards --resume against rows that repeat another request; what the API only keeps books of changes no key."""
    builder = LineProcessor(engine.core.input_processor(RequestDefaults(params={"n": 1})))

    def key(url: str = "/v1/responses", **body: Any) -> str:
        made = builder.process(Line(0, json.dumps(ask(body, url)).encode()))
        assert isinstance(made, Request), made
        return made.key

    bodies: list[dict[str, Any]] = [{}, {"metadata": {"a": "b"}}, {"parallel_tool_calls": False}, {"instructions": "b"}]
    bodies += [{"text": FORM}, {"max_output_tokens": 5}, {"temperature": 0.5}]
    bodies += [{"metadata": {"a": "b", "b": "c"}}, {"metadata": {"b": "c", "a": "b"}}]
    keys = [key(input="hi", **body) for body in bodies] + [key("/v1/chat/completions", messages=[USER])]
    assert len(set(keys)) == len(keys)
    assert key(input="hi") == key(input=[USER], user="me", store=False, tool_choice="auto") == keys[0]


@pytest.mark.parametrize(("body", "options"), [({"n": 2}, {}), ({}, {"n": 3})])
def test_an_answer_has_one_output(body: dict[str, Any], options: dict[str, Any], engine: Engine) -> None:
    """Guards against outputs that are computed and shown to nobody, if a row or --n asks for several."""
    builder = LineProcessor(engine.core.input_processor(RequestDefaults(params=options)))
    made = builder.process(Line(0, json.dumps(ask({"input": "hi", **body})).encode()))
    assert isinstance(made, Completion) and "n is not available: a Response has one output" in str(made.error)


def test_a_file_of_requests(tmp_path: Path, model_folder: Path) -> None:
    """Guards the whole command: answers, error lines, columns, and a resume after other limits and other columns."""
    rows = [
        ask({"input": "two", "max_output_tokens": 4, "temperature": 1, "metadata": {"a": "b"}}) | {"note": 1},
        ask({"input": [USER, SAID, USER], "include": [LOGPROBS], "top_logprobs": 1, "max_output_tokens": 3}),
        ask({"input": "two", "background": True}),
        ask({"input": "three", "stop": ["a", "e"]}),
        ask({"input": "x" * 5000}),
    ]
    command = Command(tmp_path, model_folder, rows)
    assert command("-q", "--token-ids", "--echo-prompt") == 1
    done = command.rows()
    bodies = [row["response"]["body"] for row in done if not row["error"]]
    first, second, _ = map(read_body, bodies)
    assert (first.status, first.usage.output_tokens, first.temperature) == ("incomplete", 4, 1.0)
    assert len(bodies[0]["token_ids"]) == 4 and "two" in bodies[0]["prompt_text"] and done[0]["extra"] == {"note": 1}
    (said,) = second.output[0].content
    assert bodies[1]["prompt_text"].count("well") == 1 and len(said.logprobs) == second.usage.output_tokens
    assert [(row["error"] or {}).get("code") for row in done] == [None, None, "invalid_row", None, "prompt_too_long"]
    for row in (done[2], done[4]):
        assert row["response"]["status_code"] == 400 and row["response"]["body"]["error"]["message"]
    before = command.data
    assert command("-q", "--token-ids", "--echo-prompt", "--resume") == 1 and command.data == before
    assert command.figures()["rows_kept"] == 5
    same = ["verify", str(command.out), "-m", str(model_folder), "--sample", "100%", "-q", *map(str, command.options)]
    assert run_command(same) == 0


def test_a_higher_limit(tmp_path: Path, model_folder: Path) -> None:
    """Guards rows that end by themselves, which are the same but for ids of their key, and those that go on."""
    rows = [ask({"input": [USER, SAID, USER]}), ask({"input": "two", "temperature": 1})]
    command, options = Command(tmp_path, model_folder, rows), ("-q", "--token-ids", "--max-tokens")
    assert command(*options, 9) == 0
    assert [row["response"]["body"]["status"] for row in command.rows()] == ["completed", "incomplete"]
    assert command(*options, 12, "--resume", "--continue-truncated") == 0
    resumed, figures = command.data, command.figures()
    assert (figures["rows_kept"], figures["rows"]) == (1, 1)
    assert command(*options, 12, "--overwrite") == 0 and command.data == resumed
