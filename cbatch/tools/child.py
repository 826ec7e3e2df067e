"""The process of a Python tool: describes the functions of a file, or calls one of them.

    python child.py describe FILE      writes a JSON list of functions
    python child.py call FILE NAME     reads a JSON object of arguments, writes the result

It imports nothing of this project, so that it starts quickly. What the file prints goes to stderr.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}
_ARGUMENT = re.compile(r"^\s*(\w+)(?:\s*\([^)]*\))?\s*:\s*(\S.*)$", re.MULTILINE)
"""A line of a docstring that explains an argument, such as `city: its name` or `city (str): its name`."""


def load(path: str) -> dict[str, Callable[..., Any]]:
    """The public functions that a file defines itself, in their order."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec.loader.exec_module(module)
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == spec.name and not name.startswith("_")
    }


def describe(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """A function as a model is told of it: its docstring, and a JSON schema from its annotations."""
    text = inspect.getdoc(function) or ""
    explained = dict(_ARGUMENT.findall(text))
    hints = typing.get_type_hints(function)
    properties: dict[str, Any] = {}
    required = []
    for argument in inspect.signature(function).parameters.values():
        if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD, argument.POSITIONAL_ONLY):
            raise TypeError(f"{name}: a model can give only arguments with names, not {argument}")
        schema = schema_of(hints.get(argument.name, str))
        if argument.name in explained:
            schema["description"] = explained[argument.name]
        properties[argument.name] = schema
        if argument.default is argument.empty:
            required.append(argument.name)
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"name": name, "description": text.partition("\n\n")[0], "parameters": parameters}


def schema_of(hint: Any) -> dict[str, Any]:
    """The JSON schema of a type. Raises TypeError if it has none."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        kinds = [schema_of(one) for one in inner if one is not type(None)]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    if hint is Any:
        return {}
    kind = _JSON_TYPES.get(origin or hint)
    if kind is None:
        raise TypeError(f"{hint} has no JSON schema; use str, int, float, bool, list, dict, Literal or unions of them")
    schema: dict[str, Any] = {"type": kind}
    if kind == "array" and inner:
        schema["items"] = schema_of(inner[0])
    return schema


def main(arguments: list[str]) -> None:
    with os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace") as output:
        os.dup2(2, 1)
        action, path, *names = arguments
        functions = load(path)
        if action == "describe":
            result: Any = [describe(name, function) for name, function in functions.items()]
        else:
            result = functions[names[0]](**json.load(sys.stdin))
        output.write(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Exception as error:  # the model, or the user, is told in one line
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
