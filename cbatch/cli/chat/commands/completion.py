"""What Tab completes: commands, and the names, parameters and files they take."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from cbatch.cli.chat.commands.parameters import SETTABLE
from cbatch.cli.chat.commands.registry import COMMANDS, ArgumentKind
from cbatch.cli.chat.controller import ChatController
from cbatch.cli.chat.session.files import quoted
from cbatch.cli.chat.session.store import SessionStore
from cbatch.cli.common.console import safe
from cbatch.cli.common.local_models import local_models

_LAST_NAME = re.compile(r"""(?:\\.|'[^']*'?|"[^"]*"?|[^\s\\'"])*\\?$""")
"""What a shell would take as the last, unfinished word."""

_ESCAPED = re.compile(r"\\(.)")


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
            yield from self._arguments(COMMANDS[name].argument, rest, complete_event)

    def _arguments(self, kind: ArgumentKind, rest: str, complete_event: CompleteEvent) -> Iterable[Completion]:
        if kind in ("file", "files"):
            last = _LAST_NAME.search(rest)
            whole = list(self._files(rest, complete_event))  # a name with blanks that are not marked, or the only one
            yield from whole or self._files(last[0] if last else "", complete_event)
            return
        before, _, word = rest.lstrip().rpartition(" ")
        if not before or kind == "session" or (kind == "parameter" and before.strip() == "all"):
            yield from (Completion(each, -len(word)) for each in self._names(kind) if each.startswith(word))

    def _files(self, typed: str, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Files whose names begin as the last one that was typed, with a backslash before each blank."""
        name = _ESCAPED.sub(r"\1", typed).lstrip("'\"")
        for found in self._paths.get_completions(Document(name), complete_event):
            if found.text.isprintable() and safe(found.text) == found.text:
                whole = name + found.text
                end = "/" if Path(whole).expanduser().is_dir() else ""
                yield Completion(quoted(whole) + end, -len(typed), display=found.display)

    def _names(self, kind: ArgumentKind) -> list[str]:
        if kind == "session":
            return [session.name for session in self._controller.sessions]
        if kind == "saved":
            return self._store.saved_names()
        if kind == "model":
            names = (model.name for model in local_models())
            return list(dict.fromkeys([*self._controller.models.names[1:], *names]))
        return {"parameter": ["all", *SETTABLE], "command": [*COMMANDS, "keys"]}.get(kind, [])
