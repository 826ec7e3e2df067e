"""Tools that a model may call: functions of a Python file, commands with JSON schemas, and what servers bring."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.base.errors import ConfigError, RequestError, ToolError, os_errors_as, reason_of
from cbatch.base.strict_json import parse_json_object
from cbatch.extras import require_package
from cbatch.isolate.process import MAX_OUTPUT_BYTES, run_process
from cbatch.tools import child

if TYPE_CHECKING:
    from cbatch.tools.mcp_servers import McpServer

MAX_TOOL_ROUNDS = 8
"""Rounds of calls in one reply, unless somebody says otherwise."""

NUM_CALLS = 8
"""Rows of one engine whose tools run at the same time."""

MAX_RESULT_CHARACTERS = 50_000
"""Of a result that the model gets; the rest is cut off."""

TIMEOUT_S, DESCRIBE_TIMEOUT_S = 60.0, 30.0


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    parameters: JSON schema of the arguments
    call:       gives the result, unless the event is set; None in a process that the tool was sent to
    source:     the file or the server that brings it; `server`: the latter
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    call: Callable[[dict[str, Any], threading.Event], str] | None
    source: str = ""
    server: McpServer | None = None

    def __reduce__(self) -> tuple[type[Tool], tuple[object, ...]]:
        return Tool, (self.name, self.description, self.parameters, None)

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as a model is told of it, in OpenAI's form."""
        return in_openai_form({"name": self.name, "description": self.description, "parameters": dict(self.parameters)})

    def run(self, arguments: str, cancelled: threading.Event | None = None) -> str:
        """The result for arguments in JSON, or a sentence that tells the model what went wrong. Never raises.

        cancelled: ends the call when it is set
        """
        assert self.call is not None
        try:
            given = parse_json_object(arguments or "{}", "the arguments", "a call")
            if missing := [name for name in self.parameters.get("required") or () if name not in given]:
                return f"Error: the argument {missing[0]!r} is missing."
            text = self.call(given, cancelled or threading.Event())
        except (RequestError, ToolError) as error:
            text = f"Error: {error}"
        except Exception as error:
            text = f"Error: the tool cannot be run: {reason_of(error)}."
        if len(text) > MAX_RESULT_CHARACTERS:
            return f"{text[:MAX_RESULT_CHARACTERS]}\n[the rest is cut off]"
        return text.strip("\n")


def in_openai_form(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function}


def command(*words: str, timeout_s: float = TIMEOUT_S) -> Callable[[dict[str, Any], threading.Event], str]:
    """Runs a command, which gets its arguments as JSON on stdin, and writes its result to stdout.

    words:     program and arguments; `{name}` in them stands for an argument of that name
    timeout_s: seconds after which it is killed
    """

    def run(arguments: dict[str, Any], cancelled: threading.Event) -> str:
        filled = [_filled(word, arguments) for word in words]
        result = run_process(filled, json.dumps(arguments).encode(), timeout_s, cancelled)
        if result.exit_code is None:
            raise ToolError("cancelled." if cancelled.is_set() else f"no result within {timeout_s:g} s.")
        if result.exit_code != 0 and len(result.out) < MAX_OUTPUT_BYTES:  # one that writes more is cut off, and fails
            raise ToolError(result.last_words)
        return result.out.decode("utf-8", "replace")

    return run


def _filled(word: str, arguments: Mapping[str, Any]) -> str:
    """A word of a command with arguments in the places of their names."""
    for name, value in arguments.items():
        word = word.replace("{" + name + "}", value if isinstance(value, str) else json.dumps(value))
    return word


ToolLike = str | os.PathLike[str] | Callable[..., Any]


def load_tools(given: Iterable[ToolLike]) -> list[Tool]:
    """Functions of this process, and the tools of files, whose servers are started.

    A tool of a server that has the name of another tool gets the server's name before its own.

    Raises ConfigError if a file cannot be read, a server cannot be started, or two tools have the same name.
    """
    found = [tool for one in given for tool in _tools_of(one)]
    counts = Counter(tool.name for tool in found)
    tools: dict[str, Tool] = {}
    for tool in found:
        if tool.server is not None:  # its names may be any texts
            name = f"{tool.server.name}_{tool.name}" if counts[tool.name] > 1 else tool.name
            tool = replace(tool, name=re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64])
        if tool.name in tools:
            raise ConfigError(f"{tool.source}: there is another tool {tool.name}.")
        tools[tool.name] = tool
    return list(tools.values())


def _tools_of(given: ToolLike) -> list[Tool]:
    if not callable(given):
        path = Path(given)
        return _functions(path) if path.suffix == ".py" else _json_tools(path)
    try:
        return [Tool(**child.describe(given), call=lambda arguments, cancelled: child.call(given, arguments))]
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(f"This function cannot be a tool: {error}") from error


def _functions(path: Path) -> list[Tool]:
    program = (sys.executable, child.__file__)
    described = run_process([*program, "describe", str(path)], b"", DESCRIBE_TIMEOUT_S, threading.Event())
    if described.exit_code is None:
        raise ConfigError(f"{path} took more than {DESCRIBE_TIMEOUT_S:g} s to load.")
    if described.exit_code != 0:
        raise ConfigError(f"{path}: {described.last_words}")
    functions = json.loads(described.out)
    if not functions:
        raise ConfigError(f"{path} defines no public function.")
    return [Tool(**one, call=command(*program, "call", str(path), one["name"]), source=str(path)) for one in functions]


def _json_tools(path: Path) -> list[Tool]:
    try:
        with os_errors_as(ConfigError, f"Cannot read {path}"):
            read = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}.") from error
    if isinstance(read, dict) and isinstance(servers := read.get("mcpServers", read.get("servers")), dict):
        require_package("mcp")
        from cbatch.tools.mcp_servers import start_servers

        return [
            Tool(it.name, it.description or "", it.input_schema, partial(server.call, it.name), server.title, server)
            for server in start_servers(path, servers)
            for it in server.tools
        ]
    listed = read if isinstance(read, list) else [read]
    return [_command_tool(each, path, f"{path}, tool {number}") for number, each in enumerate(listed, 1)]


def _command_tool(fields: Any, path: Path, where: str) -> Tool:
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} must be an object.")
    unknown = set(fields) - {"name", "description", "parameters", "command", "timeout_s"}
    if unknown:
        raise ConfigError(f"{where} has an unknown field {min(unknown)!r}.")
    name, words = fields.get("name"), fields.get("command")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where} must have a name.")
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise ConfigError(f'{where}: command must be a list of words, such as ["date", "+%H:%M"].')
    parameters = fields.get("parameters", {"type": "object", "properties": {}})
    description = fields.get("description", "")
    timeout_s = fields.get("timeout_s", TIMEOUT_S)
    if not isinstance(parameters, dict) or not isinstance(description, str):
        raise ConfigError(f"{where}: parameters must be a JSON schema, and description a text.")
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or timeout_s <= 0:
        raise ConfigError(f"{where}: timeout_s must be a number of seconds above 0.")
    return Tool(name, description, parameters, command(*words, timeout_s=float(timeout_s)), str(path))
