"""A chat's files on disk, readable for its user only: sessions, and the history of typed lines."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from functools import cache
from itertools import chain, count
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from prompt_toolkit.history import History

from cbatch.base.chat_template_options import TemplateOptions
from cbatch.base.errors import RequestError, os_errors_as
from cbatch.base.params import SamplingParams
from cbatch.base.strict_json import parse_json_object
from cbatch.cli.chat.session.files import as_path, make_private, read_text, write_private
from cbatch.cli.chat.session.session import (
    FINAL_STATES,
    Attachment,
    Reply,
    Session,
    ToolRound,
    ToolUse,
    Turn,
    pastes_in,
)
from cbatch.cli.common.console import safe
from cbatch.cli.common.exits import UserError

VERSION = 1
MAX_BYTES = 256 * 2**20


def _keys(names: str, **renamed: str) -> dict[str, str]:
    return {name: name for name in names.split()} | renamed


SAVED: dict[type, dict[str, str]] = {
    Attachment: _keys("name text is_paste digest kind"),
    ToolUse: _keys("name arguments result"),
    ToolRound: _keys("text", uses="calls"),
    Reply: _keys("text reasoning raw seed params error code remark rounds label model prompt_tokens num_tokens state"),
    Turn: _keys("chosen", text="user", attachments="attached", replies="answers"),
    Session: _keys("name system params model seed template_kwargs draft pastes attached dropped attempts turns"),
}
"""The fields of each record that are saved, and their keys in the file."""

_hints = cache(get_type_hints)


def to_json(session: Session) -> dict[str, Any]:
    """A session as it is saved: what is still to come counts as stopped."""
    made = deepcopy(session)
    made.finish()
    made.pastes = pastes_in(made.draft, made.pastes)
    return {"cbatch_session": VERSION, **_to_json(made)}


def _to_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_json(one) for one in value]
    keys = SAVED.get(type(value))
    return value if keys is None else {key: _to_json(getattr(value, name)) for name, key in keys.items()}


def read_session(path: Path) -> Session:
    """Reads a file that `SessionStore` wrote. Raises UserError that says what is wrong with the file."""
    try:
        fields = parse_json_object(read_text(path, MAX_BYTES), str(path), "a saved session")
    except RequestError as error:
        raise UserError(f"{error}.") from error
    if fields.get("cbatch_session") != VERSION:
        raise UserError(f"{path} is not a session saved by this version.")
    if fields.get("prelude"):  # which would be left out without a word
        raise UserError(f"{path} was opened from a row of a batch by an older version; this one cannot read it.")
    try:
        return _session(fields)
    except RequestError as error:
        raise UserError(f"{path}: {error}") from error
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(f"{path} is damaged: {error!r}.") from error


def _session(fields: dict[str, Any]) -> Session:
    turns: list[Turn] = _from_json(list[Turn], fields.pop("turns"))
    session: Session = _from_json(Session, fields)
    replies = [reply for turn in turns for reply in turn.replies]
    for params in (session.params, *(reply.params for reply in replies)):
        SamplingParams().merged(params)
        if "seed" in params:  # it is stored apart
            raise TypeError("params has a seed")
    for reply in replies:
        if reply.state not in FINAL_STATES:
            raise TypeError(f"state {reply.state!r}")
        for use in reply.uses:
            use.state = "done"
    for turn in turns:
        if not 0 <= turn.chosen < max(len(turn.replies), 1):
            raise IndexError(f"answer {turn.chosen} of {len(turn.replies)}")
    session.items += turns
    session.template_kwargs = dict(TemplateOptions(kwargs=session.template_kwargs).kwargs)
    session.attempts %= 2**32
    session.dropped = max(0, min(session.dropped, len(turns)))
    return session


def _from_json(kind: Any, value: Any) -> Any:
    """A value of a file as an object of a type. Fields that are not there have their defaults.

    Raises TypeError if it has another type.
    """
    if kind in SAVED:
        hints, keys = _hints(kind), SAVED[kind]
        given: dict[str, Any] = _from_json(dict, value)
        return kind(**{name: _from_json(hints[name], given[key]) for name, key in keys.items() if key in given})
    origin, parts = get_origin(kind), get_args(kind)
    if origin is list:
        return [_from_json(parts[0], one) for one in _from_json(list, value)]
    if not isinstance(value, {Literal: str, UnionType: kind}.get(origin, origin or kind)) or (
        isinstance(value, bool) and kind is not bool
    ):
        raise TypeError(f"{str(value)[:40]!r} has the wrong type")
    return value


HISTORY_BYTES = 2**20
"""The history is read from its end, at most so far back."""

_AUTOMATIC = re.compile(r"\d{8}-\d{6}(-\d+){2,3}")
"""The file of a session that nobody has named."""

_NAME = re.compile(r"[\w][\w .+@-]{0,99}")


def has_own_name(path: Path | None) -> bool:
    """Whether the user has named the file of a session."""
    return path is not None and not _AUTOMATIC.fullmatch(path.stem)


class SessionStore:
    """A folder (0700) with sessions and a history (0600 each), which is made when something is first written.

    A session is saved to a file of its own until it gets a name by `save_as`.

    save_error: why a session could not be saved, or is saved elsewhere; else empty
    written:    files of the sessions that were saved
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.sessions_folder = folder, Path(os.path.realpath(folder / "sessions"))
        self.save_error = ""
        self._run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self._has_conflict = False
        self.written: set[Path] = set()
        self._known_versions: dict[Path, tuple[int, int] | None] = {}
        self._writer = ThreadPoolExecutor(1, "cbatch-store")

    def path_of(self, name: str) -> Path:
        """Where a session is saved under this name, or a path. Raises UserError if it cannot be the name of a file."""
        if _is_path(name):
            return as_path(name).resolve()
        if not _NAME.fullmatch(name):
            raise UserError(f"{name!r} cannot be a name; use letters, digits, blanks and .+@-_ only.")
        return (self.sessions_folder / f"{name}.json").resolve()

    def open(self, path: Path) -> Session:
        """Reads a session, which will be saved to the same file. Raises UserError as `read_session` does."""
        self.wait()
        session = read_session(path)
        session.path, self._known_versions[path] = path, _file_version(path)
        return session

    def save_as(self, session: Session, name: str) -> Path:
        """Saves a session under a name, now and from now on. Raises UserError if that is not possible."""
        path, before = self.path_of(name), session.path
        self.wait()
        with os_errors_as(UserError, f"Cannot write {path}"):
            if path.exists() and path != before:
                raise UserError(f"{path} exists already; choose another name: /save NAME.")
            if path == before and path.exists() and _file_version(path) != self._known_versions.get(path):
                raise UserError(f"Another chat has changed {path}; choose another name: /save NAME.")
            self._write(path, to_json(session))
        if before is not None and before != path and before.name.startswith(self._run_id):
            before.unlink(missing_ok=True)
            self.written.discard(before)
        session.path = path
        return path

    def save_later(self, session: Session) -> None:
        """Has a session saved soon, as it is now, to the file it has. What goes wrong is told by `save_error`."""
        own = self.sessions_folder / f"{self._run_id}-{session.number}.json"
        session.path = session.path or own
        self._writer.submit(self._try_to_write, session, own, to_json(session))

    def wait(self) -> None:
        """Waits until everything submitted so far is written."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Writes what is left, then stops the writer."""
        self._writer.shutdown()

    def files(self) -> list[Path]:
        """Those of the sessions in the folder, newest first."""
        return sorted(self.sessions_folder.glob("*.json"), key=modified_at, reverse=True)

    def saved_sessions(self, text: str = "") -> Iterator[Session]:
        """The sessions in the folder that hold a text, newest first, without empty ones and damaged files.

        They are read one by one, so that the first ones come at once. One whose file was named has that name.
        """
        for path in self.files():
            with suppress(OSError, UserError):
                session = read_session(path)
                replies = (reply.text for turn in session.turns for reply in turn.replies)
                texts = [session.name, *(turn.text for turn in session.turns), *replies]
                if session.turns and text.casefold() in "\n".join(texts).casefold():
                    session.path = path.resolve()
                    session.name = path.stem if has_own_name(path) else session.name
                    yield session

    def lookup(self, name: str) -> Path | None:
        """The file of a session by its path or its name: the newest one of that name. None if there is none.

        Raises UserError if the file cannot be looked at.
        """
        # What cannot be a file may still be a session's name.
        with os_errors_as(UserError, f"Cannot read {name[:80]}"), suppress(UserError):
            if (path := self.path_of(name)).exists():
                return path
        named = (saved.path for saved in self.saved_sessions() if saved.name == name)
        return next(named, self.path_of(name) if _is_path(name) else None)  # reading it says what is wrong

    def delete(self, path: Path) -> None:
        """Removes a saved session. Raises UserError if that is not possible."""
        self.wait()
        with os_errors_as(UserError, f"Cannot delete {path}"):
            path.unlink()
        self.written.discard(path)

    def _try_to_write(self, session: Session, own: Path, fields: dict[str, Any]) -> None:
        path = session.path or own  # where the save before this one may have moved it
        try:
            if _file_version(path) != self._known_versions.get(path):
                numbered = (own.with_stem(f"{own.stem}-{number}") for number in count(2))
                session.path = own = next(free for free in chain([own], numbered) if not free.exists())
                self.save_error = f"Another chat has changed {path}; this session is saved as {own.stem} from now on."
                self._has_conflict, path = True, own
            elif not self._has_conflict:
                self.save_error = ""
            self._write(path, fields)
        except OSError as error:
            self._has_conflict = False
            self.save_error = f"This session cannot be saved: {path}: {error.strerror}."

    def _write(self, path: Path, fields: dict[str, Any]) -> None:
        if path.parent == self.sessions_folder:
            make_private(self.folder)
            make_private(path.parent)
        text = json.dumps(fields, ensure_ascii=False, indent=1)
        try:
            is_saved = path.read_text(encoding="utf-8") == text
        except (OSError, UnicodeDecodeError):
            is_saved = False
        if not is_saved:  # a session that nobody has touched keeps its time
            write_private(path, text)
        self._known_versions[path] = _file_version(path)
        (self.written.add if fields["turns"] else self.written.discard)(path)


class InputHistory(History):
    """Typed lines, one JSON string per line. Several chats may append at the same time."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._path = folder / "history.jsonl"

    def load_history_strings(self) -> Iterable[str]:
        """The lines, newest first."""
        try:
            with self._path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - HISTORY_BYTES))
                lines = file.read().splitlines()
        except OSError:
            return
        for line in reversed(lines):
            with suppress(ValueError, RecursionError):
                text = json.loads(line)
                if isinstance(text, str):
                    yield safe(text)

    def store_string(self, string: str) -> None:
        with suppress(OSError):  # a full disk must not cost the user what was typed
            make_private(self._path.parent)
            self._path.touch(0o600)
            self._path.chmod(0o600)
            with self._path.open("ab", 0) as file:  # unbuffered: the line of each chat stays whole
                file.write(json.dumps(string).encode() + b"\n")


def modified_at(path: Path) -> float:
    """Seconds since the epoch; 0 if somebody has just deleted the file."""
    version = _file_version(path)
    return version[1] / 1e9 if version is not None else 0.0


def _is_path(text: str) -> bool:
    """Whether a text names a file, and not a session in the store's folder."""
    return "/" in text or text.endswith(".json")


def _file_version(path: Path) -> tuple[int, int] | None:
    """Tells whether another process has written the file since; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
