"""Chat without a terminal: each line of stdin is a turn of one conversation, each answer goes to stdout."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Iterable
from typing import TextIO

from cbatch.cli.chat.controller import Room
from cbatch.cli.chat.session.session import Answer, Session
from cbatch.cli.common.console import notice, safe
from cbatch.cli.common.exits import ReaderGone, RunFailed
from cbatch.cli.run.input.lines import MAX_LINE_BYTES, Line
from cbatch.engine import EngineError


class Pipe:
    """Says lines to a room, one after the other, and writes its answers down as they come."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._filter = safe if output.isatty() else str
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_open = False
        self._error: BaseException | None = None

    def _on_open(self, error: BaseException | None) -> None:
        self._is_open, self._error = True, error

    def _on_token(self, session: Session, answer: Answer, text: str) -> None:
        self._write(text)

    def run(self, room: Room, lines: Iterable[Line]) -> bool:
        """True where every line was answered. Raises what kept the engine from opening, ReaderGone, and RunFailed."""
        room.on_token = self._on_token
        room.client.start(self._calls.put, self._on_open)
        while not self._is_open:
            self._calls.get()()
        if self._error is not None:
            raise self._error
        failures = 0
        for line in lines:
            wrong = self._answer(room, line)
            if wrong:
                failures += 1
                notice(f"line {line.index + 1}: {wrong}")
        return not failures

    def _answer(self, room: Room, line: Line) -> str:
        """Has one line answered. Returns what is wrong with it, if something is."""
        if line.data is None:
            return f"longer than {MAX_LINE_BYTES >> 20} MiB"
        try:
            text = line.data.decode()
        except UnicodeDecodeError as error:
            return f"not valid UTF-8 (byte {error.start + 1})"
        session = room.current
        room.ask(session, text)
        while session.is_busy:
            self._calls.get()()
        answer = session.last.answer if session.last else None
        assert answer is not None
        if answer.text or not answer.error:
            self._write("\n")
        if room.client.failure is not None:
            raise EngineError(answer.error)
        if answer.code == "prompt_too_long":
            return f"{answer.error} --auto-trim leaves out the oldest turns."
        return answer.error

    def _write(self, text: str) -> None:
        try:
            self._output.write(self._filter(text))
            self._output.flush()
        except BrokenPipeError as error:
            sys.stdout = None  # nothing is left to be flushed into it
            raise ReaderGone from error
        except OSError as error:
            raise RunFailed(f"Cannot write the output: {error.strerror}.") from error
