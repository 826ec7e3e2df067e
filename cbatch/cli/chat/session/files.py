"""Files that a person names: from what is typed to a path, and from that to its text."""

from __future__ import annotations

from pathlib import Path

from cbatch.cli.common.exits import UserError

MAX_BYTES = 16 * 2**20


def as_path(text: str) -> Path:
    """A path as a person types it. Raises UserError where it can be none."""
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(f"There is no such user: {text}.") from error
    if "\0" in text:
        raise UserError("A file name cannot hold a null character.")
    return path


def read_text(path: Path, limit: int = MAX_BYTES) -> str:
    """The text of a file of at most `limit` bytes. Raises UserError where it is none, or too long."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise UserError(f"Cannot read {path}: it is no file.")
        with path.open("rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise UserError(f"{path} is longer than {limit >> 20} MiB.")
        return data.decode()
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start + 1}).") from error
