"""The chat on a terminal: a transcript that scrolls, a status bar, and an input line."""

from __future__ import annotations

import asyncio
import base64
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from threading import Thread
from typing import Any, TextIO

from prompt_toolkit.application import Application, in_terminal
from prompt_toolkit.cursor_shapes import ModalCursorShapeConfig
from prompt_toolkit.enums import EditingMode
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import History
from prompt_toolkit.layout import (
    CompletionsMenu,
    ConditionalContainer,
    Float,
    FloatContainer,
    FormattedTextControl,
    HSplit,
    Layout,
    Window,
)
from prompt_toolkit.layout.dimension import Dimension
from prompt_toolkit.output import create_output

from cbatch.base.errors import CbatchError, Interrupted
from cbatch.cli.chat.background_run import BackgroundRun
from cbatch.cli.chat.callback_queue import CallbackQueue
from cbatch.cli.chat.commands.completion import CommandCompleter
from cbatch.cli.chat.commands.registry import CommandContext, execute_command
from cbatch.cli.chat.controller import ChatController
from cbatch.cli.chat.session.attachment import compose, pastes_in
from cbatch.cli.chat.session.reply import Reply
from cbatch.cli.chat.session.session import Session
from cbatch.cli.chat.session.store import SessionStore
from cbatch.cli.chat.stats import ChatStats
from cbatch.cli.chat.tui.editor import Editor
from cbatch.cli.chat.tui.input_line import InputLine
from cbatch.cli.chat.tui.key_bindings import ESCAPE_SECONDS, ChatApplication, make_key_bindings
from cbatch.cli.chat.tui.output_capture import capture_output
from cbatch.cli.chat.tui.reply_picker import ReplyPicker
from cbatch.cli.chat.tui.status_bar import StatusBar
from cbatch.cli.chat.tui.style import STYLE
from cbatch.cli.chat.tui.transcript_view import TranscriptView
from cbatch.cli.common.console import safe, without_bidi
from cbatch.cli.common.exits import SIGNALS, UserError, raise_interrupted

REDRAW_SECONDS = 1 / 40
REFRESH_SECONDS = 0.5
"""How often the status bar is drawn anew even if nothing else happens."""

AUTOSAVE_SECONDS = 5.0
"""How often a reply that is still streaming is saved."""

WELCOME = "/help lists the commands, /help keys the keys; Ctrl-D leaves."
LEAVING = "Ctrl-D or /exit leaves."
BATCH_RUNS = "A batch is running. Leave again to stop it; cbatch run --resume continues it later."

MOST_COPIED_BYTES = 100_000
"""Many terminals take no more than this for the clipboard, in base64."""


class Terminal:
    """Shows the sessions of a controller, and carries out what is typed."""

    def __init__(
        self,
        controller: ChatController,
        store: SessionStore,
        history: History,
        background: BackgroundRun | None = None,
        *,
        is_vi: bool = False,
        takes_mouse: bool = True,
    ) -> None:
        """
        is_vi:       whether lines are edited as in vi
        takes_mouse: whether the wheel scrolls; then Shift is needed to select text
        """
        self.controller = controller
        controller.on_token = self._on_token
        controller.on_switch = self._on_switch
        self._callbacks = CallbackQueue()
        self.background = background or BackgroundRun()
        self.stats = ChatStats(controller)
        self._status_bar = StatusBar(controller, self.stats, self.background)
        self._context = CommandContext(controller, self, self.background, self.stats, store)
        self._is_vi, self._takes_mouse = is_vi, takes_mouse
        self._loading_error: BaseException | None = None
        self._captured_lines: deque[str] = deque(maxlen=50)
        self._editor = Editor()
        self._shown_save_error = ""
        self._autosaved_at = time.monotonic()
        self._is_loading = self._has_asked_to_leave = False
        self._undrawn_token_times: list[float] = []
        self._app: Application[None]
        self._line = InputLine(
            lambda: controller.current.name,
            history,
            CommandCompleter(controller, store),
            on_enter=self._on_enter,
            fold_paste=self._fold_paste,
            unfold=self._unfold,
        )
        self._line.set_text(controller.current.draft)
        controller.typed = lambda: self._line.text
        self._view = TranscriptView(controller)
        self._picker = ReplyPicker(controller)
        self._layout = self._make_layout()

    def _make_layout(self) -> Layout:
        bar = Window(FormattedTextControl(self._bar), height=1, style="class:bar")
        listed, height = FormattedTextControl(self._attached), Dimension(min=1, max=4)
        attached = Window(listed, height=height, wrap_lines=True, dont_extend_height=True)
        has_attached = Condition(lambda: bool(self._attached()))
        rows = HSplit(
            [
                Window(self._view, wrap_lines=False),
                bar,
                ConditionalContainer(attached, has_attached),
                self._line.area,
                self._line.search,
            ]
        )
        menu = Float(CompletionsMenu(max_height=8, scroll_offset=1), xcursor=True, ycursor=True)
        return Layout(FloatContainer(rows, [menu]), focused_element=self._line.area)

    def run(self) -> None:
        """Returns when the user leaves. Raises Interrupted after a signal, and what kept the engine from opening."""
        try:
            with capture_output(lambda line: self._callbacks.put(partial(self._on_output_line, line))) as terminal:
                self._app = self._make_app(terminal)
                asyncio.run(self._run(self._app))
        except (EOFError, OSError):  # the terminal went away
            pass
        finally:
            try:
                self._callbacks.run_all()
            finally:
                self.controller.end_all()
                self._context.store.close()
                self.background.close()
        if self._loading_error is not None:
            for line in self._captured_lines:  # what libraries printed may say why
                print(safe(line), file=sys.stderr)
            raise self._loading_error

    def _on_open(self, error: BaseException | None) -> None:
        self.stats.loading_detail = ""
        if error is not None:
            self._loading_error = error
            self.exit()

    def _on_token(self, session: Session, reply: Reply, text: str) -> None:
        """Notes when a token came; `_after_render` measures how long it took to the screen."""
        if reply.num_tokens == 1:
            self.stats.first_tokens.append(reply.last_token_at - reply.requested_at)
        if session is self.controller.current and text:
            self._undrawn_token_times.append(reply.last_token_at)

    def _fold_paste(self, text: str) -> str:
        session = self.controller.current
        paste = session.fold_paste(text)
        client = self.controller.client_of(session)
        client.count_tokens(text, partial(setattr, paste, "num_tokens"))
        return paste.name

    def _unfold(self, text: str) -> str:
        return compose(text, pastes_in(text, self.controller.current.pastes))

    def _on_switch(self, before: Session, after: Session) -> None:
        """What is typed belongs to a session: it stays there, and comes back with it."""
        before.draft = self._line.text
        self._line.set_text(after.draft)

    def exit(self) -> None:
        if self.background.is_running and not self._has_asked_to_leave:
            self._has_asked_to_leave = True  # until something else is typed
            self.controller.current.add_notice(BATCH_RUNS, is_passing=True)
        elif not self._app.is_done:
            self._app.exit()

    def set_input(self, text: str) -> None:
        self._line.set_text(text)

    def copy(self, text: str) -> None:
        data = base64.b64encode(text.encode("utf-8", "replace"))
        if len(data) > MOST_COPIED_BYTES:
            raise UserError("That is too long for the clipboard of most terminals; /export FILE.md writes a file.")
        self._app.output.write_raw(f"\x1b]52;c;{data.decode()}\x07")
        self._app.output.flush()

    def find(self, text: str) -> None:
        self._view.compared = []
        self._view.find(text)

    def compare(self, sessions: Sequence[Session]) -> None:
        self._view.compared = list(sessions)

    def show_reasoning(self, is_shown: bool) -> None:
        self._view.show_reasoning(is_shown)

    def open_editor(self, text: str, then: Callable[[str], None]) -> None:
        async def run() -> None:
            async with in_terminal():
                editing = asyncio.get_running_loop().run_in_executor(None, self._editor.edit, text, self._tty)
                await asyncio.wait([editing])
            with self._showing_errors():
                changed = editing.result().rstrip("\n")
                if changed.strip() and changed != text.rstrip("\n"):
                    then(changed)

        self._app.create_background_task(run())

    def _on_escape(self) -> None:
        """Closes what is open, else stops the reply, else takes notices away."""
        session = self.controller.current
        if self._line.has_menu:
            self._line.close_menu()
        elif self._view.is_searching:
            self._view.end_search()
        elif self._view.compared:
            self._view.compared = []
        elif not self.controller.stop(session):
            session.clear_passing_notices()

    def _is_asking(self) -> bool:
        last = self.controller.current.last
        return last is not None and last.asking is not None

    def _on_answer(self, is_allowed: bool, always: bool) -> None:
        self.controller.answer_call(self.controller.current, is_allowed=is_allowed, always=always)

    def _on_ctrl_c(self) -> None:
        """Stops the reply; if there is none, clears the input; if that is empty, says how to leave."""
        session = self.controller.current
        if self.controller.stop(session):
            return
        if self._line.text:
            self._line.clear()
            return
        session.clear_passing_notices()
        session.add_notice(LEAVING, is_passing=True)

    def _make_app(self, terminal: TextIO) -> Application[None]:
        self._tty = terminal
        output = create_output(stdout=terminal)
        write = output.write
        # Everything that is drawn passes here, also the input line, from which the library filters the other controls.
        output.write = lambda data: write(without_bidi(data))  # type: ignore[method-assign]
        if self._takes_mouse:  # the wheel alone; the library would ask for every movement, too
            output.enable_mouse_support = lambda: output.write_raw("\x1b[?1000h\x1b[?1006h")  # type: ignore[method-assign]
        app = ChatApplication(
            layout=self._layout,
            key_bindings=make_key_bindings(
                self,
                self._line,
                self._view,
                self._picker,
                self.controller,
                on_escape=self._on_escape,
                on_ctrl_c=self._on_ctrl_c,
                is_asking=self._is_asking,
                on_answer=self._on_answer,
            ),
            style=STYLE,
            full_screen=True,
            mouse_support=self._takes_mouse,
            editing_mode=EditingMode.VI if self._is_vi else EditingMode.EMACS,
            cursor=ModalCursorShapeConfig() if self._is_vi else None,
            min_redraw_interval=REDRAW_SECONDS,
            refresh_interval=REFRESH_SECONDS,
            before_render=lambda _: self._before_render(),
            after_render=lambda _: self._after_render(),
            output=output,
        )
        app.ttimeoutlen = ESCAPE_SECONDS
        return app

    async def _run(self, app: Application[None]) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        for signum in (*SIGNALS, signal.SIGHUP):
            loop.add_signal_handler(signum, self._on_signal, signum)
        self._callbacks.set_wake(partial(loop.call_soon_threadsafe, self._run_callbacks))
        try:
            await app.run_async(handle_sigint=False, set_exception_handler=False)
        finally:
            self._callbacks.set_wake(lambda: None)
            for signum in (*SIGNALS, signal.SIGHUP):  # until everything is saved
                loop.remove_signal_handler(signum)
                signal.signal(signum, raise_interrupted if signum in SIGNALS else signal.SIG_IGN)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Shows a bug in an event handler as a notice; the chat goes on."""
        error = context.get("exception") or context.get("message")
        self.controller.current.add_notice(f"Something went wrong: {error!r}", is_error=True)

    def _on_signal(self, signum: int) -> None:
        if self._editor.is_open and signum == signal.SIGINT:
            return  # Ctrl-C is meant for the editor
        self._editor.terminate()
        if not self._app.is_done:
            self._app.exit(exception=Interrupted(signum))

    def _run_callbacks(self) -> None:
        self._callbacks.run_all()
        self._app.invalidate()

    def _after_render(self) -> None:
        if not self._is_loading:  # only after the first draw: importing torch blocks for seconds
            self._is_loading = True
            self._mention_saved()
            Thread(target=import_module, args=["cbatch.cli.chat.markdown.layout"], daemon=True).start()
            self.controller.client.start(self._callbacks.put, self._on_open)
        now = time.monotonic()
        self.stats.delays.extend(now - when for when in self._undrawn_token_times)
        self._undrawn_token_times.clear()

    def _mention_saved(self) -> None:
        if self.controller.store is not None and (count := self._context.store.num_files):
            chats = "1 chat is" if count == 1 else f"{count:,} chats are"
            text = f"{chats} saved: /load lists them, cbatch chat --continue opens the last one."
            self.controller.current.add_notice(text, is_passing=True)
            self._app.invalidate()

    def _before_render(self) -> None:
        self.stats.tick()
        for session in self._view.compared:
            session.is_unread = False
        now = time.monotonic()
        if now - self._autosaved_at > AUTOSAVE_SECONDS:
            self._autosaved_at = now
            self.controller.save_open_replies()
        if self._context.store.save_error != self._shown_save_error:
            self._shown_save_error = self._context.store.save_error
            if self._shown_save_error:
                self.controller.current.add_notice(self._shown_save_error, is_error=True)

    def _bar(self) -> StyleAndTextTuples:
        return [*self._status_bar.render(self._app.output.get_size().columns)]

    def _attached(self) -> StyleAndTextTuples:
        """The line above the input that lists what goes with the message."""
        session = self.controller.current
        labels = [f"{number} {safe(one.label)}" for number, one in enumerate(session.attached, start=1)]
        labels += [safe(paste.label) for paste in pastes_in(self._line.text, session.pastes)]
        return [("class:note", "+ " + " · ".join(labels))] if labels else []

    def _on_output_line(self, line: str) -> None:
        """Shows a line that this program printed as a notice. Lines of libraries are kept in case loading fails."""
        name, _, text = line.partition("cbatch: ")
        if not name:
            session = self._context.batch_session
            if session not in self.controller.sessions or session is None:
                session = self.controller.current
            session.add_notice(text, is_passing=self._context.batch_session is None)
            session.is_unread = session is not self.controller.current
        else:
            self._captured_lines.append(line)
            self.stats.loading_detail = line.strip()

    def _on_enter(self, text: str) -> None:
        """Carries out what was typed."""
        self._view.follow()
        text, session = text.strip(), self.controller.current
        if not text:
            return
        self._has_asked_to_leave = False
        session.clear_passing_notices()
        if not text.startswith("/find"):
            self._view.end_search()
        with self._showing_errors():
            if text.startswith("/") and not text.startswith("//"):
                execute_command(self._context, text if text.startswith("/all ") else self._unfold(text))
                return
            self._context.to_delete = None
            try:
                self.controller.send(session, text.removeprefix("/"))
            except UserError:
                self._line.set_text(text)
                raise

    @contextmanager
    def _showing_errors(self) -> Iterator[None]:
        """Shows what the block raises as a notice."""
        try:
            yield
        except CbatchError as error:
            self.controller.current.add_notice(str(error), is_error=True, is_passing=True)
        except Exception as error:  # a bug must not cost the conversations
            self.controller.current.add_notice(f"Something went wrong: {error!r}", is_error=True)
