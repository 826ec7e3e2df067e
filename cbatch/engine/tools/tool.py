"""A function that a model may call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from cbatch.engine.base.errors import RequestError
from cbatch.engine.base.strict_json import parse_json_object

MAX_TOOL_ROUNDS = 8
"""Rounds of calls in one reply, unless somebody says otherwise."""

MAX_RESULT_CHARACTERS = 50_000
"""Of a result that the model gets; the rest is cut off."""

MAX_ERROR_CHARACTERS = 500

MAX_OUTPUT_BYTES = 2**20
"""Read from a tool at most."""

TIMEOUT_S = 60.0
POLL_S = 0.02
"""How long a tool waits to see whether its process has ended."""


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
        with tempfile.TemporaryFile() as given, ThreadPoolExecutor(2) as readers:
            given.write(data.encode())
            given.seek(0)
            process = subprocess.Popen(
                words, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
            streams = [readers.submit(_read, stream) for stream in (process.stdout, process.stderr)]
            has_ended = self._wait(process, cancelled)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also processes that it has left behind
            out, err = (stream.result() for stream in streams)
            process.wait()
        if not has_ended:
            return "Error: cancelled." if cancelled.is_set() else f"Error: no result within {self.timeout_s:g} s."
        text = out.decode("utf-8", "replace")
        if process.returncode != 0 and len(out) < MAX_OUTPUT_BYTES:  # one that writes more is cut off, and fails
            lines = (err or out).decode("utf-8", "replace").strip().splitlines()
            return f"Error: {lines[-1][:MAX_ERROR_CHARACTERS] if lines else f'exit code {process.returncode}'}"
        if len(text) > MAX_RESULT_CHARACTERS:
            return f"{text[:MAX_RESULT_CHARACTERS]}\n[the rest is cut off]"
        return text.strip("\n")

    def _wait(self, process: subprocess.Popen[bytes], cancelled: threading.Event) -> bool:
        """Waits for the end of a process. Returns whether it came in time, and before the call was cancelled."""
        deadline = time.monotonic() + self.timeout_s
        while process.poll() is None:
            if time.monotonic() > deadline or cancelled.wait(POLL_S):
                return False
        return True


def _read(stream: IO[bytes] | None) -> bytes:
    """What a process writes, up to a limit, at which it is told that nobody reads any more."""
    assert stream is not None
    with stream:
        return stream.read(MAX_OUTPUT_BYTES)


def _filled(word: str, arguments: Mapping[str, Any]) -> str:
    """A word of a command with arguments in the places of their names."""
    for name, value in arguments.items():
        word = word.replace("{" + name + "}", value if isinstance(value, str) else json.dumps(value))
    return word
