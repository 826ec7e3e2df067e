"""Tools: what models are told of them, and that no call can hang, crash or flood what called it."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, TypedDict

import pytest

from cbatch.base.errors import ConfigError
from cbatch.tools.tool import MAX_RESULT_CHARACTERS, Tool, command, load_tools

SOURCE = '''
"""Some tools."""
import os, sys, time
from typing import Literal
from json import dumps

def weather(city: str, days: int = 1, unit: Literal["C", "F"] | None = None) -> dict:
    """The weather in a city.

    city: its name
    days (int): how many days
    """
    print("noise")
    return {"city": city, "days": days, "unit": unit}

def tags(words: list[str], weights: dict, flag: bool = False, limit: float = 0.5) -> str:
    """Joins words."""
    return "+".join(words)

def fails(n: int) -> str:
    """Fails."""
    raise ValueError(f"not {n}")

def _hidden() -> None: ...
'''


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tool]:
    path = tmp_path_factory.mktemp("tools") / "mine.py"
    path.write_text(SOURCE)
    return {tool.name: tool for tool in load_tools([path])}


def test_functions_are_described_by_their_annotations(tools: dict[str, Tool]) -> None:
    """Guards what the model sees: names, types, defaults and explanations; not what is private or imported."""
    assert list(tools) == ["weather", "tags", "fails"]
    function = tools["weather"].schema["function"]
    assert function["description"] == "The weather in a city."
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "its name"},
            "days": {"type": "integer", "description": "how many days"},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["city"],
        "additionalProperties": False,
    }
    kinds = {name: one["type"] for name, one in tools["tags"].parameters["properties"].items()}
    assert kinds == {"words": "array", "weights": "object", "flag": "boolean", "limit": "number"}


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("weather", '{"city": "Kyōto"}', '{"city": "Kyōto", "days": 1, "unit": null}'),
        ("tags", '{"words": ["a", "b"], "weights": {}}', "a+b"),
        ("fails", '{"n": 3}', "Error: ValueError: not 3"),
        ("weather", "{}", "Error: the argument 'city' is missing."),
        ("weather", '{"city": "x", "no": 1}', "Error: TypeError: weather() got an unexpected keyword argument 'no'"),
        *(("weather", arguments, "Error: ") for arguments in ("", "{", "[]", "5", '{"city": NaN}')),
    ],
)
def test_calls(tools: dict[str, Tool], name: str, arguments: str, result: str) -> None:
    """Guards results and errors: one that fails tells the model why, and what it prints is not part of the result."""
    found = tools[name].run(arguments)
    assert found == result or (result == "Error: " and found.startswith(result))


@dataclass
class Place:
    """Somewhere."""

    city: str
    country: str | None = None


class Units(TypedDict):
    metric: bool


class Options(Units, total=False):
    days: list[int]


def forecast(place: Place, options: Options, hours: Optional[int], words: dict[str, int] | None = None) -> list[Any]:  # noqa: UP045
    """The weather somewhere."""
    return [place.city, options["metric"], hours, words]


def test_functions_of_this_process() -> None:
    """Guards notebooks: annotations of every kind become a schema, and a call gets what they say."""
    (tool,) = load_tools([forecast])
    place = {"city": {"type": "string"}, "country": {"anyOf": [{"type": "string"}, {"type": "null"}]}}
    options = {"metric": {"type": "boolean"}, "days": {"type": "array", "items": {"type": "integer"}}}
    assert tool.parameters["properties"] == {
        "place": {"type": "object", "properties": place, "required": ["city"], "additionalProperties": False},
        "options": {"type": "object", "properties": options, "required": ["metric"], "additionalProperties": False},
        "hours": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "words": {"type": "object", "additionalProperties": {"type": "integer"}},
    }
    assert tool.parameters["required"] == ["place", "options", "hours"]
    arguments = {"place": {"city": "Rome"}, "options": {"metric": True}, "hours": None}
    assert tool.run(json.dumps(arguments)) == '["Rome", true, null, null]'
    for wrong, why in ((lambda x: x, "<lambda>.* has no name"), (max, "no signature"), (dict, "cannot be a tool")):
        with pytest.raises(ConfigError, match=why):
            load_tools([wrong])


def test_a_command_as_a_tool(tmp_path: Path) -> None:
    """Guards commands: arguments in their places and on stdin, never read by a shell."""
    path = tmp_path / "tools.json"
    echo = {"name": "echo", "command": ["echo", "-n", "{text}", "{n}"], "parameters": {"required": ["text"]}}
    path.write_text(json.dumps([echo, {"name": "cat", "command": ["cat"]}]))
    first, second = load_tools([path])
    assert first.run('{"text": "a b; $HOME", "n": 5}') == "a b; $HOME 5"
    assert json.loads(second.run('{"x": [1]}')) == {"x": [1]}


def test_a_tool_that_hangs_or_floods_is_ended() -> None:
    """Guards the chat against tools that never end, children of theirs that hold on, and endless output."""
    sleeper = Tool("s", "", {}, command("sh", "-c", "sleep 100 & sleep 100", timeout_s=0.3))
    assert sleeper.run("{}") == "Error: no result within 0.3 s."
    cancelled = threading.Event()
    threading.Timer(0.2, cancelled.set).start()
    started = time.monotonic()
    assert Tool("s", "", {}, command("sleep", "100")).run("{}", cancelled) == "Error: cancelled."
    assert time.monotonic() - started < 30
    for text in ("yes", "yes >&2", "yes | head -c 300000"):
        flood = Tool("f", "", {}, command("sh", "-c", text)).run("{}")
        assert len(flood) < MAX_RESULT_CHARACTERS + 50
    assert flood.endswith("[the rest is cut off]")
    missing = Tool("n", "", {}, command("/no/such/program")).run("{}")
    assert missing.startswith("Error: the tool cannot be run: No such file")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "x = 1", "defines no public function"),
        ("a.py", "def f(", "SyntaxError"),
        ("a.py", "def f(*a): ...", "only arguments with names"),
        ("a.py", "def f(a: object): ...", "no JSON schema"),
        ("a.json", "{", "not valid JSON"),
        ("a.json", "[5]", "tool 1 must be an object"),
        ("a.json", '{"command": ["x"]}', "must have a name"),
        ("a.json", '{"name": "x", "command": "ls"}', "must be a list of words"),
        ("a.json", '{"name": "x", "command": ["ls"], "timeout": 5}', "unknown field 'timeout'"),
        ("a.json", '[{"name": "x", "command": ["ls"]}, {"name": "x", "command": ["ls"]}]', "another tool x"),
    ],
)
def test_files_that_hold_no_tools(tmp_path: Path, name: str, text: str, message: str) -> None:
    """Guards the start: a wrong file is refused with a sentence that says what is wrong."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_tools([tmp_path / name])
