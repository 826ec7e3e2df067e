"""The chat on a terminal: a transcript that scrolls, a status bar, and an input line."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TextIO

from prompt_toolkit.application import Application, in_terminal
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import History
from prompt_toolkit.layout import CompletionsMenu, Float, FloatContainer, FormattedTextControl, HSplit, Layout, Window
from prompt_toolkit.layout.dimension import Dimension
from prompt_toolkit.output import create_output
from prompt_toolkit.styles import Style
from prompt_toolkit.widgets import SearchToolbar, TextArea

from cbatch.cli.chat.background_run import BackgroundRun
from cbatch.cli.chat.callback_queue import CallbackQueue
from cbatch.cli.chat.commands.completion import CommandCompleter
from cbatch.cli.chat.commands.registry import CommandContext, execute_command
from cbatch.cli.chat.controller import ChatController
from cbatch.cli.chat.session.reply import Reply
from cbatch.cli.chat.session.session import Notice, Session
from cbatch.cli.chat.session.store import SessionStore
from cbatch.cli.chat.stats import ChatStats
from cbatch.cli.chat.tui.editor import Editor
from cbatch.cli.chat.tui.key_bindings import make_key_bindings
from cbatch.cli.chat.tui.output_capture import capture_output
from cbatch.cli.chat.tui.status_bar import StatusBar
from cbatch.cli.chat.tui.transcript_view import TranscriptView
from cbatch.cli.common.console import safe, without_bidi
from cbatch.cli.common.exits import SIGNALS, raise_interrupted
from cbatch.engine import CbatchError, Interrupted

REDRAW_SECONDS = 1 / 40
REFRESH_SECONDS = 0.5
"""How often the status bar is drawn anew even if nothing else happens."""

AUTOSAVE_SECONDS = 5.0
"""How often a reply that is still streaming is saved."""

WELCOME = "/help lists the commands and keys; Ctrl-D leaves."
LEAVING = "Ctrl-D or /exit leaves."
STYLE = Style.from_dict(
    {
        "user": "ansicyan bold",
        "heading": "bold",
        "strong": "bold",
        "emphasis": "italic",
        "strike": "strike",
        "link": "ansiblue underline",
        "marker": "ansicyan",
        "code": "ansiyellow",
        "code.keyword": "ansimagenta",
        "code.string": "ansigreen",
        "code.comment": "italic ansibrightblack",
        "code.number": "ansicyan",
        "code.name": "ansiblue",
        "code.operator": "ansiyellow",
        "quote": "ansibrightblack",
        "table": "ansibrightblack",
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
    """Shows the sessions of a controller, and carries out what is typed."""

    def __init__(
        self, controller: ChatController, store: SessionStore, history: History, background: BackgroundRun | None = None
    ) -> None:
        self.controller = controller
        controller.on_token = self._on_token
        self._callbacks = CallbackQueue()
        self.background = background or BackgroundRun()
        self.stats = ChatStats(controller)
        self._status_bar = StatusBar(controller, self.stats, self.background)
        self._context = CommandContext(controller, self, self.background, self.stats, store)
        self._captured_lines: deque[str] = deque(maxlen=50)
        self._editor = Editor()
        self._shown_save_error = ""
        self._autosaved_at = time.monotonic()
        self._is_loading = False
        self._undrawn_token_times: list[float] = []
        self._app: Application[None]
        search = SearchToolbar()
        self._input = TextArea(
            multiline=True,
            wrap_lines=True,
            height=Dimension(min=1, max=8),
            dont_extend_height=True,
            prompt=lambda: [("class:prompt", f"{safe(controller.current.name)}> ")],
            history=history,
            auto_suggest=AutoSuggestFromHistory(),
            completer=CommandCompleter(controller, store),
            complete_while_typing=False,
            accept_handler=self._accept,
            search_field=search,
        )
        self._view = TranscriptView(controller)
        bar = Window(FormattedTextControl(self._bar), height=1, style="class:bar")
        rows = HSplit([Window(self._view, wrap_lines=False), bar, self._input, search])
        menu = Float(CompletionsMenu(max_height=8, scroll_offset=1), xcursor=True, ycursor=True)
        self._layout = Layout(FloatContainer(rows, [menu]), focused_element=self._input)

    def run(self) -> None:
        """Returns when the user leaves. Raises Interrupted after a signal, and what kept the engine from opening."""
        try:
            with capture_output(lambda line: self._callbacks.put(partial(self._on_output_line, line))) as terminal:
                self._app = self._make_app(terminal)
                asyncio.run(self._run(self._app))
        except (EOFError, OSError):  # the terminal went away
            pass
        except Exception:  # if loading failed, what libraries printed may say why
            self._callbacks.run_all()
            for line in self._captured_lines:
                print(safe(line), file=sys.stderr)
            raise
        finally:
            self._callbacks.run_all()
            self.controller.end_all()
            self._context.store.close()
            self.background.close()

    def _on_open(self, error: BaseException | None) -> None:
        self.stats.loading = ""
        if error is not None and not self._app.is_done:
            self._app.exit(exception=error)

    def _on_token(self, session: Session, reply: Reply, text: str) -> None:
        """Notes when a token came; `_after_render` measures how long it took to the screen."""
        if reply.num_tokens == 1:
            self.stats.first_tokens.append(reply.last_token_at - reply.requested_at)
        if session is self.controller.current and text:
            self._undrawn_token_times.append(reply.last_token_at)

    def exit(self) -> None:
        if not self._app.is_done:
            self._app.exit()

    def set_input(self, text: str) -> None:
        # Later, because the library clears the line after `_accept`.
        asyncio.get_running_loop().call_soon(self._input.buffer.set_document, Document(safe(text)))

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

    def _on_ctrl_c(self) -> None:
        """Stops the reply; if there is none, clears the input; if that is empty, says how to leave."""
        session = self.controller.current
        if self.controller.stop(session):
            return
        if self._input.text:
            self._input.buffer.reset()
            return
        last = session.items[-1] if session.items else None
        if not isinstance(last, Notice) or last.text != LEAVING:
            session.add_notice(LEAVING)

    def _make_app(self, terminal: TextIO) -> Application[None]:
        self._tty = terminal
        output = create_output(stdout=terminal)
        write = output.write
        # Everything that is drawn passes here, also the input line, from which the library filters the other controls.
        output.write = lambda data: write(without_bidi(data))  # type: ignore[method-assign]
        app: Application[None] = Application(
            layout=self._layout,
            key_bindings=make_key_bindings(self, self._input, self._view, self.controller, self._on_ctrl_c),
            style=STYLE,
            full_screen=True,
            min_redraw_interval=REDRAW_SECONDS,
            refresh_interval=REFRESH_SECONDS,
            before_render=lambda _: self._before_render(),
            after_render=lambda _: self._after_render(),
            output=output,
        )
        app.ttimeoutlen = 0.05  # how long a lone Escape waits for a second key
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
            self.controller.client.start(self._callbacks.put, self._on_open)
        now = time.monotonic()
        self.stats.delays.extend(now - when for when in self._undrawn_token_times)
        self._undrawn_token_times.clear()

    def _before_render(self) -> None:
        self.stats.tick()
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

    def _on_output_line(self, line: str) -> None:
        """Shows a line that this program printed as a notice. Lines of libraries are kept in case loading fails."""
        name, _, text = line.partition("cbatch: ")
        if not name:
            self.controller.current.add_notice(text)
        else:
            self._captured_lines.append(line)
            if self.stats.loading:
                self.stats.loading = f"loading the model: {line.strip()}"

    def _accept(self, buffer: Buffer) -> bool:
        """Carries out what was typed. Returns False, which has the library clear the input line."""
        self._view.follow()
        text = buffer.text.encode("utf-8", "replace").decode().strip()
        with self._showing_errors():
            if text.startswith("/") and not text.startswith("//"):
                execute_command(self._context, text)
            elif text:
                self.controller.send(self.controller.current, text.removeprefix("/"))
        return False

    @contextmanager
    def _showing_errors(self) -> Iterator[None]:
        """Shows what the block raises as a notice."""
        try:
            yield
        except CbatchError as error:
            self.controller.current.add_notice(str(error), is_error=True)
        except Exception as error:  # a bug must not cost the conversations
            self.controller.current.add_notice(f"Something went wrong: {error!r}", is_error=True)
