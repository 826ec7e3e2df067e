"""Files that the user names, and files that only the user may read."""

from __future__ import annotations

import glob
import os
import re
import shlex
import tempfile
from contextlib import suppress
from pathlib import Path

from cbatch.base.errors import os_errors_as
from cbatch.cli.common.exits import UserError

MAX_BYTES = 16 * 2**20


def as_path(text: str) -> Path:
    """Expands `~`. Raises UserError if the text cannot be a path."""
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(f"There is no such user: {text}.") from error
    if "\0" in text:
        raise UserError("A file name cannot contain a null character.")
    return path


def split_names(text: str) -> list[str]:
    """File names as a shell reads them: blanks separate them unless they are quoted or follow a backslash."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{text}: {str(error).lower()}.") from error


def one_name(text: str) -> str:
    """One file name, which may have blanks, quoted or not."""
    if not any(mark in text for mark in "\\'\"") or is_file(text):
        return text
    with suppress(UserError):  # what cannot be split is a name as it stands
        names = split_names(text)
        return names[0] if len(names) == 1 else text
    return text


def is_file(name: str) -> bool:
    """Whether there is a file of this name; a text that cannot be a name is none."""
    try:
        return as_path(name).is_file()
    except (UserError, OSError, ValueError):
        return False


def quoted(name: str) -> str:
    """A file name as it is typed: a backslash before what would end it."""
    return re.sub(r"([\s\\'\"*?\[])", r"\\\1", name)


def expand_names(text: str) -> list[Path]:
    """The files that were named, with `~`, `*`, `?` and `**` expanded. Raises UserError if a pattern fits none."""
    found: list[Path] = []
    for name in [text] if is_file(text) else split_names(text):
        path = as_path(name)
        if is_file(name) or not glob.has_magic(name):
            found.append(path)
            continue
        names = glob.glob(str(path), recursive=True)  # noqa: PTH207  (Path.glob takes no absolute patterns)
        matches = sorted(match for match in map(Path, names) if match.is_file())
        if not matches:
            raise UserError(f"No file matches {name}.")
        found += matches
    return found


def read_text(path: Path, limit: int = MAX_BYTES) -> str:
    """Reads a UTF-8 file of at most `limit` bytes. Raises UserError if that is not possible."""
    with os_errors_as(UserError, f"Cannot read {path}"):
        if path.exists() and not path.is_file():  # a pipe could block for ever
            raise UserError(f"Cannot read {path}: it is not a regular file.")
        with path.open("rb") as file:
            data = file.read(limit + 1)
    if len(data) > limit:
        raise UserError(f"{path} is longer than {limit >> 20} MiB.")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start + 1}).") from error


def make_private(folder: Path) -> None:
    """Makes a folder that only its owner can look into (0700)."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)


def write_private(path: Path, text: str) -> None:
    """Writes or replaces a file (0600) atomically; a power failure leaves the old one or the new one."""
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
