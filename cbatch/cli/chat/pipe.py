"""Chat without a terminal: each line of stdin is a message of one conversation, and the replies go to stdout."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Iterable
from typing import TextIO

from cbatch.cli.chat.controller import ChatController
from cbatch.cli.common.console import notice, safe
from cbatch.engine import MAX_LINE_BYTES, EngineError, Line, ReaderGone, RunFailed


class Pipe:
    """Sends lines one after the other, and writes the replies as they stream."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._filter = safe if output.isatty() else str
        self._callbacks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def run(self, controller: ChatController, lines: Iterable[Line]) -> bool:
        """Returns whether every line got a reply. Raises what kept the engine from opening, ReaderGone, RunFailed."""
        controller.on_token = lambda session, reply, text: self._write(text)
        opened: list[BaseException | None] = []
        controller.client.start(self._callbacks.put, opened.append)
        while not opened:
            self._callbacks.get()()
        if opened[0] is not None:
            raise opened[0]
        num_failures = 0
        for line in lines:
            problem = self._reply_to(controller, line)
            if problem:
                num_failures += 1
                notice(f"line {line.index + 1}: {problem}")
        return not num_failures

    def _reply_to(self, controller: ChatController, line: Line) -> str:
        """Writes the reply to one line. Returns what went wrong; empty if nothing did."""
        if line.data is None:
            return f"longer than {MAX_LINE_BYTES >> 20} MiB"
        try:
            text = line.data.decode()
        except UnicodeDecodeError as error:
            return f"not valid UTF-8 (byte {error.start + 1})"
        session = controller.current
        controller.send(session, text)
        while session.is_busy:
            self._callbacks.get()()
        reply = session.last.reply if session.last else None
        assert reply is not None
        if reply.text or not reply.error:
            self._write("\n")
        if controller.client.failure is not None:
            raise EngineError(reply.error)
        if reply.code == "prompt_too_long":
            return f"{reply.error} --auto-trim drops the oldest turns."
        return reply.error

    def _write(self, text: str) -> None:
        try:
            self._output.write(self._filter(text))
            self._output.flush()
        except BrokenPipeError as error:
            sys.stdout = None  # so that nothing is flushed into it at exit
            raise ReaderGone from error
        except OSError as error:
            raise RunFailed(f"Cannot write the output: {error.strerror}.") from error
