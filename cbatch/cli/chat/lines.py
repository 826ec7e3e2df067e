"""Chat without a screen: on a terminal that only prints lines (TERM=dumb, as inside Emacs), or through a pipe."""

from __future__ import annotations

import json
import queue
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TextIO

from cbatch.base.errors import CbatchError, EngineError, Interrupted, ReaderGone, RequestError, RunFailed
from cbatch.base.params import LOOP
from cbatch.base.units import format_count
from cbatch.batch.lines import Line
from cbatch.cli.chat.background_run import BackgroundRun
from cbatch.cli.chat.commands.registry import FrontEnd, execute_line
from cbatch.cli.chat.controller import ChatController
from cbatch.cli.chat.engine_client import fitted, room_beside
from cbatch.cli.chat.session.session import Notice, Reply, Session, ToolUse
from cbatch.cli.chat.session.store import SessionStore
from cbatch.cli.common.console import emit, notice, safe
from cbatch.cli.common.stdout import without_library_output

WELCOME = "This terminal shows lines only. /help lists the commands; Ctrl-C stops a reply, Ctrl-D leaves."


class Waiter:
    """Waits for the engine and for replies on this thread, which meanwhile runs the callbacks of the others."""

    def __init__(self, controller: ChatController) -> None:
        self._controller = controller
        self.callbacks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

    def open(self) -> None:
        """Loads the engine. Raises what keeps it from opening."""
        opened: list[BaseException | None] = []
        self._controller.client.start(self.callbacks.put, opened.append)
        while not opened:
            self.callbacks.get()()
        if opened[0] is not None:
            raise opened[0]

    def wait(self, session: Session, ask: Callable[[ToolUse], str]) -> None:
        """Waits until the reply in a session is complete. `ask` says whether a call may run: `y`, `a` for always."""
        while session.is_busy:
            if (use := session.asking) is not None:
                answer = ask(use)
                self._controller.answer_call(session, is_allowed=answer in ("y", "a"), always=answer == "a")
            else:
                self.callbacks.get()()


class LineTerminal(FrontEnd):
    """Reads a line, does what it says, waits for the reply, and reads the next line."""

    def __init__(self, controller: ChatController, store: SessionStore, background: BackgroundRun) -> None:
        super().__init__(controller, store, background)
        self._waiter = Waiter(controller)
        self._has_ended = False
        self._stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        controller.on_token = self._on_token

    def run(self) -> None:
        """Returns when the user leaves. Raises what kept the engine from opening."""
        emit(WELCOME)
        signal.signal(signal.SIGINT, lambda number, frame: self._on_ctrl_c())
        try:
            self._waiter.open()
            self._show_last_turn()
            while not self._has_ended and (line := self._ask_for_line(self._prompt)) is not None:
                self._execute(line.strip())
        finally:
            self.close()

    def exit(self) -> None:
        self._has_ended = True

    def set_input(self, text: str) -> None:
        """Cannot put anything into the line, so it shows what would stand there."""
        emit(f"> {safe(text)}")

    def _ask_for_line(self, question: str) -> str | None:
        """The line that the user types, or None at the end."""
        print(question, end="", flush=True)
        return self._stdin.readline() or None

    def _ask_about(self, use: ToolUse) -> str:
        question = f"\n{safe(str(use))}\nRun it? y: yes, a: always, n: no > "
        return (self._ask_for_line(question) or "n").strip().lower()[:1]

    def _execute(self, text: str) -> None:
        before = self.session
        before.clear_passing_notices()
        try:
            if text:
                execute_line(self, text)
        except CbatchError as error:
            notice(str(error))
        except Exception as error:  # a bug must not cost the conversations
            notice(f"Something went wrong: {error!r}")
        with suppress(queue.Empty):
            while True:
                self._waiter.callbacks.get_nowait()()
        while self.shell is not None:
            self._waiter.callbacks.get()()
        session = self.session
        if session.is_busy:
            self._waiter.wait(session, self._ask_about)
            self._end_reply()
        if session is not before:
            self._show_last_turn()
        for item in session.items:
            if isinstance(item, Notice):
                emit(safe(item.text))
        session.items[:] = session.turns
        if (last := session.last) is not None and last.is_undecided:
            emit(f"({last.pick_hint} keeps one; {last.fallback} goes back. Messages wait until then.)")

    def _end_reply(self) -> None:
        """Prints what the reply that has just streamed lacks."""
        turn = self.session.last
        if turn is not None and turn.is_undecided:
            for number, reply in list(enumerate(turn.replies))[turn.first_compared :]:
                emit(safe(f"[{number}] {reply.label}\n{reply.text}\n"))
            return
        print(flush=True)
        if turn is not None and turn.reply is not None and (turn.reply.error or turn.reply.remark):
            emit(safe(f"({turn.reply.error or turn.reply.remark})"))

    def _show_last_turn(self) -> None:
        """Prints the end of a session that the user comes to."""
        if (last := self.session.last) is not None:
            files = "".join(f"+ {one.label}\n" for one in last.attachments if not one.is_paste)
            emit(safe(f"> {last.text}\n{files}{last.reply.text if last.reply is not None else ''}"))

    def _on_ctrl_c(self) -> None:
        """Stops the reply, or says how to leave. Runs in the middle of whatever this thread does."""
        session = self.session
        if self.stop_shell():
            return
        if session.is_busy:
            self._waiter.callbacks.put(lambda: self.controller.stop(session))
        else:
            print(f"\nCtrl-D leaves.\n{self._prompt}", end="", flush=True)

    @property
    def _prompt(self) -> str:
        return f"{safe(self.session.name)}> "

    def _on_token(self, session: Session, reply: Reply, text: str) -> None:
        last = session.last
        if session is self.session and last is not None and not last.is_undecided:
            print(safe(text), end="", flush=True)


class Pipe:
    """Sends messages one after the other, and writes the replies as they stream, or as JSON when they are complete."""

    def __init__(
        self, controller: ChatController, output: TextIO, *, as_json: bool = False, fits: bool = False
    ) -> None:
        """fits: whether a document is cut to what fits into the context"""
        self._controller, self._waiter, self._fits = controller, Waiter(controller), fits
        self._output, self._as_json = output, as_json
        self._filter = safe if output.isatty() else str
        if not as_json:
            controller.on_token = lambda session, reply, text: self._write(text)

    def run(self, messages: Iterable[Line], *, question: str = "", is_document: bool = False) -> bool:
        """Returns whether every message got a reply.

        question:    stands before the text of each message
        is_document: whether there is one message, all of stdin, and no lines

        Raises what kept the engine from opening, EngineError, ReaderGone and RunFailed.
        """
        with without_library_output():
            self._waiter.open()
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

    def _refuse(self, use: ToolUse) -> str:
        notice(f"not allowed without --allow-tools: {use}")
        return "n"

    def _reply_to(self, text: str, index: int, advice: str) -> str:
        """Writes the reply to one message. Returns what went wrong; empty if nothing did.

        advice: what the user can do if the message is too long
        """
        session = self._controller.current
        self._controller.send(session, text)
        try:
            self._waiter.wait(session, self._refuse)
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
