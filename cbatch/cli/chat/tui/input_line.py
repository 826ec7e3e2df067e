"""The line that the user types into: editing, history, completion, and long pastes, which are folded."""

from __future__ import annotations

from collections.abc import Callable

from prompt_toolkit.application import get_app
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.completion import Completer
from prompt_toolkit.document import Document
from prompt_toolkit.history import History
from prompt_toolkit.layout.dimension import Dimension
from prompt_toolkit.widgets import SearchToolbar, TextArea

from cbatch.cli.chat.session.attachment import is_long_paste
from cbatch.cli.common.console import safe


class InputLine:
    """Wraps the library's text area. `on_enter` gets each line that is sent."""

    def __init__(
        self,
        prompt: Callable[[], str],
        history: History,
        completer: Completer,
        *,
        on_enter: Callable[[str], None],
        fold_paste: Callable[[str], str],
        unfold: Callable[[str], str],
    ) -> None:
        """
        prompt:     what stands before the text
        fold_paste: returns what stands for a long paste
        unfold:     puts pastes into the places of what stands for them, for the history
        """
        self._on_enter, self._fold_paste, self._unfold = on_enter, fold_paste, unfold
        self.search = SearchToolbar()
        self.area = TextArea(
            multiline=True,
            wrap_lines=True,
            height=Dimension(min=1, max=8),
            dont_extend_height=True,
            prompt=lambda: [("class:prompt", f"{safe(prompt())}> ")],
            history=history,
            auto_suggest=AutoSuggestFromHistory(),
            completer=completer,
            complete_while_typing=False,
            search_field=self.search,
        )
        self.buffer = self.area.buffer

    @property
    def text(self) -> str:
        return self.buffer.text

    @property
    def has_menu(self) -> bool:
        """Whether a menu of completions is open."""
        return self.buffer.complete_state is not None

    def set_text(self, text: str) -> None:
        """Replaces the text; the cursor goes to its end."""
        text = safe(text)
        self.buffer.set_document(Document(text, len(text)), bypass_readonly=True)

    def clear(self) -> None:
        self.buffer.reset()

    def close_menu(self) -> None:
        self.buffer.cancel_completion()

    def enter(self) -> None:
        """Takes the entry of an open menu; after a backslash begins a new line; else sends the text."""
        state = self.buffer.complete_state
        if state is not None and state.current_completion is not None:
            self.buffer.complete_state = None
        elif self.buffer.document.text_before_cursor.endswith("\\"):
            self.buffer.delete_before_cursor()
            self.new_line()
        else:
            text = self.buffer.text
            if text.strip():
                self.buffer.history.append_string(self._unfold(text))
            get_app().vi_state.reset()  # each line begins in the insert mode
            self.buffer.reset()  # first, because what is sent may put something else here
            self._on_enter(text.encode("utf-8", "replace").decode())

    def new_line(self) -> None:
        self.buffer.insert_text("\n")

    def paste(self, text: str) -> None:
        text = text.encode("utf-8", "replace").decode().replace("\r\n", "\n").replace("\r", "\n")
        self.buffer.insert_text(self._fold_paste(text) if is_long_paste(text) else text)
