"""What Tab completes: commands, and the names, parameters and files they take."""

from __future__ import annotations

from collections.abc import Iterable

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from cbatch.cli.chat.commands.registry import COMMANDS
from cbatch.cli.chat.commands.session_commands import SETTABLE
from cbatch.cli.chat.controller import ChatController
from cbatch.cli.chat.session.store import SessionStore
from cbatch.cli.common.console import safe


class CommandCompleter(Completer):
    """Completes a line that begins with a slash."""

    def __init__(self, controller: ChatController, store: SessionStore) -> None:
        self._controller, self._store = controller, store
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        name, space, rest = text[1:].partition(" ")
        if not space:
            for found in COMMANDS.values():
                if found.name.startswith(name):
                    yield Completion(found.name, -len(name), display_meta=found.description)
        elif name in COMMANDS:
            word = rest.rpartition(" ")[2]
            if COMMANDS[name].argument == "file":
                found_paths = self._paths.get_completions(Document(word), complete_event)
                yield from (path for path in found_paths if path.text.isprintable() and safe(path.text) == path.text)
            elif " " not in rest.lstrip():
                names = self._names(COMMANDS[name].argument)
                yield from (Completion(each, -len(word)) for each in names if each.startswith(word))

    def _names(self, kind: str) -> list[str]:
        if kind == "session":
            return [session.name for session in self._controller.sessions]
        if kind == "saved":
            return self._store.saved_names()
        return {"parameter": list(SETTABLE), "command": list(COMMANDS)}.get(kind, [])
