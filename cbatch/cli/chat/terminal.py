"""The chat on a terminal: a transcript that scrolls, a bar, and an input line that nothing tears."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

from prompt_toolkit.application import Application, in_terminal
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import History
from prompt_toolkit.layout import Float, FloatContainer, HSplit, Layout, Window
from prompt_toolkit.layout.controls import FormattedTextControl
from prompt_toolkit.layout.dimension import Dimension
from prompt_toolkit.layout.menus import CompletionsMenu
from prompt_toolkit.output import create_output
from prompt_toolkit.styles import Style
from prompt_toolkit.widgets import SearchToolbar, TextArea

from cbatch.cli.chat.background_run import Background
from cbatch.cli.chat.commands.completion import CommandCompleter
from cbatch.cli.chat.commands.registry import Desk, carry_out
from cbatch.cli.chat.controller import Room
from cbatch.cli.chat.mailbox import Mailbox
from cbatch.cli.chat.session.session import Answer, Note, Session
from cbatch.cli.chat.session.store import Store
from cbatch.cli.chat.tui.editor import Editor
from cbatch.cli.chat.tui.key_bindings import make_keys
from cbatch.cli.chat.tui.output_capture import captured_output
from cbatch.cli.chat.tui.pane import Pane
from cbatch.cli.chat.tui.status import Status
from cbatch.cli.common.console import safe, without_bidi
from cbatch.cli.common.exits import Interrupted
from cbatch.cli.common.signals import SIGNALS, raise_interrupted
from cbatch.engine import ConfigError

REDRAW_SECONDS = 1 / 40
REFRESH_SECONDS = 0.5
"""Of what changes by itself: the speed, the progress of a batch."""

KEEP_SECONDS = 5.0
"""How often the beginning of an answer that is still coming is written to the disk."""

WELCOME = "/help shows what can be typed here; Ctrl-D leaves."
LEAVING = "Ctrl-D or /exit leaves."
STYLE = Style.from_dict(
    {
        "user": "ansicyan bold",
        "heading": "bold",
        "strong": "bold",
        "code": "ansiyellow",
        "quote": "italic",
        "fence": "ansibrightblack",
        "note": "ansibrightblack",
        "reasoning": "italic ansibrightblack",
        "error": "ansired",
        "bar": "reverse",
        "bar.current": "reverse bold",
        "prompt": "ansigreen bold",
    }
)


class Terminal:
    """Puts a room on a terminal and does what is typed there."""

    def __init__(self, room: Room, store: Store, history: History) -> None:
        self.room = room
        room.on_token = self._on_token
        self._mailbox = Mailbox()
        self.background = Background()
        self.status = Status(room, self.background)
        self._desk = Desk(room, self, self.background, self.status, store)
        self._heard: deque[str] = deque(maxlen=50)
        self._store = store
        self._editor = Editor()
        self._told_trouble = ""
        self._kept_at = time.monotonic()
        self._is_loading = False
        self._undrawn: list[float] = []
        self._app: Application[None] | None = None
        search = SearchToolbar()
        self.input = TextArea(
            multiline=True,
            wrap_lines=True,
            height=Dimension(min=1, max=8),
            dont_extend_height=True,
            prompt=lambda: [("class:prompt", f"{safe(room.current.name)}> ")],
            history=history,
            auto_suggest=AutoSuggestFromHistory(),
            completer=CommandCompleter(room, store),
            complete_while_typing=False,
            accept_handler=self._accept,
            search_field=search,
        )
        self._pane = Pane(room)
        bar = Window(FormattedTextControl(self._bar), height=1, style="class:bar")
        rows = HSplit([Window(self._pane, wrap_lines=False), bar, self.input, search])
        menu = Float(CompletionsMenu(max_height=8, scroll_offset=1), xcursor=True, ycursor=True)
        self._layout = Layout(FloatContainer(rows, [menu]), focused_element=self.input)

    def run(self) -> None:
        """Until the user leaves. Raises Interrupted after a signal, and what kept the engine from opening."""
        try:
            with captured_output(lambda line: self._mailbox.put(partial(self._hear, line))) as terminal:
                self._app = self._make_app(terminal)
                asyncio.run(self._run(self._app))
        except (EOFError, OSError):  # the terminal went away
            pass
        except Exception:  # where loading failed, what libraries said about it may help
            self._mailbox.deliver()
            for line in self._heard:
                print(safe(line), file=sys.stderr)
            raise
        finally:
            self._mailbox.deliver()
            self.room.leave()
            self._store.close()
            self.background.close()

    def _on_open(self, error: BaseException | None) -> None:
        """The engine is there, or will not be."""
        self.status.loading = ""
        if error is not None and self._app is not None and not self._app.is_done:
            self._app.exit(exception=error)

    def _on_token(self, session: Session, answer: Answer, text: str) -> None:
        """A token has come; how long it takes to the screen is measured where it is seen there."""
        if answer.num_tokens == 1:
            self.status.count_first_token(answer.last_at - answer.asked_at)
        if session is self.room.current and text:
            self._undrawn.append(answer.last_at)

    def leave(self) -> None:
        if self._app is not None and not self._app.is_done:
            self._app.exit()

    def put(self, text: str) -> None:
        text = safe(text)
        document = Document(text, len(text))
        asyncio.get_running_loop().call_soon(self.input.buffer.set_document, document)  # what was typed goes first

    def edit(self, text: str, then: Callable[[str], None]) -> None:
        app = self._app
        assert app is not None

        async def run() -> None:
            changed: list[str] = []
            async with in_terminal():
                editing = asyncio.get_running_loop().run_in_executor(None, self._editor.edit, text, self._tty)
                await asyncio.wait([editing])
            self._try(lambda: changed.append(editing.result().rstrip("\n")))
            if changed and changed[0].strip() and changed[0] != text.rstrip("\n"):
                self._try(lambda: then(changed[0]))

        app.create_background_task(run())

    def interrupt(self) -> None:
        """Ctrl-C: stops the answer, else clears the input, else says how to leave."""
        session = self.room.current
        if self.room.stop(session):
            return
        if self.input.text:
            self.input.buffer.reset()
            return
        last = session.items[-1] if session.items else None
        if not isinstance(last, Note) or last.text != LEAVING:
            session.note(LEAVING)

    def switch_to(self, place: int) -> None:
        """To the session at a place in the list, from 0, if there is one."""
        if place < len(self.room.sessions):
            self.room.switch(self.room.sessions[place])

    def step(self, places: int) -> None:
        """To a session further on in the list, which goes around."""
        place = self.room.sessions.index(self.room.current) + places
        self.switch_to(place % len(self.room.sessions))

    def scroll(self, pages: int) -> None:
        self._pane.scroll(pages)

    def _make_app(self, terminal: TextIO) -> Application[None]:
        self._tty = terminal
        output = create_output(stdout=terminal)
        write = output.write
        # All text that is drawn goes this way, that of the input line too, of which the library filters the rest.
        output.write = lambda data: write(without_bidi(data))  # type: ignore[method-assign]
        app: Application[None] = Application(
            layout=self._layout,
            key_bindings=make_keys(self),
            style=STYLE,
            full_screen=True,
            min_redraw_interval=REDRAW_SECONDS,
            refresh_interval=REFRESH_SECONDS,
            before_render=lambda _: self._tick(),
            after_render=lambda _: self._drawn(),
            output=output,
        )
        app.ttimeoutlen = 0.05  # of a lone Escape
        return app

    async def _run(self, app: Application[None]) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._tell_of_mistake)
        for signum in (*SIGNALS, signal.SIGHUP):
            loop.add_signal_handler(signum, self._leave_by, signum)
        self._mailbox.set_wake(partial(loop.call_soon_threadsafe, self._deliver))
        try:
            await app.run_async(handle_sigint=False, set_exception_handler=False)
        finally:
            self._mailbox.set_wake(lambda: None)
            for signum in (*SIGNALS, signal.SIGHUP):  # until everything is kept
                loop.remove_signal_handler(signum)
                signal.signal(signum, raise_interrupted if signum in SIGNALS else signal.SIG_IGN)

    def _tell_of_mistake(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A mistake of ours on the way of an event: a sentence, and the chat goes on."""
        error = context.get("exception") or context.get("message")
        self.room.current.note(f"Something went wrong: {error!r}", is_error=True)

    def _leave_by(self, signum: int) -> None:
        if self._editor.is_open and signum == signal.SIGINT:
            return  # Ctrl-C there is for the editor
        self._editor.end()
        if self._app is not None and not self._app.is_done:
            self._app.exit(exception=Interrupted(signum))

    def _deliver(self) -> None:
        self._mailbox.deliver()
        if self._app is not None:
            self._app.invalidate()

    def _drawn(self) -> None:
        if not self._is_loading:  # only now: importing torch takes the interpreter for seconds
            self._is_loading = True
            self.room.client.start(self._mailbox.put, self._on_open)
        now = time.monotonic()
        for when in self._undrawn:
            self.status.count_delay(now - when)
        self._undrawn.clear()

    def _tick(self) -> None:
        self.status.tick()
        now = time.monotonic()
        if now - self._kept_at > KEEP_SECONDS:
            self._kept_at = now
            self.room.keep_open()
        if self._store.trouble != self._told_trouble:
            self._told_trouble = self._store.trouble
            if self._told_trouble:
                self.room.current.note(self._told_trouble, is_error=True)

    def _bar(self) -> StyleAndTextTuples:
        assert self._app is not None
        return [*self.status.bar(self._app.output.get_size().columns)]

    def _hear(self, line: str) -> None:
        """A line that something printed: of this program it is a note, others are shown when loading fails."""
        name, _, text = line.partition("cbatch: ")
        if not name:
            self.room.current.note(text)
        else:
            self._heard.append(line)
            if self.status.loading:
                self.status.loading = f"loading the model: {line.strip()}"

    def _accept(self, buffer: Buffer) -> bool:
        """Does what was typed, and has the input line cleared."""
        self._pane.follow()
        text = buffer.text.encode("utf-8", "replace").decode().strip()
        if text.startswith("/") and not text.startswith("//"):
            self._try(lambda: carry_out(self._desk, text))
        elif text:
            self._try(lambda: self.room.ask(self.room.current, text.removeprefix("/")))
        return False

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except ConfigError as error:
            self.room.current.note(str(error), is_error=True)
        except Exception as error:  # a mistake of ours costs a sentence, and not the conversations
            self.room.current.note(f"Something went wrong: {error!r}", is_error=True)
