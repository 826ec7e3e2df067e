"""Constraints, tools and reasoning through the whole command, on a model forced to generate what is tested."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import Command
from tests.support.model_folder import TEMPLATE, save_model
from tests.support.tool_rounds import ADD, ADD_CALL, ROUNDS

THINKS = "{# <think> </think> #}" + TEMPLATE
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
FLAT = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CALLS = (
    "{% if tools %}<|im_start|>system\nYou may write <tool_call>{{ tools | tojson }}</tool_call><|im_end|>\n{% endif %}"
    + THINKS
)
OPENED = CALLS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


def read_response(row: dict[str, Any]) -> Any:
    """As the `openai` package reads the answer in a row of its Responses API."""
    from openai.types.responses import Response

    return Response.model_validate(row["response"]["body"], strict=True)


def read_completion(body: dict[str, Any]) -> Any:
    """As the `openai` package reads it."""
    from openai.types.chat import ChatCompletion  # takes a second, which not every worker needs to spend

    return ChatCompletion.model_validate(body)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), context=1500)


@pytest.fixture(name="command")
def command_on_templates(command: Command, model: Path) -> Command:
    command.model = model
    return command


def answers(command: Command, rows: list[dict[str, Any]], template: str, *options: object) -> list[dict[str, Any]]:
    (command.model / "chat_template.jinja").write_text(template)
    return command.answer(rows, *options)[1]


def chat_row(**body: Any) -> dict[str, Any]:
    """A request of the OpenAI Batch API."""
    messages = [{"role": "user", "content": "a"}]
    return {"custom_id": "b", "url": "/v1/chat/completions", "body": {"messages": messages, **body}}


def response_row(**body: Any) -> dict[str, Any]:
    """The same request to the Responses API."""
    return {"custom_id": "r", "url": "/v1/responses", "body": {"input": "a", **body}}


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_rows_keep_to_their_constraint(command: Command) -> None:
    """Guards each constraint beside rows without one, sampled and greedy; bad ones are error rows."""
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "response_format": schema, "temperature": 1.0, "n": 3, "max_tokens": 80},
        {"prompt": "b", "regex": "[0-9]{3}-[a-f]{2}"},
        {"prompt": "c", "choice": ["yes", "no"], "temperature": 1.0, "ignore_eos": True},
        {"prompt": "d", "grammar": 'start: "x" ("," "x"){3}'},
        {"prompt": "e", "max_tokens": 5, "regex": "(a{1,500}){1,500}"},
        {"prompt": "f", "regex": "(|x{0})", "echo": True, "ignore_eos": True, "raw": True, "max_tokens": 3},
        {"prompt": "f", "regex": "("},
        {"prompt": "g", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
        {"prompt": "h", "regex": "(a|b)*c", "choice": ["d"]},
        {"prompt": "i", "choice": "yes"},
        {"prompt": "j", "choice": ["yes"], "logit_bias": {"91": -100}, "bad_words": ["y"]},
        response_row(text={"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}}),
    ]
    done = answers(command, rows, THINKS)
    for choice in done[0]["choices"]:
        person = json.loads(choice["text"])
        assert choice["finish_reason"] == "stop" and list(person) == ["name", "age"] and 0 <= person["age"] <= 99
    assert len({choice["text"] for choice in done[0]["choices"]}) == 3
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", done[1]["text"]) and done[1]["finish_reason"] == "stop"
    assert done[2]["text"] in ("yes", "no") and done[2]["finish_reason"] == "stop"
    assert done[3]["text"] == "x,x,x,x" and set(done[4]["text"]) == {"a"}
    assert done[5]["text"] == "f" and done[5]["finish_reason"] == "stop" and not done[5]["usage"]["completion_tokens"]
    person = json.loads(read_response(done.pop()).output_text)
    assert list(person) == ["name", "age"] and 0 <= person["age"] <= 99
    errors = [row["error"] for row in done[6:]]
    assert {error["code"] for error in errors} == {"invalid_row"}
    assert all(error["message"].startswith(f"line {number}: ") for number, error in enumerate(errors, start=7))


def test_reasoning_has_a_field_of_its_own(command: Command) -> None:
    """Guards reasoning before an answer, reasoning without end, none at all, and plain text."""
    thought = {"regex": r"<think>\nhm\n</think>\n\n[0-9]"}
    rows: list[dict[str, Any]] = [
        {"prompt": "a", **thought},
        {"prompt": "b", "regex": f"(?-i:{thought['regex']})", "max_tokens": 10},  # not known to be too long
        {"prompt": "c", "choice": ["4"]},
        {"prompt": "d", "raw": True, **thought},
        chat_row(**thought),
        response_row(**thought),
        response_row(regex=f"(?-i:{thought['regex']})", max_output_tokens=10),
    ]
    done = answers(command, rows, THINKS)
    assert done[0]["reasoning"] == "hm" and done[0]["text"].isdigit()
    assert done[1]["finish_reason"] == "length" and done[1]["text"] == "" and "hm".startswith(done[1]["reasoning"])
    assert "reasoning" not in done[2] and done[2]["text"] == "4"
    assert done[3]["text"].startswith("<think>") and "reasoning" not in done[3]
    body = done[4]["response"]["body"]
    read_completion(body)
    assert body["choices"][0]["message"]["reasoning"] == "hm" and body["choices"][0]["message"]["content"].isdigit()
    whole, cut = map(read_response, done[5:])
    assert [whole.output[0].content[0].text, whole.output[1].type, whole.status] == ["hm", "message", "completed"]
    assert whole.output_text.isdigit() and whole.usage.output_tokens_details.reasoning_tokens > 0
    assert [one.type for one in cut.output] == ["reasoning"] and cut.output[0].status == cut.status == "incomplete"


def test_tool_calls_come_back(command: Command) -> None:
    """Guards tools in the prompt, and tool calls in the results of both forms."""
    call = r"<tool_call>\n\{\"name\": \"add\", \"arguments\": \{\"a\": [0-9]\}\}\n</tool_call>"
    asked = {"tools": [TOOL], "regex": call}
    rows: list[dict[str, Any]] = [
        {"prompt": "a", **asked},
        chat_row(**asked),
        {"prompt": "a", **asked, "tool_choice": "none"},
        {"prompt": "a", "regex": "fine", "tools": [TOOL]},
        response_row(tools=[FLAT], regex=call),
    ]
    done = answers(command, rows, CALLS)
    assert done[0]["finish_reason"] == "tool_calls" and done[0]["text"] == ""
    (found,) = done[0]["tool_calls"]
    assert found["type"] == "function" and found["function"]["name"] == "add" and len(found["id"]) == 9
    assert json.loads(found["function"]["arguments"]).keys() == {"a"}
    message = read_completion(done[1]["response"]["body"]).choices[0].message
    assert message.content is None and message.tool_calls is not None and message.tool_calls[0].type == "function"
    assert done[2]["text"].startswith("<tool_call>") and done[2]["finish_reason"] == "stop"
    assert done[3]["text"] == "fine" and done[3]["finish_reason"] == "stop"
    assert done[0]["usage"]["prompt_tokens"] > done[2]["usage"]["prompt_tokens"]
    response = read_response(done[4])
    (made,) = response.output
    assert (made.type, made.name, len(made.call_id), response.status) == ("function_call", "add", 9, "completed")
    assert response.usage.input_tokens == done[0]["usage"]["prompt_tokens"], "its prompt has the tools, too"
    result = {"type": "function_call_output", "call_id": made.call_id, "output": "5"}
    question = {"role": "user", "content": "a"}
    talk = [question, *done[4]["response"]["body"]["output"], result]
    row = response_row(input=talk, tools=[FLAT], instructions="Add.", regex="fine")
    (following,) = answers(command, [row], ROUNDS, "--echo-prompt")
    shown = following["response"]["body"]["prompt_text"]
    assert read_response(following).output_text == "fine"
    assert [shown.count(one) for one in ("system\nAdd.", "user\na<", "tool\n5<")] == [1, 1, 1]


def test_tools_are_run(command: Command) -> None:
    """Guards --tools: results go back to the model, rounds are bounded, and rows with tools of their own keep them."""
    tools = command.folder / "tools.py"
    tools.write_text(ADD + 'def long(a: int, b: int) -> str:\n    return "x" * 5000\n')
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "choice": [ADD_CALL]},
        chat_row(choice=[ADD_CALL]),
        {"prompt": "a", "choice": [ADD_CALL], "tools": [TOOL]},
        {"prompt": "a", "choice": ["fine"]},
        {"prompt": "a", "raw": True, "max_tokens": 2},
        {"prompt": "a", "choice": [ADD_CALL], "n": 2},
        {"prompt": "a", "choice": [ADD_CALL.replace("add", "long")]},
        response_row(choice=[ADD_CALL]),
    ]
    command.options += ("--tools", tools, "-q")
    done = answers(command, rows, ROUNDS, "--max-tool-rounds", "2")
    said, result, again, _ = done[0]["tool_messages"]
    functions = [message["tool_calls"][0]["function"] for message in (said, again)]
    assert functions == [{"name": "add", "arguments": '{"a": 2, "b": 3}'}] * 2
    assert (result["role"], result["content"]) == ("tool", "5")
    assert result["tool_call_id"] == said["tool_calls"][0]["id"]
    assert done[0]["text"] == ADD_CALL and done[0]["finish_reason"] == "stop", "the last answer comes without tools"
    once = done[2]["usage"]
    assert done[2]["finish_reason"] == "tool_calls" and "tool_messages" not in done[2]
    assert done[0]["usage"]["completion_tokens"] == 3 * once["completion_tokens"]
    body = read_completion(done[1]["response"]["body"])
    assert body.choices[0].message.content == ADD_CALL and len(done[1]["tool_messages"]) == 4
    assert done[3]["text"] == "fine" and "tool_messages" not in done[3] and done[4]["text"]
    assert [choice["finish_reason"] for choice in done[5]["choices"]] == ["tool_calls"] * 2
    assert done[6]["error"]["code"] == "prompt_too_long"
    assert read_response(done[7]).output_text == ADD_CALL and len(done[7]["tool_messages"]) == 4
    before = command.data
    assert command("--max-tool-rounds", "2", "--resume") == 1 and command.data == before
    assert command("--max-tool-rounds", "3", "--resume") == 2 and command.data == before


def test_calls_are_forced_and_limited(command: Command) -> None:
    """Guards tool_choice on a random model, in both forms of rows, and parallel_tool_calls."""
    parameters = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    strict = {"parameters": {**parameters, "additionalProperties": False}}
    tools = [{"type": "function", "function": {"name": name, **strict}} for name in ("add", "sub")]
    flat = [{"type": "function", "name": name, **strict} for name in ("add", "sub")]
    named = {"type": "function", "function": {"name": "sub"}}
    asked = {"tools": tools, "temperature": 1.0, "max_tokens": 190}
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    rows: list[dict[str, Any]] = [
        {"prompt": "a", **asked, "tool_choice": named},
        chat_row(**asked, tool_choice=named),
        chat_row(**asked, tool_choice="required"),
        {"prompt": "a", **asked, "choice": [call * 2]},
        {"prompt": "a", **asked, "choice": [call * 2], "parallel_tool_calls": False},
        response_row(**asked | {"tools": flat}, tool_choice={"type": "function", "name": "sub"}),
    ]
    done = answers(command, rows, CALLS.replace("{{ tools | tojson }}", ""))
    choices = [row["response"]["body"]["choices"][0] for row in done[1:3]]
    (sub,) = done[0]["tool_calls"]
    assert done[0]["finish_reason"] == "tool_calls" and done[0]["text"] == "" and sub["function"]["name"] == "sub"
    assert json.loads(sub["function"]["arguments"])["a"] in (1, 2)
    assert [len(choices[0]["message"]["tool_calls"]), choices[0]["finish_reason"]] == [1, "stop"]
    assert choices[1]["message"]["tool_calls"] and choices[1]["finish_reason"] in ("tool_calls", "length")
    assert [len(row["tool_calls"]) for row in done[3:5]] == [2, 1]
    response = read_response(done[5])
    assert [(one.type, one.name) for one in response.output] == [("function_call", "sub")]
    assert json.loads(response.output[0].arguments)["a"] in (1, 2) and response.tool_choice.name == "sub"


def test_echo_is_not_part_of_the_answer(command: Command) -> None:
    """Guards against reading an echoed conversation as reasoning and calls of the answer."""
    messages = [{"role": "user", "content": "<tool_call>"}, {"role": "assistant", "content": "<think>x</think>"}]
    rows: list[dict[str, Any]] = [
        {"messages": messages, "tools": [TOOL], "echo": True, "regex": "fine"},
        {"prompt": "a", "echo": True, "regex": "<think>b</think>c", "n": 2},
        {"prompt": "a <think>", "raw": True, "regex": "[0-9]{3}"},
        {"prompt": "a", "max_tokens": 0, "prompt_logprobs": 1, "n": 2},
    ]
    done = answers(command, rows, CALLS)
    assert done[0]["finish_reason"] == "stop" and "reasoning" not in done[0]
    assert done[0]["text"].endswith("assistant\nfine") and "<tool_call>" in done[0]["text"]
    assert done[1]["reasoning"] == "b" and done[1]["text"].endswith("assistant\nc")
    assert done[2]["text"].isdigit(), "plain text opens no thoughts"
    assert "n must be 1" in done[3]["error"]["message"]
