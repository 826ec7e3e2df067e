"""Functions that a model may call: those of a Python file, or commands with JSON schemas."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbatch.base.errors import ConfigError, RequestError
from cbatch.base.strict_json import parse_json_object
from cbatch.isolate.process import MAX_OUTPUT_BYTES, run_process
from cbatch.tools import child

MAX_TOOL_ROUNDS = 8
"""Rounds of calls in one reply, unless somebody says otherwise."""

MAX_RESULT_CHARACTERS = 50_000
"""Of a result that the model gets; the rest is cut off."""

TIMEOUT_S, DESCRIBE_TIMEOUT_S = 60.0, 30.0


@dataclass(frozen=True, slots=True)
class Tool:
    """A command that gets its arguments as JSON on stdin, and writes its result to stdout.

    parameters: JSON schema of the arguments
    command:    program and arguments; `{name}` in them stands for an argument of that name
    timeout_s:  seconds after which it is killed
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    command: tuple[str, ...]
    timeout_s: float = TIMEOUT_S

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as a model is told of it, in OpenAI's form."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def run(self, arguments: str, cancelled: threading.Event | None = None) -> str:
        """The result for arguments in JSON, or a sentence that tells the model what went wrong. Never raises.

        cancelled: ends the process when it is set
        """
        try:
            given = parse_json_object(arguments or "{}", "the arguments", "a call")
        except RequestError as error:
            return f"Error: {error}"
        if missing := [name for name in self.parameters.get("required", ()) if name not in given]:
            return f"Error: the argument {missing[0]!r} is missing."
        words = [_filled(word, given) for word in self.command]
        try:
            return self._run(words, json.dumps(given), cancelled or threading.Event())
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            return f"Error: the tool cannot be run: {reason}."

    def _run(self, words: list[str], data: str, cancelled: threading.Event) -> str:
        result = run_process(words, data.encode(), self.timeout_s, cancelled)
        if result.exit_code is None:
            return "Error: cancelled." if cancelled.is_set() else f"Error: no result within {self.timeout_s:g} s."
        text = result.out.decode("utf-8", "replace")
        if result.exit_code != 0 and len(result.out) < MAX_OUTPUT_BYTES:  # one that writes more is cut off, and fails
            return f"Error: {result.last_words}"
        if len(text) > MAX_RESULT_CHARACTERS:
            return f"{text[:MAX_RESULT_CHARACTERS]}\n[the rest is cut off]"
        return text.strip("\n")


def _filled(word: str, arguments: Mapping[str, Any]) -> str:
    """A word of a command with arguments in the places of their names."""
    for name, value in arguments.items():
        word = word.replace("{" + name + "}", value if isinstance(value, str) else json.dumps(value))
    return word


def load_tools(paths: Iterable[Path]) -> list[Tool]:
    """The tools of several files. Raises ConfigError if one cannot be read, or two have the same name."""
    tools: dict[str, Tool] = {}
    for path in paths:
        found = _python_tools(path) if path.suffix == ".py" else _command_tools(path)
        for tool in found:
            if tool.name in tools:
                raise ConfigError(f"{path}: there is another tool {tool.name}.")
            tools[tool.name] = tool
    return list(tools.values())


def _python_tools(path: Path) -> list[Tool]:
    command = (sys.executable, child.__file__)
    described = run_process([*command, "describe", str(path)], b"", DESCRIBE_TIMEOUT_S, threading.Event())
    if described.exit_code is None:
        raise ConfigError(f"{path} took more than {DESCRIBE_TIMEOUT_S:g} s to load.")
    if described.exit_code != 0:
        raise ConfigError(f"{path}: {described.last_words}")
    functions = json.loads(described.out)
    if not functions:
        raise ConfigError(f"{path} defines no public function.")
    return [
        Tool(each["name"], each["description"], each["parameters"], (*command, "call", str(path), each["name"]))
        for each in functions
    ]


def _command_tools(path: Path) -> list[Tool]:
    try:
        read = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}.") from error
    listed = read if isinstance(read, list) else [read]
    return [_command_tool(each, f"{path}, tool {number}") for number, each in enumerate(listed, 1)]


def _command_tool(fields: Any, where: str) -> Tool:
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} must be an object.")
    unknown = set(fields) - {"name", "description", "parameters", "command", "timeout_s"}
    if unknown:
        raise ConfigError(f"{where} has an unknown field {min(unknown)!r}.")
    name, command = fields.get("name"), fields.get("command")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where} must have a name.")
    if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
        raise ConfigError(f'{where}: command must be a list of words, such as ["date", "+%H:%M"].')
    parameters = fields.get("parameters", {"type": "object", "properties": {}})
    description = fields.get("description", "")
    timeout_s = fields.get("timeout_s", TIMEOUT_S)
    if not isinstance(parameters, dict) or not isinstance(description, str):
        raise ConfigError(f"{where}: parameters must be a JSON schema, and description a text.")
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or timeout_s <= 0:
        raise ConfigError(f"{where}: timeout_s must be a number of seconds above 0.")
    return Tool(name, description, parameters, tuple(command), float(timeout_s))
