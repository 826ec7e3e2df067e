"""The chat on a terminal: a transcript that scrolls, a status bar, and an input line."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from threading import Thread
from typing import TextIO

from prompt_toolkit.application import Application, get_app, in_terminal
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.cursor_shapes import ModalCursorShapeConfig
from prompt_toolkit.document import Document
from prompt_toolkit.enums import EditingMode
from prompt_toolkit.filters import Condition, Filter, has_focus, is_searching, vi_insert_mode, vi_replace_mode
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout import (
    AnyContainer,
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
from prompt_toolkit.layout.processors import TabsProcessor
from prompt_toolkit.output import create_output
from prompt_toolkit.widgets import SearchToolbar, TextArea

from cbatch.base.errors import CbatchError, Interrupted
from cbatch.base.units import format_count, word_for
from cbatch.cli.chat.background_run import BackgroundRun
from cbatch.cli.chat.commands.registry import CommandCompleter, FrontEnd, execute_line, is_message
from cbatch.cli.chat.controller import ChatController
from cbatch.cli.chat.editor import Editor
from cbatch.cli.chat.pictures import KITTY_CLEAR, graphics_of, thumbnail
from cbatch.cli.chat.screen import STYLE, TranscriptView, status_bar
from cbatch.cli.chat.session.session import Attachment, Reply, Session, Turn, is_long_paste, pastes_in
from cbatch.cli.chat.session.store import SessionStore
from cbatch.cli.common.console import safe, without_bidi
from cbatch.cli.common.exits import SIGNALS, UserError, raise_interrupted
from cbatch.cli.common.stdout import capture_output

REDRAW_SECONDS = 1 / 40
REFRESH_SECONDS = 0.5
"""How often the status bar is drawn anew even if nothing else happens."""

AUTOSAVE_SECONDS = 5.0
"""How often a reply that is still streaming is saved."""

ESCAPE_SECONDS, PREFIX_SECONDS = 0.05, 1.0
"""How long Esc waits for the rest of an Alt key, and Ctrl-X for the key after it."""

SAVE_TITLE, RESTORE_TITLE = "\x1b[22;0t", "\x1b[23;0t"
"""Sequences of xterm's, which other terminals know or ignore."""

WELCOME = "/help lists the commands, /help keys the keys; Ctrl-D leaves."
LEAVING = "Ctrl-D or /exit leaves."
BATCH_RUNS = "A batch is running. Leave again to stop it; cbatch run --resume continues it later."

MOST_COPIED_BYTES = 100_000
"""Many terminals take no more than this for the clipboard, in base64."""


class ChatApplication(Application[None]):
    """An application in which Esc takes effect at once, although Alt keys begin with it."""

    @property
    def timeoutlen(self) -> float:
        """Seconds until the keys so far count as all there are."""
        pending = self.key_processor.key_buffer
        return ESCAPE_SECONDS if pending and pending[0].key == Keys.Escape else PREFIX_SECONDS

    @timeoutlen.setter
    def timeoutlen(self, seconds: float) -> None:
        """The library sets a default, which does not matter here."""


class Terminal(FrontEnd):
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
        bell_seconds: float | None = None,
    ) -> None:
        """
        bell_seconds: a reply that took longer rings the bell; None: none does
        is_vi:       whether lines are edited as in vi
        takes_mouse: whether the wheel scrolls; then Shift is needed to select text
        """
        super().__init__(controller, store, background)
        self._is_vi, self._takes_mouse, self._bell_seconds = is_vi, takes_mouse, bell_seconds
        self._title = ""
        self._were_busy: set[Session] = set()
        self._loading_error: BaseException | None = None
        self._captured_lines: deque[str] = deque(maxlen=50)
        self._callbacks: deque[Callable[[], None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._editor = Editor()
        self._shown_save_error = ""
        self._autosaved_at = time.monotonic()
        self._is_awake = self._is_loading = self._has_asked_to_leave = False
        self._undrawn_token_times: list[float] = []
        self._graphics = graphics_of(os.environ)
        self._thumbnail: tuple[Attachment | None, str] = None, ""
        self._drawn = ""
        self._app: Application[None]
        self.screen = TranscriptView(controller)
        self._search = SearchToolbar()
        self._line = TextArea(
            wrap_lines=True,
            height=Dimension(min=1, max=8),
            dont_extend_height=True,
            prompt=lambda: [("class:prompt", f"{safe(self.session.name)}> ")],
            history=history,
            auto_suggest=AutoSuggestFromHistory(),
            completer=CommandCompleter(controller, store),
            complete_while_typing=False,
            search_field=self._search,
            input_processors=[TabsProcessor(char1=" ", char2=" ")],
        )
        # Text that is typed belongs to the session: it stays there, and comes back with it.
        self._line.buffer.on_text_changed += lambda _: setattr(self.session, "draft", self._line.text)
        controller.on_token = self._on_token
        controller.on_switch = lambda: self.set_input(self.session.draft)
        controller.on_switch()

    def run(self) -> None:
        """Returns when the user leaves. Raises Interrupted after a signal, and what kept the engine from opening."""
        try:
            with capture_output(lambda line: self._post(partial(self._on_output_line, line))) as terminal:
                self._app = self._make_app(terminal)
                asyncio.run(self._run())
        except (EOFError, OSError):  # the terminal went away
            pass
        finally:
            try:
                self._run_callbacks()
            finally:
                self.close()
        if self._loading_error is not None:
            for line in self._captured_lines:  # what libraries printed may say why
                print(safe(line), file=sys.stderr)
            raise self._loading_error

    def exit(self) -> None:
        if self.background.is_running and not self._has_asked_to_leave:
            self._has_asked_to_leave = True  # until something else is typed
            self.show(BATCH_RUNS)
        elif not self._app.is_done:
            self._app.exit()

    def set_input(self, text: str) -> None:
        text = safe(text)
        self._line.buffer.set_document(Document(text, len(text)), bypass_readonly=True)

    def _clear_input(self) -> None:
        self._line.buffer.reset()
        self.session.draft = ""

    def copy(self, text: str) -> None:
        data = base64.b64encode(text.encode("utf-8", "replace"))
        if len(data) > MOST_COPIED_BYTES:
            raise UserError("That is too long for the clipboard of most terminals; /export FILE.md writes a file.")
        self._app.output.write_raw(f"\x1b]52;c;{data.decode()}\x07")
        self._app.output.flush()

    def open_editor(self, text: str, then: Callable[[str], None]) -> None:
        async def run() -> None:
            async with in_terminal():
                editing = asyncio.get_running_loop().run_in_executor(None, self._editor.edit, text, self._tty)
                await asyncio.wait([editing])
            with self._showing_errors():
                changed = editing.result().rstrip("\n")
                if not changed.strip() or changed == text.rstrip("\n"):
                    raise UserError("Nothing was changed.")
                then(changed)

        self._app.create_background_task(run())

    def attach(self, session: Session, file: Attachment) -> None:
        super().attach(session, file)
        if file.digest and file.kind == "image" and self._graphics:
            client = self.controller.client_of(session)
            draw = partial(thumbnail, file, self._graphics)
            client.compute(lambda engine: draw(), lambda made: setattr(self, "_thumbnail", (file, made)))

    def _draw_thumbnail(self) -> None:
        """Shows the last picture that was attached until its message is sent."""
        file, wanted = self._thumbnail
        wanted = wanted if file in self.session.attached else ""
        if self._drawn and wanted != self._drawn:
            self._app.output.write_raw(KITTY_CLEAR)  # which other terminals ignore
            self._app.renderer.clear()
            self._app.invalidate()  # and then the new one
            wanted = ""
        if wanted != self._drawn:
            self._app.output.write_raw(wanted)
            self._app.output.flush()
        self._drawn = wanted

    def _make_app(self, terminal: TextIO) -> Application[None]:
        self._tty = terminal
        output = create_output(stdout=terminal)
        write = output.write
        # Everything that is drawn passes here, also the input line, from which the library filters the other controls.
        output.write = lambda data: write(without_bidi(data))  # type: ignore[method-assign]
        if self._takes_mouse:  # the wheel alone; the library would ask for every movement, too
            output.enable_mouse_support = lambda: output.write_raw("\x1b[?1000h\x1b[?1006h")  # type: ignore[method-assign]
        app = ChatApplication(
            layout=self._make_layout(),
            key_bindings=self._make_key_bindings(),
            style=STYLE,
            include_default_pygments_style=False,
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

    def _make_layout(self) -> Layout:
        attached = Window(
            FormattedTextControl(self._attached),
            height=Dimension(min=1, max=4),
            wrap_lines=True,
            dont_extend_height=True,
        )
        bar = FormattedTextControl(lambda: [*status_bar(self.controller, self.stats, self.background, self.columns)])
        rows: list[AnyContainer] = [
            Window(self.screen, wrap_lines=False),
            Window(bar, height=1, style="class:bar"),
            ConditionalContainer(attached, Condition(lambda: bool(self._attached()))),
            self._line,
            self._search,
        ]
        menu = Float(CompletionsMenu(max_height=8, scroll_offset=1), xcursor=True, ycursor=True)
        return Layout(FloatContainer(HSplit(rows), [menu]), focused_element=self._line)

    def _attached(self) -> StyleAndTextTuples:
        """The line above the input that lists what goes with the message."""
        labels = [f"{number} {safe(one.label)}" for number, one in enumerate(self.session.attached, start=1)]
        labels += [safe(paste.label) for paste in pastes_in(self._line.text, self.session.pastes)]
        return [("class:note", "+ " + " · ".join(labels))] if labels else []

    def _make_key_bindings(self) -> KeyBindings:
        """The chat's own keys, which go before those of an Emacs-like or vi-like line editor."""
        controller, line, view = self.controller, self._line, self.screen
        bindings = KeyBindings()

        def bind(keys: str, action: Callable[[], object], when: Filter | bool = True) -> None:
            """Keys that follow one another stand with blanks between them."""

            @bindings.add(*keys.split(), filter=when)
            def _(event: KeyPressEvent) -> None:
                action()

        typing = has_focus(line) & ~is_searching
        on_empty_line = typing & Condition(lambda: not line.text)

        @bindings.add(Keys.BracketedPaste, filter=typing)
        def _(event: KeyPressEvent) -> None:
            text = event.data.encode("utf-8", "replace").decode().replace("\r\n", "\n").replace("\r", "\n")
            if wrong := sum("\ud800" <= character <= "\udfff" for character in event.data):
                self.show(f"{format_count(wrong, 'byte')} of the paste not in UTF-8: a ? stands for each.")
            if is_long_paste(text):
                paste = self.session.fold_paste(text)
                self.measure(self.session, paste)
                text = paste.name
            if not line.text.startswith("/"):  # else it belongs to a command
                with self._showing_errors():
                    text = self.attach_dropped(text)
            line.buffer.insert_text(text)

        for keys, is_before in (("backspace", True), ("c-w", True), ("delete", False), ("c-d", False)):
            at_paste = Condition(lambda is_before=is_before: self._paste_at_cursor(is_before) is not None)  # type: ignore[misc]
            bind(keys, partial(self._delete_paste, is_before), typing & at_paste)
        bind("enter", self._on_enter, typing)
        for keys in ("c-j", "escape enter"):
            bind(keys, lambda: line.buffer.insert_text("\n"), typing)
        bind("escape", self._on_escape, typing & ~vi_insert_mode & ~vi_replace_mode)
        bind("c-c", self._on_ctrl_c, ~is_searching)
        bind("c-d", self.exit, on_empty_line)
        bind("c-z", lambda: get_app().suspend_to_background())
        bind("c-x c-e", lambda: self.open_editor(line.text, self.set_input), typing)
        bind("c-t", view.show_reasoning)
        bind("pageup", partial(view.scroll, pages=-1))
        bind("pagedown", partial(view.scroll, pages=1))
        bind("home", partial(view.go_to, 0), on_empty_line)
        bind("end", partial(view.go_to, None), on_empty_line)
        bind("escape left", partial(controller.switch_by, -1))
        bind("escape right", partial(controller.switch_by, 1))
        for index in range(9):
            bind(f"escape {index + 1}", partial(controller.switch_to, index))

        is_asking = on_empty_line & Condition(lambda: self.session.asking is not None)
        for key, is_allowed, always in (("y", True, False), ("a", True, True), ("n", False, False)):
            answer = partial(controller.answer_call, is_allowed=is_allowed, always=always)
            bind(key, lambda answer=answer: answer(self.session), is_asking)  # type: ignore[misc]

        picking = on_empty_line & Condition(lambda: self._undecided is not None)
        bind("left", partial(self._move_choice, -1), picking)
        bind("right", partial(self._move_choice, 1), picking)
        bind("enter", self._pick, picking)
        comparing = on_empty_line & ~picking & Condition(lambda: bool(view.compared))
        bind("left", partial(view.turn_page, -1), comparing)
        bind("right", partial(view.turn_page, 1), comparing)

        def is_offered(number: int) -> bool:
            turn = self._undecided
            return turn is not None and (number == turn.fallback or turn.first_compared <= number < len(turn.replies))

        for number in range(10):
            bind(str(number), partial(self._pick, number), on_empty_line & Condition(partial(is_offered, number)))
        return bindings

    def _paste_at_cursor(self, is_before: bool) -> tuple[int, int] | None:
        """Where a folded paste stands that the cursor is inside of, or directly before or behind."""
        text, cursor = self._line.text, self._line.buffer.cursor_position
        for paste in pastes_in(text, self.session.pastes):
            start = text.rfind(paste.name, 0, cursor + len(paste.name))
            end = start + len(paste.name)
            if start >= 0 and (start < cursor <= end if is_before else start <= cursor < end):
                return start, end
        return None

    def _delete_paste(self, is_before: bool) -> None:
        """Deletes a folded paste as one unit."""
        if (place := self._paste_at_cursor(is_before)) is not None:
            buffer, (start, end) = self._line.buffer, place
            buffer.save_to_undo_stack()
            buffer.document = Document(buffer.text[:start] + buffer.text[end:], start)

    @property
    def _undecided(self) -> Turn | None:
        """The last turn, if several replies stand side by side there."""
        last = self.session.last
        return last if last is not None and last.is_undecided else None

    def _move_choice(self, offset: int) -> None:
        """Goes to a reply on the left or right, and from the last one to the first."""
        if (turn := self._undecided) is not None:
            first, count = turn.first_compared, len(turn.replies) - turn.first_compared
            turn.chosen = first + (turn.chosen - first + offset) % count
            self.screen.follows_chosen = True

    def _pick(self, number: int | None = None) -> None:
        """Keeps the reply with a number, or the one that stands out."""
        if (turn := self._undecided) is not None:
            self.controller.pick(self.session, turn.chosen if number is None else number)
            self.session.clear_passing_notices()  # they say how to pick
            self.screen.go_to(None)

    def _on_escape(self) -> None:
        """Closes what is open, else stops the reply, else takes notices away."""
        if self._line.buffer.complete_state is not None:
            self._line.buffer.cancel_completion()
        elif self.screen.searched:
            self.screen.end_search()
        elif self.screen.compared:
            self.screen.compared = []
        elif self.stop_shell():
            pass
        elif not self.controller.stop(self.session):
            self.session.clear_passing_notices()

    def _on_ctrl_c(self) -> None:
        """Clears the line, which the history keeps; if it is empty, stops the reply; else says how to leave."""
        if text := self._line.text:
            if (whole := self.session.unfold(text)) not in self._line.buffer.history.get_strings()[-1:]:
                self._line.buffer.history.append_string(whole)
            self._clear_input()
        elif not (self.stop_shell() or self.controller.stop(self.session)):
            self.session.clear_passing_notices()
            self.show(LEAVING)

    def _on_enter(self) -> None:
        """Takes the entry of an open menu; after a backslash begins a new line; else carries out what was typed."""
        buffer = self._line.buffer
        if buffer.complete_state is not None and buffer.complete_state.current_completion is not None:
            buffer.complete_state = None
            return
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
            return
        text = buffer.text.encode("utf-8", "replace").decode().strip()
        if text:
            buffer.history.append_string(self.session.unfold(buffer.text))
        get_app().vi_state.reset()  # each line begins in the insert mode
        self._clear_input()  # first, because what is sent may put something else here
        self.screen.go_to(None)
        if not text:
            return
        self._has_asked_to_leave = False
        for session in {self.session, *self.screen.compared}:
            session.clear_passing_notices()
        if not text.startswith("/find"):
            self.screen.end_search()
        with self._showing_errors():
            try:
                execute_line(self, text)
                self.screen.begin_answer()
            except CbatchError:
                if is_message(text):
                    self.set_input(text)
                raise

    @contextmanager
    def _showing_errors(self) -> Iterator[None]:
        """Shows what the block raises as a notice."""
        try:
            yield
        except CbatchError as error:
            self.session.add_notice(str(error), is_error=True, is_passing=True)
        except Exception as error:  # must not cost the conversations
            self._show_bug(error)

    def _show_bug(self, error: object) -> None:
        self.session.add_notice(f"Something went wrong: {error!r}", is_error=True)

    async def _run(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        # A bug in an event handler.
        loop.set_exception_handler(lambda _, found: self._show_bug(found.get("exception") or found.get("message")))
        for signum in (*SIGNALS, signal.SIGHUP):
            loop.add_signal_handler(signum, self._on_signal, signum)
        self._run_callbacks()
        output = self._app.output
        try:
            output.write_raw(SAVE_TITLE)
            await self._app.run_async(handle_sigint=False, set_exception_handler=False)
        finally:
            output.write_raw(RESTORE_TITLE)
            output.flush()
            self._loop = None
            for signum in (*SIGNALS, signal.SIGHUP):  # until everything is saved
                loop.remove_signal_handler(signum)
                signal.signal(signum, raise_interrupted if signum in SIGNALS else signal.SIG_IGN)

    def _post(self, callback: Callable[[], None]) -> None:
        """Has something run on this thread, in order; for other threads."""
        self._callbacks.append(callback)
        if (loop := self._loop) is not None and not self._is_awake:
            self._is_awake = True
            with suppress(RuntimeError):  # the loop was just closed
                loop.call_soon_threadsafe(self._run_callbacks)

    def _run_callbacks(self) -> None:
        self._is_awake = False
        try:
            while self._callbacks:
                self._callbacks.popleft()()
        finally:
            if self._loop is not None:
                self._app.invalidate()
                if self._callbacks:  # one of them raised
                    self._loop.call_soon(self._run_callbacks)

    def _on_signal(self, signum: int) -> None:
        if self._editor.process is not None and signum == signal.SIGINT:
            return  # Ctrl-C is meant for the editor
        if self._editor.process is not None:  # so that nobody has to wait for it
            self._editor.process.terminate()
        if not self._app.is_done:
            self._app.exit(exception=Interrupted(signum))

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

    def _after_render(self) -> None:
        if not self._is_loading:  # only after the first draw: importing torch blocks for seconds
            self._is_loading = True
            if self.controller.store is not None and (count := len(self.store.files())):
                chats = f"{format_count(count, 'chat')} {word_for(count, 'is', 'are')}"
                self.show(f"{chats} saved: /load lists them, cbatch chat --continue opens the last one.")
                self._app.invalidate()
            Thread(target=import_module, args=["cbatch.cli.chat.markdown.layout"], daemon=True).start()
            self.controller.client.start(self._post, self._on_open)
        now = time.monotonic()
        self.stats.delays.extend(now - when for when in self._undrawn_token_times)
        self._undrawn_token_times.clear()
        self._draw_thumbnail()

    def _before_render(self) -> None:
        self.stats.tick()
        self._tell_outside()
        for session in self.screen.compared:
            session.is_unread = False
        now = time.monotonic()
        if now - self._autosaved_at > AUTOSAVE_SECONDS:
            self._autosaved_at = now
            for session in self.controller.sessions:
                if session.is_busy:
                    self.controller.save(session)
        before, self._shown_save_error = self._shown_save_error, self.store.save_error
        if self._shown_save_error not in ("", before):
            self.session.add_notice(self._shown_save_error, is_error=True)

    def _tell_outside(self) -> None:
        """Tells those who look at something else what goes on: by the terminal's title, and a bell."""
        busy = {session for session in self.controller.sessions if session.is_busy}
        names = ", ".join(safe(session.name) for session in self.controller.sessions if session in busy)
        title = f"{names} … cbatch" if names else f"{safe(self.session.name)} · cbatch"
        if title != self._title:
            self._title = title
            self._app.output.set_title(title)
        lasts = (session.last.reply for session in self._were_busy - busy if session.last is not None)
        done = (reply for reply in lasts if reply is not None and reply.state != "stopped")
        longest = max((reply.last_token_at - reply.requested_at for reply in done), default=-1.0)
        if self._bell_seconds is not None and longest >= self._bell_seconds:
            self._app.output.bell()
        self._were_busy = busy

    def _on_output_line(self, line: str) -> None:
        """Shows a line that this program printed as a notice. Lines of libraries are kept in case loading fails."""
        name, _, text = line.partition("cbatch: ")
        if not name:
            told = next((one for one in self.controller.sessions if one is self.batch_session), self.session)
            told.add_notice(text, is_passing=self.batch_session is None)
            told.is_unread = told is not self.session
        else:
            self._captured_lines.append(line)
            self.stats.loading_detail = line.strip()
