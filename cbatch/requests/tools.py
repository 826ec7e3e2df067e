"""The tools of a request."""

from __future__ import annotations

from typing import Any

from cbatch.base.errors import RequestError


def check_tools(value: Any) -> list[dict[str, Any]]:
    """The `tools` field of a row. Raises RequestError (`invalid_row`) unless it is a list of OpenAI's functions."""
    if not isinstance(value, list):
        raise RequestError("invalid_row", "tools must be a list of functions.")
    for number, tool in enumerate(value, start=1):
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            sentence = f'Tool {number} must be an object {{"type": "function", "function": {{"name": ...}}}}.'
            raise RequestError("invalid_row", sentence)
        function = tool["function"]
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError("invalid_row", f"The function of tool {number} must have a name.")
        if not isinstance(function.get("parameters"), dict | None):
            raise RequestError("invalid_row", f"The parameters of tool {number} must be a JSON schema, an object.")
    return value
