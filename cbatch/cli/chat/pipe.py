"""Chat without a screen: a question and a document, or a message a line; the replies go to stdout."""

from __future__ import annotations

import json
import queue
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from cbatch.base.errors import EngineError, ReaderGone, RunFailed
from cbatch.batch.lines import MAX_LINE_BYTES, Line
from cbatch.cli.chat.controller import ChatController
from cbatch.cli.common.console import notice, safe
from cbatch.cli.common.stdout import without_library_output

if TYPE_CHECKING:
    from cbatch.cli.chat.session.session import Reply


@dataclass(frozen=True, slots=True)
class PipeMessage:
    """What is sent: a text, or what is wrong with it.

    place: what a complaint begins with, such as `line 3`
    """

    text: str = ""
    problem: str = ""
    place: str = ""


def read_document(data: bytes, question: str | None) -> PipeMessage:
    """One message from a question and all of stdin. Without a question, stdin is the question."""
    if len(data) > MAX_LINE_BYTES:
        return PipeMessage(problem=f"longer than {MAX_LINE_BYTES >> 20} MiB", place="stdin")
    try:
        document = data.decode().removeprefix("\ufeff").strip("\r\n")
    except UnicodeDecodeError as error:
        return PipeMessage(problem=f"not valid UTF-8 (byte {error.start + 1})", place="stdin")
    return PipeMessage("\n\n".join(part for part in (question, document) if part))


def read_messages(lines: Iterable[Line]) -> Iterable[PipeMessage]:
    """One message from each line."""
    for line in lines:
        place = f"line {line.index + 1}"
        if line.data is None:
            yield PipeMessage(problem=f"longer than {MAX_LINE_BYTES >> 20} MiB", place=place)
            continue
        try:
            yield PipeMessage(line.data.decode(), place=place)
        except UnicodeDecodeError as error:
            yield PipeMessage(problem=f"not valid UTF-8 (byte {error.start + 1})", place=place)


class Pipe:
    """Sends messages one after the other, and writes the replies as they stream, or as JSON when they are complete."""

    def __init__(self, output: TextIO, *, as_json: bool = False) -> None:
        self._output = output
        self._as_json = as_json
        self._filter = safe if output.isatty() else str
        self._callbacks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

    def run(self, controller: ChatController, messages: Iterable[PipeMessage]) -> bool:
        """Returns whether every message got a reply.

        Raises what kept the engine from opening, EngineError, ReaderGone and RunFailed.
        """
        if not self._as_json:
            controller.on_token = lambda session, reply, text: self._write(text)
        with without_library_output():
            controller.client.open_here(self._callbacks)
        num_failures = 0
        for index, message in enumerate(messages):
            problem = message.problem or self._reply_to(controller, message.text, index)
            if problem:
                num_failures += 1
                notice(f"{message.place}: {problem}" if message.place else problem)
                if self._as_json and message.problem:
                    self._write_json({"index": index, "error": {"code": "invalid_row", "message": problem}})
        return not num_failures

    def _reply_to(self, controller: ChatController, text: str, index: int) -> str:
        """Writes the reply to one message. Returns what went wrong; empty if nothing did."""
        session = controller.current
        controller.send(session, text)
        while session.is_busy:
            if (use := session.asking) is not None:
                notice(f"not allowed without --allow-tools: {use}")
                controller.answer_call(session, is_allowed=False)
            else:
                self._callbacks.get()()
        reply = session.last.reply if session.last else None
        assert reply is not None
        if self._as_json:
            self._write_json({"index": index, **_fields(reply)})
        elif reply.text or not reply.error:
            self._write("\n")
        if controller.client.failure is not None:
            raise EngineError(reply.error)
        if reply.code == "prompt_too_long" and len(session.turns) > 1 and not controller.auto_trim:
            return f"{reply.error} --auto-trim drops the oldest turns."
        return reply.error

    def _write_json(self, fields: dict[str, Any]) -> None:
        self._write(json.dumps(fields, ensure_ascii=not self._output.encoding.lower().startswith("utf")) + "\n")

    def _write(self, text: str) -> None:
        try:
            self._output.write(self._filter(text))
            self._output.flush()
        except BrokenPipeError as error:
            sys.stdout = None  # so that nothing is flushed into it at exit
            raise ReaderGone from error
        except OSError as error:
            raise RunFailed(f"Cannot write the output: {error.strerror}.") from error


def _fields(reply: Reply) -> dict[str, Any]:
    """A reply under the names that a row of `cbatch run` has."""
    if reply.error:
        return {"error": {"code": reply.code, "message": reply.error}}
    prompt, completion = reply.prompt_tokens, reply.num_tokens
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    reasoning = {"reasoning": reply.reasoning} if reply.reasoning else {}
    return {"text": reply.text, **reasoning, "finish_reason": reply.state, "usage": usage}
