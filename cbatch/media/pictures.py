"""Pictures and videos that rows bring along: where each comes from, and the bytes of its file."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import unquote_to_bytes, urlsplit

from cbatch.base.errors import RequestError, in_short, invalid_row, reason_of
from cbatch.extras import require_package

Kind = Literal["image", "video"]
"""As parts of messages and chat templates have them."""

NO_IMAGES = "this model takes no images"
"""The reason why a picture is refused that goes to a model of text."""

MAX_BYTES = 256 * 2**20
"""Largest file of a picture or video."""

FETCH_SECONDS = 60
"""How long a web server may take for a picture."""

_BASE64 = re.compile(r"iVBORw0KGgo|R0lGOD|UklGR|/9j/|SUkqA|TU0AK|[^.:]{256,}$")
"""The beginning of an image as base64, by its format, or because no file has so long a name."""

_O_PATH = getattr(os, "O_PATH", os.O_RDONLY)
"""Opens a folder that may be passed through, but not listed."""


@dataclass(slots=True)
class Picture:
    """A picture that is not decoded.

    source: a path without links, or the bytes of the file
    name:   for messages: `image 2 of message 1 (photos/cat.png)`
    """

    kind: ClassVar[Kind] = "image"
    source: Path | bytes = field(repr=False)
    name: str
    _digest: str = field(default="", init=False, repr=False, compare=False)

    def read(self) -> bytes:
        """The bytes of the file. Raises RequestError unless it is a regular file of at most MAX_BYTES."""
        return self.source if isinstance(self.source, bytes) else self._tried(_read, self.source)

    def digest(self) -> str:
        """A hash of the bytes that it had when this was first called. Raises RequestError as `read` does."""
        if not self._digest:
            self._digest = _hash(self.source) if isinstance(self.source, bytes) else self._tried(_digest, self.source)
        return self._digest

    def unchanged(self) -> Picture:
        """The picture in memory. Raises RequestError as `read` does, and if its file has not the bytes of `digest`."""
        if isinstance(self.source, bytes):
            return self
        found = replace(self, source=self.read())
        if found.digest() != self.digest():
            raise self.invalid("has changed since it was read")
        return found

    def invalid(self, problem: str) -> RequestError:
        return invalid_row(f"{self.name} {problem}")

    def _tried(self, function: Callable[[Path], Any], path: Path) -> Any:
        try:
            return function(path)
        except (OSError, ValueError) as error:
            raise self.invalid(f"cannot be read: {reason_of(error)}") from error


@dataclass(slots=True)
class Video(Picture):
    """A video that is not decoded, or an animation.

    frames: its pictures in order, if it is given as these instead of a file
    fps:    how many of those are shown in a second
    """

    kind = "video"
    frames: Sequence[Picture] = ()
    fps: float = 2.0

    def digest(self) -> str:
        """A hash of the bytes of all frames, which differs from that of a picture."""
        digests = [one.digest() for one in self.frames] or Picture.digest(self)
        return _hash(repr((self.kind, self.fps, digests)).encode())


@dataclass(frozen=True, slots=True)
class MediaSources:
    """Where pictures may come from.

    root:         folder below which their files must lie when all links are followed
    allow_remote: whether they are fetched from web servers
    """

    root: str = "."
    allow_remote: bool = False

    def video(self, given: Any, place: str, fps: float) -> Video:
        """The video that a row gives: what `picture` takes, or a list of that, its frames. Raises as `picture` does."""
        if isinstance(given, str | Mapping):
            file = self.picture(given, place)
            return Video(file.source, file.name)
        frames = [self.picture(one, f"frame {number} of {place}") for number, one in enumerate(given, start=1)]
        return Video(b"", place, frames, fps)

    def picture(self, given: str | Mapping[str, Any], place: str) -> Picture:
        """The picture that a row gives. A file is not opened yet.

        given: a path, a URL, the file as base64, or `{"bytes": ..., "path": ...}` with base64, as `datasets` has it
        place: where it stands, for messages: `image 2 of message 1`

        Raises RequestError for what names no picture, or one that may not be used.
        """
        data, text = (given.get("bytes"), given.get("path")) if isinstance(given, Mapping) else (None, given)
        if not isinstance(data, str | None) or not isinstance(text, str | None) or not (data or text):
            raise invalid_row(f"{place} must have a path, a URL or base64")
        if data is None and is_base64(text):
            data, text = text, ""
        text = text or ""
        shown = "".join(filter(str.isprintable, text.partition(",")[0] if text[:5].lower() == "data:" else text))
        name = f"{place} ({'…' if len(shown) > 60 else ''}{shown[-60:]})" if shown else place
        try:
            return Picture(self._source(text) if data is None else _decoded(data), name)
        except ValueError as error:
            raise invalid_row(f"{name} cannot be used: {error}") from error

    def _source(self, text: str) -> Path | bytes:
        """That of a path or a URL. Raises ValueError."""
        match text.partition(":")[0].lower():
            case "data":
                head, _, data = text.partition(",")
                if not (head.lower().startswith(("data:image/", "data:video/")) and head.lower().endswith(";base64")):
                    raise ValueError("it must begin with data:image/ or data:video/, its kind and ;base64")
                return _decoded(data)
            case "http" | "https" if "://" in text:
                if not self.allow_remote:
                    raise ValueError("it lies on a web server, and --allow-remote-media is needed to fetch it")
                return _fetched(text)
            case "file":
                url = urlsplit(text)
                if url.netloc not in ("", "localhost") or url.query or url.fragment:
                    raise ValueError("it must be file:/// and a path, with # as %23 and ? as %3F")
                text = os.fsdecode(unquote_to_bytes(url.path))
            case scheme if text[len(scheme) :].startswith("://"):
                raise ValueError("there are URLs of file:, data:, http: and https:")
        root = os.path.realpath(self.root)
        path = Path(os.path.realpath(os.path.join(root, text)))  # noqa: PTH118 (a path of bytes that are no text)
        if not path.is_relative_to(root):
            raise ValueError("it lies outside of the folder of images, which --media-root names")
        return path


def is_base64(given: object) -> bool:
    """Whether the value of a column is an image as base64, and not its path or URL."""
    return isinstance(given, str) and _BASE64.match(given) is not None


def as_given(value: Any) -> Any:
    """An image of a Python program as a row gives it: base64 of bytes and of pixels, the text of a path.

    Pixels are an image of Pillow, or an array [height, width, 3] of uint8. Other values stay as they are.
    """
    if str(getattr(value, "dtype", "")) == "uint8":
        value = import_module("PIL.Image").fromarray(value)
    if hasattr(value, "getexif"):
        file = io.BytesIO()
        import_module("PIL.ImageOps").exif_transpose(value).convert("RGB").save(file, "PNG", compress_level=1)
        value = file.getvalue()
    if isinstance(value, list):  # the frames of a video
        return [as_given(one) for one in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return {"bytes": base64.b64encode(value).decode(), "path": None}
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _decoded(text: str) -> bytes:
    try:
        return _bounded(binascii.a2b_base64(text, strict_mode=True))
    except binascii.Error as error:
        raise ValueError(f"it is not base64: {error}") from error


def _bounded(data: bytes | bytearray) -> bytes:
    if len(data) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB")
    return bytes(data)


def _fetched(url: str) -> bytes:
    """The bytes that a web server has. Raises ValueError."""
    data = bytearray()
    try:
        require_package("fsspec")
        fsspec, aiohttp = import_module("fsspec"), import_module("aiohttp")
        timeout = aiohttp.ClientTimeout(total=FETCH_SECONDS)
        with fsspec.open(url, block_size=0, client_kwargs={"timeout": timeout}) as file:
            while len(data) <= MAX_BYTES and (more := file.read(2**20)):
                data += more
    except Exception as error:  # of a server, of a library, and of what is no URL
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else in_short(error)
        raise ValueError(reason) from error
    return _bounded(data)


def _read(path: Path) -> bytes:
    """The bytes of a regular file. Raises OSError, also if a link has come into the path since, and ValueError."""
    with ExitStack() as opened:

        def enter(name: str, flags: int, folder: int | None = None) -> int:
            descriptor = os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder)
            opened.callback(os.close, descriptor)
            return descriptor

        folder = enter(path.anchor, _O_PATH | os.O_DIRECTORY)
        for part in path.parts[1:-1]:
            folder = enter(part, _O_PATH | os.O_DIRECTORY, folder)
        descriptor = enter(path.name or ".", os.O_RDONLY | os.O_NONBLOCK, folder)  # else a pipe would be waited for
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is not a file")
        file = opened.enter_context(os.fdopen(descriptor, "rb", closefd=False))
        return _bounded(file.read(MAX_BYTES + 1))


def _digest(path: Path) -> str:
    now = path.stat()
    return _kept_digest(path, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)


@lru_cache(maxsize=1 << 16)
def _kept_digest(path: Path, *status: int) -> str:
    return _hash(_read(path))


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
