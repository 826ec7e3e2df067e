"""What a chat keeps on disk: sessions and the history of what was typed, for their user alone."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prompt_toolkit.history import History

from cbatch.cli.chat.session.files import as_path
from cbatch.cli.chat.session.session import Session
from cbatch.cli.chat.session.session_file import read_session, to_json
from cbatch.cli.common.console import safe
from cbatch.cli.common.exits import UserError

HISTORY_BYTES = 2**20
"""How much of the history's end is read."""

_NAME = re.compile(r"[\w][\w .+@-]{0,99}")


def default_folder() -> Path:
    """$XDG_STATE_HOME/cbatch, by default ~/.local/state/cbatch."""
    base = os.environ.get("XDG_STATE_HOME")
    return Path(base if base and Path(base).is_absolute() else Path.home() / ".local" / "state") / "cbatch"


@dataclass(frozen=True, slots=True)
class SavedSession:
    """A session on disk, as a list of them shows it."""

    path: Path
    name: str
    when: float
    turns: int
    preview: str


class SessionStore:
    """A folder (0700) with sessions and a history (0600 each). Nothing is made before something is written.

    trouble: why the last session that was to be kept could not be; empty where it could
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.save_error = ""
        self._stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self._paths: dict[int, Path] = {}
        self._written: set[Path] = set()
        self._known_versions: dict[Path, tuple[int, int] | None] = {}
        self._writer = ThreadPoolExecutor(1, "cbatch-store")

    @property
    def sessions_folder(self) -> Path:
        return self.folder / "sessions"

    @property
    def history_path(self) -> Path:
        return self.folder / "history.jsonl"

    @property
    def num_written(self) -> int:
        """How many sessions have been written."""
        return len(self._written)

    def path_of(self, name: str) -> Path:
        """Where a session is saved under this name; a name with a slash or a suffix is a path.

        Raises UserError for a name that cannot be one of a file.
        """
        if "/" in name or name.endswith(".json"):
            return as_path(name).resolve()
        if not _NAME.fullmatch(name):
            raise UserError(f"{name!r} cannot be a name: letters, digits, blanks and .+@-_ can.")
        return self.sessions_folder.resolve() / f"{name}.json"

    def saved_path(self, session: Session) -> Path | None:
        """The file that a session is written to, once it has one."""
        return self._paths.get(session.number)

    def set_path(self, session: Session, path: Path) -> None:
        """From now on a session is written to this file, from which it was read."""
        self._paths[session.number] = path
        self._known_versions[path] = _file_version(path)

    def save_as(self, session: Session, name: str) -> Path:
        """Writes a session under a name, and from now on there. Raises UserError where that cannot be done."""
        path, before = self.path_of(name), self.saved_path(session)
        self.wait()
        try:
            if path.exists() and path != before:
                raise UserError(f"{path} exists already; choose another name: /save NAME.")
            self._write(path, to_json(session))
        except OSError as error:
            raise UserError(f"Cannot write {path}: {error.strerror}.") from error
        if before is not None and before != path and before.name.startswith(self._stamp):
            before.unlink(missing_ok=True)
            self._written.discard(before)
        self._paths[session.number] = path
        return path

    def save_later(self, session: Session) -> None:
        """Has a session written as it is now, soon, to where it was written before; see `save_error`."""
        own = self.sessions_folder.resolve() / f"{self._stamp}-{session.number}.json"
        path = self._paths.setdefault(session.number, own)
        self._writer.submit(self._try_to_write, session.number, path, own, to_json(session))

    def wait(self) -> None:
        """Until what was to be written is."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Waits until everything is written."""
        self._writer.shutdown()

    def saved(self) -> list[SavedSession]:
        """The sessions in the folder, newest first; what cannot be read, or holds nothing, is left out."""
        found = []
        for path in self.sessions_folder.glob("*.json"):
            with suppress(OSError, UserError):
                session = read_session(path)
                turns = session.turns
                preview = " ".join(turns[0].text.split())[:60] if turns else ""
                found.append(SavedSession(path.resolve(), session.name, path.stat().st_mtime, len(turns), preview))
        return sorted((saved for saved in found if saved.turns), key=lambda saved: -saved.when)

    def names(self) -> list[str]:
        """What sessions in the folder can be loaded by."""
        return sorted(path.stem for path in self.sessions_folder.glob("*.json"))

    def _try_to_write(self, number: int, path: Path, own: Path, fields: dict[str, Any]) -> None:
        try:
            if _file_version(path) != self._known_versions.get(path):
                self.save_error = f"Another chat has written {path}; from here on this session is kept as {own.stem}."
                self._paths[number] = path = own
            elif not self.save_error.startswith("Another"):
                self.save_error = ""
            self._write(path, fields)
        except OSError as error:
            self.save_error = f"This session cannot be kept: {path}: {error.strerror}."

    def _write(self, path: Path, fields: dict[str, Any]) -> None:
        if path.parent == self.sessions_folder.resolve():
            make_private(self.folder)
            make_private(path.parent)
        write_private(path, json.dumps(fields, ensure_ascii=False, indent=1))
        self._known_versions[path] = _file_version(path)
        (self._written.add if fields["turns"] else self._written.discard)(path)


class InputHistory(History):
    """What was typed, one JSON string a line; several chats may append to it at the same time."""

    def __init__(self, store: SessionStore) -> None:
        super().__init__()
        self._store = store

    def load_history_strings(self) -> Iterable[str]:
        """Newest first."""
        try:
            with self._store.history_path.open("rb") as file:
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
        with suppress(OSError):  # a full disk must not take the line from its user
            make_private(self._store.folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            fd = os.open(self._store.history_path, flags, 0o600)
            try:
                os.fchmod(fd, 0o600)
                os.write(fd, json.dumps(string).encode() + b"\n")
            finally:
                os.close(fd)


def _file_version(path: Path) -> tuple[int, int] | None:
    """By which it is seen that somebody else has written a file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def make_private(folder: Path) -> None:
    """Makes a folder that its owner alone can look into."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)


def write_private(path: Path, text: str) -> None:
    """Puts a file (0600) in the place of another, whole or not at all, also where the power fails."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")  # made 0600
    try:
        with os.fdopen(fd, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
