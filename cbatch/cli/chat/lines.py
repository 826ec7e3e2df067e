"""Chat without a screen: through a pipe, or on a terminal that only prints lines (TERM=dumb, as inside Emacs)."""

from __future__ import annotations

import json
import queue
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TextIO

from cbatch.base.errors import EngineError, Interrupted, ReaderGone, RequestError, RunFailed
from cbatch.base.params import LOOP
from cbatch.base.units import format_count
from cbatch.batch.lines import Line
from cbatch.cli.chat.controller import ChatController
from cbatch.cli.chat.engine_client import fitted, room_beside
from cbatch.cli.chat.session.session import Reply
from cbatch.cli.common.console import notice, safe
from cbatch.cli.common.stdout import without_library_output


class Pipe:
    """Sends messages one after the other, and writes the replies as they stream, or as JSON when they are complete."""

    def __init__(
        self, controller: ChatController, output: TextIO, *, as_json: bool = False, fits: bool = False
    ) -> None:
        """fits: whether a document is cut to what fits into the context"""
        self._controller, self._fits = controller, fits
        self._output, self._as_json = output, as_json
        self._filter = safe if output.isatty() else str
        self._callbacks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()  # what other threads want run
        if not as_json:
            controller.on_token = lambda session, reply, text: self._write(text)

    def run(self, messages: Iterable[Line], *, question: str = "", is_document: bool = False) -> bool:
        """Returns whether every message got a reply.

        question:    stands before the text of each message
        is_document: whether there is one message, all of stdin, and no lines

        Raises what kept the engine from opening, EngineError, ReaderGone and RunFailed.
        """
        with without_library_output():
            opened: list[BaseException | None] = []
            self._controller.client.start(self._callbacks.put, opened.append)
            while not opened:
                self._callbacks.get()()
            if opened[0] is not None:
                raise opened[0]
        num_failures = 0
        for index, line in enumerate(messages):
            where = "stdin" if is_document else f"line {line.index + 1}"
            try:
                text = line.text(where).removeprefix("\ufeff").strip("\r\n")
            except RequestError as error:
                problem = str(error)
                if self._as_json:
                    self._write_json({"index": index, "error": {"code": error.code, "message": problem}})
            else:
                text = self._fitted(text, question) if self._fits else text
                advice = "--fit cuts the document in the middle." if is_document and text and not self._fits else ""
                problem = self._reply_to("\n\n".join(filter(None, (question, text))), index, advice)
                problem = problem if is_document or not problem else f"{where}: {problem}"
            if problem:
                num_failures += 1
                notice(problem)
        return not num_failures

    def _fitted(self, text: str, question: str) -> str:
        """As much of a document as fits; says what is left out."""
        session, client = self._controller.current, self._controller.client
        assert client.engine is not None
        with suppress(RequestError):  # the question alone is too long, which the reply says
            room = room_beside(client.engine, session.messages_with(question), client.params(session.params))
            shorter, left_out = fitted(client.engine, text, room)
            text = shorter or text
            if left_out and shorter:
                left = format_count(left_out, "character")
                notice(f"the document does not fit into the context: {left} in its middle are left out")
        return text

    def _reply_to(self, text: str, index: int, advice: str) -> str:
        """Writes the reply to one message. Returns what went wrong; empty if nothing did.

        advice: what the user can do if the message is too long
        """
        session = self._controller.current
        self._controller.send(session, text)
        try:
            while session.is_busy:
                if (use := session.asking) is not None:
                    notice(f"not allowed without --allow-tools: {use}")
                    self._controller.answer_call(session, is_allowed=False)
                else:
                    self._callbacks.get()()
        except Interrupted:
            if not self._as_json:
                self._write("\n")
            raise
        reply = session.last.reply if session.last else None
        assert reply is not None
        if self._as_json:
            self._write_json({"index": index, **_fields(reply)})
        elif reply.text or not reply.error:
            self._write("\n")
        if self._controller.client.failure is not None:
            raise EngineError(reply.error)
        if reply.code == LOOP:
            notice("the reply repeats itself, so it was stopped; --no-loop-guard lets it go on")
        if reply.code == "prompt_too_long" and len(session.turns) > 1 and not self._controller.auto_trim:
            advice = f"--auto-trim drops the oldest turns. {advice}"
        return f"{reply.error} {advice}".rstrip() if reply.code == "prompt_too_long" else reply.error

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
    reason = {"stop_reason": LOOP} if reply.code == LOOP else {}
    return {"text": reply.text, **reasoning, "finish_reason": reply.state, **reason, "usage": usage}
