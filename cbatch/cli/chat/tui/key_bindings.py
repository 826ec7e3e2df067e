"""Key bindings of the chat. All other keys work as in Emacs, which is the default of prompt_toolkit."""

from __future__ import annotations

from typing import Protocol

from prompt_toolkit.filters import Condition, has_focus, is_searching
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent, merge_key_bindings
from prompt_toolkit.key_binding.key_bindings import KeyBindingsBase
from prompt_toolkit.widgets import TextArea

from cbatch.cli.chat.commands.registry import CommandUI


class KeyTarget(CommandUI, Protocol):
    """What keys act on."""

    input: TextArea

    def on_ctrl_c(self) -> None: ...

    def scroll(self, pages: int) -> None: ...

    def switch_by(self, offset: int) -> None: ...

    def switch_to(self, index: int) -> None: ...


def make_key_bindings(terminal: KeyTarget) -> KeyBindingsBase:
    """The chat's own bindings, which go before those of the library."""
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
    """Keys that scroll or switch sessions."""
    keys = KeyBindings()

    for key, pages in (("pageup", -1), ("pagedown", 1)):

        @keys.add(key)
        def _(event: KeyPressEvent, pages: int = pages) -> None:
            terminal.scroll(pages)

    for key, offset in (("c-left", -1), ("c-right", 1)):

        @keys.add(key)
        def _(event: KeyPressEvent, offset: int = offset) -> None:
            terminal.switch_by(offset)

    for index in range(9):

        @keys.add("escape", str(index + 1))
        def _(event: KeyPressEvent, index: int = index) -> None:
            terminal.switch_to(index)

    return keys
