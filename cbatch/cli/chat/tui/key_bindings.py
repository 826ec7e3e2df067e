"""Which key does what; all others are those of an Emacs-like line editor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from prompt_toolkit.filters import Condition, has_focus, is_searching
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent, merge_key_bindings
from prompt_toolkit.key_binding.key_bindings import KeyBindingsBase
from prompt_toolkit.widgets import TextArea


class KeyTarget(Protocol):
    """What keys act upon."""

    input: TextArea

    def on_ctrl_c(self) -> None: ...

    def exit(self) -> None: ...

    def set_input(self, text: str) -> None: ...

    def open_editor(self, text: str, then: Callable[[str], None]) -> None: ...

    def scroll(self, pages: int) -> None: ...

    def switch_by(self, places: int) -> None: ...

    def switch_to(self, place: int) -> None: ...


def make_key_bindings(terminal: KeyTarget) -> KeyBindingsBase:
    """The bindings of a chat, which go before those of the library."""
    keys = KeyBindings()
    buffer = terminal.input.buffer
    typing = has_focus(terminal.input)

    @Condition
    def is_empty() -> bool:
        return not buffer.text

    @keys.add("enter", filter=typing)
    def _(event: KeyPressEvent) -> None:
        if buffer.complete_state and buffer.complete_state.current_completion:
            buffer.complete_state = None
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=typing)
    def _(event: KeyPressEvent) -> None:
        buffer.insert_text("\n")

    @keys.add("c-c", filter=~is_searching)
    def _(event: KeyPressEvent) -> None:
        terminal.on_ctrl_c()

    @keys.add("c-d", filter=typing & is_empty)
    def _(event: KeyPressEvent) -> None:
        terminal.exit()

    @keys.add("c-z")
    def _(event: KeyPressEvent) -> None:
        event.app.suspend_to_background()

    @keys.add("c-x", "c-e", filter=typing)
    def _(event: KeyPressEvent) -> None:
        terminal.open_editor(buffer.text, terminal.set_input)

    return merge_key_bindings([keys, _navigation_bindings(terminal)])


def _navigation_bindings(terminal: KeyTarget) -> KeyBindings:
    """To other sessions, and up and down in this one."""
    keys = KeyBindings()

    for key, pages in (("pageup", -1), ("pagedown", 1)):

        @keys.add(key)
        def _(event: KeyPressEvent, pages: int = pages) -> None:
            terminal.scroll(pages)

    for key, places in (("c-left", -1), ("c-right", 1)):

        @keys.add(key)
        def _(event: KeyPressEvent, places: int = places) -> None:
            terminal.switch_by(places)

    for number in range(9):

        @keys.add("escape", str(number + 1))
        def _(event: KeyPressEvent, number: int = number) -> None:
            terminal.switch_to(number)

    return keys
