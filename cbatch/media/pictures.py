"""Pictures that rows bring along: where each comes from, and the bytes of its file."""

from __future__ import annotations

import binascii
import hashlib
import os
import stat
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from cbatch.base.errors import RequestError, in_short, invalid_row, reason_of

MAX_BYTES = 64 * 2**20
"""Largest file of a picture."""

FETCH_SECONDS = 60
"""How long a web server may take for a picture."""

MAX_NAME = 255
"""Bytes of the longest name of a file. Longer text without a dot is base64."""

_SHOWN = 60
"""Characters of a path or URL that are part of messages."""

_O_PATH = getattr(os, "O_PATH", os.O_RDONLY)
"""Opens a folder that may be passed through, but not listed."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that is not decoded.

    source: a path without links, or the bytes of the file
    name:   for messages: `image 2 of message 1 (photos/cat.png)`
    """

    source: Path | bytes = field(repr=False)
    name: str

    def read(self) -> bytes:
        """The bytes of the file. Raises RequestError unless it is a regular file of at most MAX_BYTES."""
        try:
            return self.source if isinstance(self.source, bytes) else _read(self.source)
        except OSError as error:
            raise self.invalid(f"cannot be read: {reason_of(error)}") from error

    def digest(self) -> str:
        """A hash of the bytes. A file is read again if it has changed since. Raises RequestError as `read` does."""
        if isinstance(self.source, bytes):
            return _hash(self.source)
        try:
            status = self.source.stat()
            return _digest(self.source, (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        except OSError as error:
            raise self.invalid(f"cannot be read: {reason_of(error)}") from error

    def invalid(self, problem: str) -> RequestError:
        return invalid_row(f"{self.name} {problem}")


@dataclass(frozen=True, slots=True)
class MediaSources:
    """Where pictures may come from.

    root:         folder below which their files must lie when all links are followed
    allow_remote: whether they are fetched from web servers
    """

    root: str = "."
    allow_remote: bool = False

    def picture(self, given: str | Mapping[str, Any], place: str) -> Picture:
        """The picture that a row gives. A file is not opened yet.

        given: a path, a URL, the file as base64, or `{"bytes": ..., "path": ...}` with base64, as `datasets` has it
        place: where it stands, for messages: `image 2 of message 1`

        Raises RequestError for what names no picture, or one that may not be used.
        """
        data, text = (given.get("bytes"), given.get("path")) if isinstance(given, Mapping) else (None, given)
        if not isinstance(data, str | None) or not isinstance(text, str | None) or not (data or text):
            raise invalid_row(f"{place} must have a path, a URL or base64")
        shown = text.partition(",")[0] if text and text[:5].lower() == "data:" else text or ""
        is_base64 = data is None and len(shown) > MAX_NAME and not set(shown) & set(".:")
        shown = "" if is_base64 else "".join(filter(str.isprintable, shown))
        shown = shown if len(shown) <= _SHOWN else "…" + shown[-_SHOWN:]
        name = f"{place} ({shown})" if shown else place
        if data is not None or is_base64:
            return Picture(_decoded(data or text or "", name), name)
        assert text is not None
        match text.partition(":")[0].lower():
            case "data":
                head, _, data = text.partition(",")
                if not head.lower().startswith("data:image/") or not head.lower().endswith(";base64"):
                    raise invalid_row(f"{name} must begin with data:image/ and its kind, and then ;base64,")
                return Picture(_decoded(data, name), name)
            case "http" | "https" if "://" in text:
                if not self.allow_remote:
                    raise invalid_row(f"{name} lies on a web server, from which --allow-remote-media fetches images")
                return Picture(_fetched(text, name), name)
            case "file":
                url = urlsplit(text)
                if url.netloc not in ("", "localhost") or url.query or url.fragment:
                    raise invalid_row(f"{name} must be file:/// and a path, with # as %23 and ? as %3F")
                text = os.fsdecode(unquote_to_bytes(url.path))
            case scheme if text[len(scheme) :].startswith("://"):
                raise invalid_row(f"{name} has a URL of an unknown kind; there are file:, data:, http: and https:")
        root = os.path.realpath(self.root)
        try:
            path = Path(os.path.realpath(os.path.join(root, text)))  # noqa: PTH118 (a path of bytes that are no text)
        except ValueError as error:
            raise invalid_row(f"{name} is no path: {error}") from error
        if not path.is_relative_to(root):
            raise invalid_row(f"{name} lies outside of the folder of images, which --media-root names")
        return Picture(path, name)


def _decoded(text: str, name: str) -> bytes:
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise invalid_row(f"{name} is not base64: {error}") from error
    return _bounded(data, name)


def _bounded(data: bytes, name: str) -> bytes:
    if len(data) > MAX_BYTES:
        raise invalid_row(f"{name} cannot be read: {_TOO_LARGE}")
    return data


_TOO_LARGE = f"it is larger than {MAX_BYTES >> 20} MiB"


def _fetched(url: str, name: str) -> bytes:
    """What a web server has. Raises RequestError."""
    fsspec, aiohttp = import_module("fsspec"), import_module("aiohttp")
    timeout = aiohttp.ClientTimeout(total=FETCH_SECONDS)
    data = bytearray()
    try:
        with fsspec.open(url, block_size=0, client_kwargs={"timeout": timeout}) as file:
            while len(data) <= MAX_BYTES and (more := file.read(2**20)):
                data += more
    except Exception as error:  # of a server, of a library, and of what is no URL
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else in_short(error)
        raise invalid_row(f"{name} cannot be fetched: {reason}") from error
    return _bounded(bytes(data), name)


def _read(path: Path) -> bytes:
    """The bytes of a regular file. Raises OSError, also if a link has come into the path since it was resolved."""
    with ExitStack() as opened:

        def enter(name: str, flags: int, folder: int | None = None) -> int:
            descriptor = os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder)
            opened.callback(os.close, descriptor)
            return descriptor

        folder = enter(path.anchor, _O_PATH | os.O_DIRECTORY)
        for part in path.parts[1:-1]:
            folder = enter(part, _O_PATH | os.O_DIRECTORY, folder)
        descriptor = enter(path.name or ".", os.O_RDONLY | os.O_NONBLOCK, folder)  # else a pipe would be waited for
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a file")
        file = opened.enter_context(os.fdopen(descriptor, "rb", closefd=False))
        data = file.read(MAX_BYTES + 1) if status.st_size <= MAX_BYTES else b""
        if max(status.st_size, len(data)) > MAX_BYTES:
            raise OSError(_TOO_LARGE)
        return data


@lru_cache(maxsize=1 << 16)
def _digest(path: Path, status: tuple[int, ...]) -> str:
    """`status` tells whether the file has changed."""
    return _hash(_read(path))


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
