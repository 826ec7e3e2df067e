"""The user's input: a line with history, completion and folded pastes, and an editor of the user's own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from prompt_toolkit.application import get_app
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.completion import Completer
from prompt_toolkit.document import Document
from prompt_toolkit.history import History
from prompt_toolkit.layout.dimension import Dimension
from prompt_toolkit.widgets import SearchToolbar, TextArea

from cbatch.cli.chat.controller import ChatController
from cbatch.cli.chat.session.session import is_long_paste
from cbatch.cli.common.console import safe
from cbatch.cli.common.exits import UserError


class InputLine(TextArea):
    """The input line, which belongs to the current session. `on_enter` gets each text that is sent."""

    def __init__(
        self, controller: ChatController, history: History, completer: Completer, on_enter: Callable[[str], None]
    ) -> None:
        self._controller, self._on_enter = controller, on_enter
        self.search = SearchToolbar()
        super().__init__(
            multiline=True,
            wrap_lines=True,
            height=Dimension(min=1, max=8),
            dont_extend_height=True,
            prompt=lambda: [("class:prompt", f"{safe(controller.current.name)}> ")],
            history=history,
            auto_suggest=AutoSuggestFromHistory(),
            completer=completer,
            complete_while_typing=False,
            search_field=self.search,
        )
        self.buffer.on_text_changed += lambda _: self._keep_draft()

    def put(self, text: str) -> None:
        """Replaces the text; the cursor goes to its end."""
        text = safe(text)
        self.buffer.set_document(Document(text, len(text)), bypass_readonly=True)

    def clear(self) -> None:
        self.buffer.reset()
        self._keep_draft()

    def _keep_draft(self) -> None:
        """Text that is typed belongs to the session: it stays there, and comes back with it."""
        self._controller.current.draft = self.text

    def enter(self) -> None:
        """Takes the entry of an open menu; after a backslash begins a new line; else sends the text."""
        state = self.buffer.complete_state
        if state is not None and state.current_completion is not None:
            self.buffer.complete_state = None
        elif self.buffer.document.text_before_cursor.endswith("\\"):
            self.buffer.delete_before_cursor()
            self.buffer.insert_text("\n")
        else:
            text = self.buffer.text
            if text.strip():
                self.buffer.history.append_string(self._controller.current.unfold(text))
            get_app().vi_state.reset()  # each line begins in the insert mode
            self.clear()  # first, because what is sent may put something else here
            self._on_enter(text.encode("utf-8", "replace").decode())

    def paste(self, text: str) -> None:
        text = text.encode("utf-8", "replace").decode().replace("\r\n", "\n").replace("\r", "\n")
        self.buffer.insert_text(self._controller.fold_paste(text) if is_long_paste(text) else text)


class Editor:
    """Runs one editor at a time: `process`. `edit` blocks, so it is called on a thread of its own."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def edit(self, text: str, terminal: TextIO) -> str:
        """Returns the text after the user edited it in $VISUAL or $EDITOR. Raises UserError if the editor fails."""
        name = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
        try:
            command = shlex.split(name)
            with tempfile.TemporaryDirectory(prefix="cbatch-") as folder:  # 0700
                path = Path(folder, "message.md")
                path.write_text(text, encoding="utf-8", errors="replace")
                self.process = subprocess.Popen([*command, path], stdin=sys.stdin, stdout=terminal, stderr=terminal)
                code = self.process.wait()
                self.process = None
                if code != 0:
                    raise UserError(f"The editor {command[0]} ended with an error; nothing was changed.")
                return path.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"Cannot open the editor {name}: {error.strerror}; set $EDITOR to another one.") from error
        except UnicodeDecodeError as error:
            raise UserError(f"The editor {name} did not leave UTF-8 text; nothing was changed.") from error
        except ValueError as error:
            raise UserError(f"$EDITOR is not a command: {error}.") from error
