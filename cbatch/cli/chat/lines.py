"""Chat without a screen: on a terminal that only prints lines (TERM=dumb, as inside Emacs), or through a pipe."""

from __future__ import annotations

import json
import queue
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from cbatch.base.errors import CbatchError, EngineError, ReaderGone, RunFailed
from cbatch.batch.lines import MAX_LINE_BYTES, Line
from cbatch.cli.chat.commands.registry import CommandContext, CommandUI, execute_line
from cbatch.cli.chat.controller import ChatController
from cbatch.cli.chat.session.session import Notice, Reply, Session, ToolUse
from cbatch.cli.chat.stats import ChatStats
from cbatch.cli.common.console import emit, notice, safe
from cbatch.cli.common.stdout import without_library_output

if TYPE_CHECKING:
    from cbatch.cli.chat.background_run import BackgroundRun
    from cbatch.cli.chat.session.store import SessionStore

WELCOME = "This terminal shows lines only. /help lists the commands; Ctrl-C stops a reply, Ctrl-D leaves."


class _Chat:
    """Waits for the engine and for replies on this thread, which meanwhile runs the callbacks of the others."""

    def __init__(self, controller: ChatController) -> None:
        self._controller = controller
        self._callbacks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

    def _open(self) -> None:
        """Loads the engine. Raises what keeps it from opening."""
        opened: list[BaseException | None] = []
        self._controller.client.start(self._callbacks.put, opened.append)
        while not opened:
            self._callbacks.get()()
        if opened[0] is not None:
            raise opened[0]

    def _wait(self, session: Session, ask: Callable[[ToolUse], str]) -> None:
        """Waits until the reply in a session is complete. `ask` says whether a call may run: `y`, `a` for always."""
        while session.is_busy:
            if (use := session.asking) is not None:
                answer = ask(use)
                self._controller.answer_call(session, is_allowed=answer in ("y", "a"), always=answer == "a")
            else:
                self._callbacks.get()()


class LineTerminal(_Chat, CommandUI):
    """Reads a line, does what it says, waits for the reply, and reads the next line."""

    def __init__(self, controller: ChatController, store: SessionStore, background: BackgroundRun) -> None:
        super().__init__(controller)
        self._context = CommandContext(controller, self, background, ChatStats(controller), store)
        self._has_ended = False
        self._stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        controller.on_token = self._on_token

    def run(self) -> None:
        """Returns when the user leaves. Raises what kept the engine from opening."""
        emit(WELCOME)
        signal.signal(signal.SIGINT, lambda number, frame: self._on_ctrl_c())
        try:
            self._open()
            self._show_last_turn()
            while not self._has_ended and (line := self._ask_for_line(self._prompt)) is not None:
                self._execute(line.strip())
        finally:
            self._controller.end_all()
            self._context.store.close()
            self._context.background.close()

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
        session = self._controller.current
        session.clear_passing_notices()
        try:
            if text:
                execute_line(self._context, text)
        except CbatchError as error:
            notice(str(error))
        except Exception as error:  # a bug must not cost the conversations
            notice(f"Something went wrong: {error!r}")
        with suppress(queue.Empty):
            while True:
                self._callbacks.get_nowait()()
        if self._controller.current.is_busy:
            self._wait(self._controller.current, self._ask_about)
            self._end_reply()
        if session is not self._controller.current:
            self._show_last_turn()
        session = self._controller.current
        for item in session.items:
            if isinstance(item, Notice):
                emit(safe(item.text))
        session.items[:] = session.turns

    def _end_reply(self) -> None:
        """Prints what the reply that has just streamed lacks."""
        turn = self._controller.current.last
        if turn is not None and turn.is_undecided:
            for number, reply in list(enumerate(turn.replies))[turn.first_compared :]:
                emit(safe(f"[{number}] {reply.label}\n{reply.text}\n"))
            return
        print(flush=True)
        if turn is not None and turn.reply is not None and (turn.reply.error or turn.reply.remark):
            emit(safe(f"({turn.reply.error or turn.reply.remark})"))

    def _show_last_turn(self) -> None:
        """Prints the end of a session that the user comes to."""
        if (last := self._controller.current.last) is not None:
            emit(safe(f"> {last.text}\n{last.reply.text if last.reply is not None else ''}"))

    def _on_ctrl_c(self) -> None:
        """Stops the reply, or says how to leave. Runs in the middle of whatever this thread does."""
        session = self._controller.current
        if session.is_busy:
            self._callbacks.put(lambda: self._controller.stop(session))
        else:
            print(f"\nCtrl-D leaves.\n{self._prompt}", end="", flush=True)

    @property
    def _prompt(self) -> str:
        return f"{safe(self._controller.current.name)}> "

    def _on_token(self, session: Session, reply: Reply, text: str) -> None:
        last = session.last
        if session is self._controller.current and last is not None and not last.is_undecided:
            print(safe(text), end="", flush=True)


class PipeMessage(NamedTuple):
    """A message: a text, or the problem with it.

    place: what a complaint begins with, such as `line 3`
    """

    text: str = ""
    problem: str = ""
    place: str = ""

    @classmethod
    def of(cls, data: bytes | None, place: str) -> PipeMessage:
        """A message from its bytes; None if there are too many of them."""
        if data is None or len(data) > MAX_LINE_BYTES:
            return cls(problem=f"longer than {MAX_LINE_BYTES >> 20} MiB", place=place)
        try:
            return cls(data.decode(), place=place)
        except UnicodeDecodeError as error:
            return cls(problem=f"not valid UTF-8 (byte {error.start + 1})", place=place)


def read_document(data: bytes, question: str | None) -> PipeMessage:
    """One message from a question and all of stdin. Without a question, stdin is the question."""
    read = PipeMessage.of(data, "stdin")
    if read.problem:
        return read
    document = read.text.removeprefix("\ufeff").strip("\r\n")
    return PipeMessage("\n\n".join(part for part in (question, document) if part))


def read_messages(lines: Iterable[Line]) -> Iterable[PipeMessage]:
    """One message from each line."""
    return (PipeMessage.of(line.data, f"line {line.index + 1}") for line in lines)


class Pipe(_Chat):
    """Sends messages one after the other, and writes the replies as they stream, or as JSON when they are complete."""

    def __init__(self, controller: ChatController, output: TextIO, *, as_json: bool = False) -> None:
        super().__init__(controller)
        self._output = output
        self._as_json = as_json
        self._filter = safe if output.isatty() else str
        if not as_json:
            controller.on_token = lambda session, reply, text: self._write(text)

    def run(self, messages: Iterable[PipeMessage]) -> bool:
        """Returns whether every message got a reply.

        Raises what kept the engine from opening, EngineError, ReaderGone and RunFailed.
        """
        with without_library_output():
            self._open()
        num_failures = 0
        for index, message in enumerate(messages):
            problem = message.problem or self._reply_to(message.text, index)
            if problem:
                num_failures += 1
                notice(f"{message.place}: {problem}" if message.place else problem)
                if self._as_json and message.problem:
                    self._write_json({"index": index, "error": {"code": "invalid_row", "message": problem}})
        return not num_failures

    def _refuse(self, use: ToolUse) -> str:
        notice(f"not allowed without --allow-tools: {use}")
        return "n"

    def _reply_to(self, text: str, index: int) -> str:
        """Writes the reply to one message. Returns what went wrong; empty if nothing did."""
        session = self._controller.current
        self._controller.send(session, text)
        self._wait(session, self._refuse)
        reply = session.last.reply if session.last else None
        assert reply is not None
        if self._as_json:
            self._write_json({"index": index, **_fields(reply)})
        elif reply.text or not reply.error:
            self._write("\n")
        if self._controller.client.failure is not None:
            raise EngineError(reply.error)
        if reply.code == "prompt_too_long" and len(session.turns) > 1 and not self._controller.auto_trim:
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
