"""The chat on a terminal that can only print lines, such as the one inside Emacs (TERM=dumb)."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable
from contextlib import suppress

from cbatch.base.errors import CbatchError
from cbatch.cli.chat.background_run import BackgroundRun
from cbatch.cli.chat.commands.registry import CommandContext, CommandUI, execute_command
from cbatch.cli.chat.controller import ChatController
from cbatch.cli.chat.session.session import Notice, Reply, Session
from cbatch.cli.chat.session.store import SessionStore
from cbatch.cli.chat.stats import ChatStats
from cbatch.cli.common.console import emit, notice, safe

WELCOME = "This terminal shows lines only. /help lists the commands; Ctrl-C stops a reply, Ctrl-D leaves."


def is_dumb() -> bool:
    """Whether the terminal cannot move its cursor."""
    return os.environ.get("TERM", "") in ("", "dumb", "unknown")


class LineTerminal(CommandUI):
    """Reads a line, does what it says, waits for the reply, and reads the next line."""

    def __init__(self, controller: ChatController, store: SessionStore, background: BackgroundRun) -> None:
        self._controller = controller
        self._store, self._background = store, background
        self._context = CommandContext(controller, self, background, ChatStats(controller), store)
        self._callbacks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._has_ended = False
        self._stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        controller.on_token = self._on_token

    def run(self) -> None:
        """Returns when the user leaves. Raises what kept the engine from opening."""
        emit(WELCOME)
        signal.signal(signal.SIGINT, lambda number, frame: self._on_ctrl_c())
        try:
            self._controller.client.open_here(self._callbacks)
            self._show_last_turn()
            while not self._has_ended and (line := self._ask_for_line(self._prompt)) is not None:
                self._execute(line.strip())
        finally:
            self._controller.end_all()
            self._store.close()
            self._background.close()

    def exit(self) -> None:
        self._has_ended = True

    def set_input(self, text: str) -> None:
        """Cannot put anything into the line, so it shows what would stand there."""
        emit(f"> {safe(text)}")

    def _ask_for_line(self, question: str) -> str | None:
        """What the user types, or None at the end."""
        print(question, end="", flush=True)
        return self._stdin.readline() or None

    def _execute(self, text: str) -> None:
        session = self._controller.current
        session.clear_passing_notices()
        try:
            if text.startswith("/") and not text.startswith("//"):
                execute_command(self._context, text)
            elif text:
                self._controller.send(session, text.removeprefix("/"))
        except CbatchError as error:
            notice(str(error))
        except Exception as error:  # a bug must not cost the conversations
            notice(f"Something went wrong: {error!r}")
        self._wait_for_reply()
        if session is not self._controller.current:
            self._show_last_turn()
        session = self._controller.current
        for item in session.items:
            if isinstance(item, Notice):
                emit(safe(item.text))
        session.items[:] = session.turns

    def _wait_for_reply(self) -> None:
        """Runs callbacks until the current session's reply is complete; Ctrl-C stops it."""
        session = self._controller.current
        with suppress(queue.Empty):
            while True:
                self._callbacks.get_nowait()()
        if not session.is_busy:
            return
        while session.is_busy:
            if (use := session.asking) is not None:
                question = f"\n{safe(str(use))}\nRun it? y: yes, a: always, n: no > "
                answer = (self._ask_for_line(question) or "n").strip().lower()[:1]
                self._controller.answer_call(session, is_allowed=answer in ("y", "a"), always=answer == "a")
            else:
                self._callbacks.get()()
        turn = session.last
        if turn is not None and turn.is_undecided:
            for number, reply in list(enumerate(turn.replies))[turn.first_compared :]:
                emit(safe(f"[{number}] {reply.label}\n{reply.text}\n"))
            return
        print(flush=True)
        if turn is not None and turn.reply is not None and (turn.reply.error or turn.reply.remark):
            emit(safe(f"({turn.reply.error or turn.reply.remark})"))

    def _show_last_turn(self) -> None:
        """Prints the end of a session that the user comes to."""
        last = self._controller.current.last
        if last is not None:
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
