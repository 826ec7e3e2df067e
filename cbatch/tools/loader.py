"""Reads tools from a file: functions of a Python file, or commands with JSON schemas."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cbatch.base.errors import ConfigError
from cbatch.isolate.process import run_process
from cbatch.tools import child
from cbatch.tools.tool import TIMEOUT_S, Tool

DESCRIBE_TIMEOUT_S = 30.0


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
    return [
        _command_tool(each, f"{path}, tool {n}") for n, each in enumerate(read if isinstance(read, list) else [read], 1)
    ]


def _command_tool(fields: Any, where: str) -> Tool:
    """A tool from `{"name", "description", "parameters", "command", "timeout_s"}`."""
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
