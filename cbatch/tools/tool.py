"""A function that a model may call."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cbatch.base.errors import RequestError
from cbatch.base.strict_json import parse_json_object
from cbatch.isolate.process import MAX_OUTPUT_BYTES, run_process

MAX_TOOL_ROUNDS = 8
"""Rounds of calls in one reply, unless somebody says otherwise."""

MAX_RESULT_CHARACTERS = 50_000
"""Of a result that the model gets; the rest is cut off."""

TIMEOUT_S = 60.0


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
