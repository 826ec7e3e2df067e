"""The process of a Python tool: describes the functions of a file, or calls one of them.

    python child.py describe FILE      writes a JSON list of functions
    python child.py call FILE NAME     reads a JSON object of arguments, writes the result

It imports nothing of this project, so that it starts quickly. What the file prints goes to stderr.
"""

from __future__ import annotations

import dataclasses
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
_JSON_TYPES[type(None)] = "null"
_UNIONS = (typing.Union, types.UnionType)
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


def describe(function: Callable[..., Any], name: str = "") -> dict[str, Any]:
    """A function as a model is told of it: its docstring, and a JSON schema from its annotations.

    name: instead of its own

    Raises TypeError, ValueError or NameError for one that a model cannot call, or whose annotations have no schema.
    """
    name, text = name or getattr(function, "__name__", ""), inspect.getdoc(function) or ""
    if not name.isidentifier():
        raise TypeError(f"{function!r} has no name")
    explained = dict(_ARGUMENT.findall(text))
    hints = typing.get_type_hints(function)
    properties: dict[str, Any] = {}
    required = []
    for argument in inspect.signature(function).parameters.values():
        if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD, argument.POSITIONAL_ONLY):
            raise TypeError(f"{name}: a model can give only arguments with names, not {argument}")
        hint = hints.get(argument.name, str)
        given = [one for one in typing.get_args(hint) if one is not type(None)]
        if argument.default is None and typing.get_origin(hint) in _UNIONS:  # what may be left out need not be null
            hint = typing.Union[tuple(given)]  # noqa: UP007
        schema = schema_of(hint)
        if argument.name in explained:
            schema["description"] = explained[argument.name]
        properties[argument.name] = schema
        if argument.default is argument.empty:
            required.append(argument.name)
    return {"name": name, "description": text.partition("\n\n")[0], "parameters": _object(properties, required)}


def schema_of(hint: Any) -> dict[str, Any]:
    """The JSON schema of a type. Raises TypeError if it has none."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin in _UNIONS:
        return {"anyOf": [schema_of(one) for one in inner]}
    if hint is Any:
        return {}
    if dataclasses.is_dataclass(hint) or typing.is_typeddict(hint):
        required = getattr(hint, "__required_keys__", None)
        if required is None:
            empty = dataclasses.MISSING
            fields = dataclasses.fields(hint)
            required = [one.name for one in fields if one.default is empty and one.default_factory is empty]
        properties = {name: schema_of(one) for name, one in typing.get_type_hints(hint).items()}
        return _object(properties, [name for name in properties if name in required])
    kind = _JSON_TYPES.get(origin or hint)
    if kind is None:
        raise TypeError(
            f"{hint} has no JSON schema; use str, int, float, bool, list, dict, Literal, dataclasses, TypedDict or "
            "unions of them"
        )
    schema: dict[str, Any] = {"type": kind}
    if kind == "array" and inner:
        schema["items"] = schema_of(inner[0])
    if kind == "object" and inner:
        schema["additionalProperties"] = schema_of(inner[1])
    return schema


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def call(function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """The result of a function for arguments of JSON, as text."""
    hints = typing.get_type_hints(function)
    result = function(**{name: _built(hints.get(name), value) for name, value in arguments.items()})
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def _built(hint: Any, value: Any) -> Any:
    """A value of JSON as its annotation has it: an object may be a dataclass."""
    if isinstance(value, list):
        return [_built(next(iter(typing.get_args(hint)), None), one) for one in value]
    kind: Any = next((one for one in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(one)), None)
    if kind is None or not isinstance(value, dict):
        return value
    hints = typing.get_type_hints(kind)
    return kind(**{name: _built(hints.get(name), one) for name, one in value.items()})


def main(arguments: list[str]) -> None:
    with os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace") as output:
        os.dup2(2, 1)
        action, path, *names = arguments
        functions = load(path)
        if action == "describe":
            output.write(json.dumps([describe(function, name) for name, function in functions.items()]))
        else:
            output.write(call(functions[names[0]], json.load(sys.stdin)))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Exception as error:  # the model, or the user, is told in one line
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
