"""Pictures that go with messages: how they are named, read, and shown on terminals that can do so."""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

from cbatch.base.units import format_bytes
from cbatch.cli.chat.session.files import as_path, is_file, read_text
from cbatch.cli.chat.session.session import Attachment
from cbatch.media.pictures import Picture, Video

PICTURE = re.compile(
    rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a|RIFF.{4}WEBP|BM.{4}\0{4}|II\*\0|MM\0\*|.{4}ftyp|P[56]\s\d+\s\d+\s"
    rb"|\x1aE\xdf\xa3|RIFF.{4}AVI ",
    re.DOTALL,
)
"""How files of pictures and videos begin, also those of kinds that cannot be decoded, which is said then."""

_VIDEO = re.compile(rb"\x1aE\xdf\xa3|RIFF.{4}AVI |.{4}ftyp(?!avi|hei|mif|msf)", re.DOTALL)

_NAME = re.compile(r"""\s*(?:'([^']*)'|"([^"]*)"|((?:\\.|[^\s\\])+))(?=\s|$)""")

THUMBNAIL = 320, 200
"""Pixels of a picture on the screen, at most."""

KITTY_CLEAR = "\x1b_Ga=d,d=A,q=2\x1b\\"


def leading_pictures(line: str) -> tuple[list[Path], str]:
    """The pictures with whose paths a line begins, as terminals write those of dropped files; and what follows."""
    found: list[Path] = []
    while match := _NAME.match(line):
        name = match[1] or match[2] or re.sub(r"\\(.)", r"\1", match[3] or "")
        name = unquote(name.removeprefix("file://").removeprefix("localhost")) if name.startswith("file://") else name
        if "/" not in name or not PICTURE.match(_beginning(name)):  # a word of a message may be a name, too
            break
        found.append(as_path(name))
        line = line[match.end() :].lstrip()
    return found, line


def _beginning(name: str) -> bytes:
    """The first bytes of a file, as far as it can be read."""
    with suppress(OSError):
        if is_file(name):
            with as_path(name).open("rb") as file:
                return file.read(64)
    return b""


def read_attachment(path: Path) -> Attachment:
    """A picture, a video or a text. Raises UserError or RequestError if it is none, and ConfigError without Pillow."""
    if not PICTURE.match(begin := _beginning(str(path))):
        return Attachment(str(path), read_text(path))
    from cbatch.media.decoding import decode

    name, size = os.path.abspath(path), format_bytes(path.stat().st_size)  # noqa: PTH100  (a link keeps its name)
    if _VIDEO.match(begin):
        video = Video(path.resolve(), str(path))
        return Attachment(name, f"video, {size}", digest=video.digest(), kind=video.kind)
    picture = Picture(path.resolve(), str(path))
    digest, (height, width, _) = picture.digest(), decode(picture).shape
    return Attachment(name, f"{width:,} × {height:,}, {size}", digest=digest)


def graphics_of(environment: Mapping[str, str]) -> str:
    """How the terminal takes pictures: `kitty`, `iterm`, or empty if it does not, or another program is between."""
    term, program = environment.get("TERM", ""), environment.get("TERM_PROGRAM", "")
    if environment.get("TMUX") or environment.get("STY") or term.startswith(("screen", "tmux")):
        return ""
    if environment.get("KITTY_WINDOW_ID") or term in ("xterm-kitty", "xterm-ghostty"):
        return "kitty"
    return "iterm" if program in ("iTerm.app", "WezTerm") else ""


def thumbnail(file: Attachment, graphics: str) -> str:
    """Control sequences that draw a picture, made small, at the top of the screen on the right. Raises RequestError."""
    from PIL import Image

    from cbatch.media.decoding import decode

    image, png = Image.fromarray(decode(Picture(Path(file.name).resolve(), file.name))), io.BytesIO()
    image.thumbnail(THUMBNAIL)
    image.save(png, "PNG")
    data, cells = base64.b64encode(png.getvalue()).decode(), max(image.width // 8, 1)  # such are cells of many fonts
    if graphics == "kitty":  # q=2: no answer, which would count as typed
        parts = (data[start : start + 4096] for start in range(0, len(data), 4096))
        whole = f"a=T,f=100,C=1,c={cells}," + "\x1b\\\x1b_G".join(f"q=2,m=1;{part}" for part in parts)
        whole = f"\x1b_G{whole}\x1b\\\x1b_Gq=2,m=0;\x1b\\"
    else:
        whole = f"\x1b]1337;File=inline=1;size={len(png.getvalue())};width={cells};doNotMoveCursor=1:{data}\x07"
    return f"\x1b7\x1b[1;999H\x1b[{cells}D{whole}\x1b8"
