"""Key bindings of the chat. All other keys work as in Emacs, or in vi if the user wants that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prompt_toolkit.application import Application, get_app
from prompt_toolkit.filters import Condition, Filter, has_focus, is_searching, vi_insert_mode, vi_replace_mode
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys

from cbatch.cli.chat.commands.registry import CommandUI
from cbatch.cli.chat.session.session_list import SessionList
from cbatch.cli.chat.tui.input_line import InputLine
from cbatch.cli.chat.tui.reply_picker import ReplyPicker
from cbatch.cli.chat.tui.transcript_view import TranscriptView

ESCAPE_SECONDS, PREFIX_SECONDS = 0.05, 1.0
"""How long Esc waits for the rest of an Alt key, and Ctrl-X for the key after it."""


Bind = Callable[..., None]
"""Takes keys, what they do, and when."""

ANSWERS = {"y": (True, False), "a": (True, True), "n": (False, False)}
"""What the keys mean when a call of a tool is asked about: whether it may run, and whether all later ones may."""


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


def make_key_bindings(
    ui: CommandUI,
    line: InputLine,
    view: TranscriptView,
    picker: ReplyPicker,
    sessions: SessionList,
    *,
    on_escape: Callable[[], None],
    on_ctrl_c: Callable[[], None],
    is_asking: Callable[[], bool],
    on_answer: Callable[[bool, bool], None],
) -> KeyBindings:
    """The chat's own bindings, which go before those of the library.

    is_asking: whether a call of a tool waits for the user
    on_answer: gets whether it may run, and whether all later ones may
    """
    bindings = KeyBindings()
    typing = has_focus(line.area) & ~is_searching
    on_empty_line = typing & Condition(lambda: not line.text)

    def bind(keys: str, action: Callable[[], object], when: Filter | bool = True) -> None:
        @bindings.add(*keys.split(), filter=when)
        def _(event: KeyPressEvent) -> None:
            action()

    @bindings.add(Keys.BracketedPaste, filter=typing)
    def _(event: KeyPressEvent) -> None:
        line.paste(event.data)

    bind("enter", line.enter, typing)
    bind("c-j", line.new_line, typing)
    bind("escape enter", line.new_line, typing)
    bind("escape", on_escape, typing & ~vi_insert_mode & ~vi_replace_mode)
    bind("c-c", on_ctrl_c, ~is_searching)
    bind("c-d", ui.exit, on_empty_line)
    bind("c-z", lambda: get_app().suspend_to_background())
    bind("c-x c-e", lambda: ui.open_editor(line.text, ui.set_input), typing)
    bind("c-t", view.show_reasoning)
    bind("pageup", lambda: view.scroll_pages(-1))
    bind("pagedown", lambda: view.scroll_pages(1))
    bind("home", view.go_to_start, on_empty_line)
    bind("end", view.follow, on_empty_line)
    bind("escape left", lambda: sessions.switch_by(-1))
    bind("escape right", lambda: sessions.switch_by(1))
    for index in range(9):
        bind(f"escape {index + 1}", partial(sessions.switch_to, index))
    for key, answer in ANSWERS.items():
        bind(key, partial(on_answer, *answer), on_empty_line & Condition(is_asking))
    _bind_picker(bind, picker, on_empty_line)
    return bindings


def _bind_picker(bind: Bind, picker: ReplyPicker, when: Filter) -> None:
    """Keys that pick one of several replies. They go before those that mean something else in a line."""
    picking = when & Condition(lambda: picker.is_open)
    bind("left", lambda: picker.move(-1), picking)
    bind("right", lambda: picker.move(1), picking)
    bind("enter", picker.take, picking)
    for number in range(10):
        bind(str(number), partial(picker.pick, number), when & Condition(partial(picker.offers, number)))
