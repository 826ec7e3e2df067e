"""Key bindings of the chat. All other keys work as in Emacs, which is the default of prompt_toolkit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prompt_toolkit.application import get_app
from prompt_toolkit.filters import Condition, Filter, has_focus, is_searching
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.widgets import TextArea

from cbatch.cli.chat.commands.registry import CommandUI
from cbatch.cli.chat.session.session_list import SessionList
from cbatch.cli.chat.tui.transcript_view import TranscriptView


def make_key_bindings(
    ui: CommandUI, line: TextArea, view: TranscriptView, sessions: SessionList, on_ctrl_c: Callable[[], None]
) -> KeyBindings:
    """The chat's own bindings, which go before those of the library. `line` is where the user types."""
    bindings = KeyBindings()
    buffer, typing = line.buffer, has_focus(line)

    def bind(keys: str, action: Callable[[], object], when: Filter | bool = True) -> None:
        @bindings.add(*keys.split(), filter=when)
        def _(event: object) -> None:
            action()

    def accept() -> None:
        if buffer.complete_state and buffer.complete_state.current_completion:
            buffer.complete_state = None
        else:
            buffer.validate_and_handle()

    bind("enter", accept, typing)
    bind("escape enter", lambda: buffer.insert_text("\n"), typing)
    bind("c-c", on_ctrl_c, ~is_searching)
    bind("c-d", ui.exit, typing & Condition(lambda: not buffer.text))
    bind("c-z", lambda: get_app().suspend_to_background())
    bind("c-x c-e", lambda: ui.open_editor(buffer.text, ui.set_input), typing)
    bind("pageup", lambda: view.scroll(-1))
    bind("pagedown", lambda: view.scroll(1))
    bind("c-left", lambda: sessions.switch_by(-1))
    bind("c-right", lambda: sessions.switch_by(1))
    for index in range(9):
        bind(f"escape {index + 1}", partial(sessions.switch_to, index))
    return bindings
