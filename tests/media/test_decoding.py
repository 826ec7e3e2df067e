"""Pictures become the pixels that transformers would see, and what is wrong with one harms no other."""

from __future__ import annotations

import io
import platform
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from cbatch.base.errors import ConfigError, RequestError
from cbatch.isolate.child import Limits
from cbatch.isolate.sandbox import Sandbox
from cbatch.media import decoding
from cbatch.media.decoding import decode, sandbox
from cbatch.media.pictures import Picture

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
load_image = pytest.importorskip("transformers.image_utils").load_image

SIDE = (37, 23)
ORIENTATION = 0x0112


def noise(mode: str = "RGB", size: tuple[int, int] = SIDE) -> Any:
    """A picture of random pixels."""
    channels = {"L": 1, "P": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4}[mode]
    values = np.random.default_rng(0).integers(0, 256, (size[1], size[0], channels), np.uint8)
    if mode == "P":
        picture = Image.fromarray(values[..., 0], "L").convert("P")
        picture.putpalette(np.random.default_rng(1).integers(0, 256, 768, np.uint8).tobytes())
        return picture
    return Image.frombytes(mode, size, values.tobytes())


def saved(picture: Any, form: str, **options: Any) -> bytes:
    Image.init()
    if form not in Image.SAVE:
        pytest.skip(f"this version of Pillow has no {form}")
    file = io.BytesIO()
    picture.save(file, form, **options)
    return file.getvalue()


def turned(orientation: int) -> Any:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, color: int = 0) -> bytes:
    """A PNG file of a header and some chunks."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunks)


def late_exif() -> bytes:
    """A PNG file that says behind its pixels that it is to be turned."""
    data = saved(noise(), "PNG")
    exif = chunk(b"eXIf", turned(6).tobytes().removeprefix(b"Exif\0\0"))
    end = data.rindex(b"IEND") - 4
    return data[:end] + exif + data[end:]


deep = Image.fromarray(np.random.default_rng(2).integers(0, 2**16, SIDE[::-1], np.uint16))
frames = [noise("P"), noise("P").rotate(180)]

ORDINARY: dict[str, Callable[[], bytes]] = {
    "png": lambda: saved(noise(), "PNG"),
    "jpeg": lambda: saved(noise(), "JPEG"),
    "grey jpeg": lambda: saved(noise("L"), "JPEG"),
    "cmyk jpeg": lambda: saved(noise("CMYK"), "JPEG"),
    "webp": lambda: saved(noise(), "WEBP"),
    "webp with alpha": lambda: saved(noise("RGBA"), "WEBP", lossless=True),
    "gif": lambda: saved(noise("P"), "GIF"),
    "animation": lambda: saved(frames[0], "GIF", save_all=True, append_images=frames[1:], transparency=3),
    "bmp": lambda: saved(noise(), "BMP"),
    "ppm": lambda: saved(noise(), "PPM"),
    "tiff": lambda: saved(noise(), "TIFF", compression="tiff_lzw"),
    "cmyk tiff": lambda: saved(noise("CMYK"), "TIFF"),
    "16 bits": lambda: saved(deep, "PNG"),
    "16 bits tiff": lambda: saved(deep, "TIFF"),
    "grey and alpha": lambda: saved(noise("LA"), "PNG"),
    "alpha": lambda: saved(noise("RGBA"), "PNG"),
    "palette": lambda: saved(noise("P"), "PNG"),
    "transparent palette": lambda: saved(noise("P"), "PNG", transparency=bytes(range(256))),
    "one bit": lambda: saved(noise("L").convert("1"), "PNG"),
    "late exif": late_exif,
    **{
        f"{form} {number}": lambda form=form, number=number: saved(noise(), form, exif=turned(number))
        for form in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF")
        for number in (range(1, 9) if form == "JPEG" else (6, 3))
    },
}


@pytest.mark.parametrize("name", ORDINARY)
def test_pixels_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Guards the input of vision models: another orientation, palette or alpha gives another answer, silently."""
    path = tmp_path / "picture"
    path.write_bytes(ORDINARY[name]())
    wanted = np.asarray(load_image(str(path)))
    for picture in (Picture(path, "image 1"), Picture(path.read_bytes(), "image 1")):
        pixels = decode(picture)
        assert pixels.dtype == np.uint8 and pixels.shape == wanted.shape
        assert (pixels == wanted).all()


def cut(data: bytes, share: float = 0.6) -> bytes:
    return data[: int(len(data) * share)]


def recursive_tiff() -> bytes:
    """A TIFF file whose second directory is its first one."""
    data = saved(noise(), "TIFF")
    (start,) = struct.unpack_from("<I", data, 4)
    (count,) = struct.unpack_from("<H", data, start)
    end = start + 2 + 12 * count
    return data[:end] + struct.pack("<I", start) + data[end + 4 :]


def bomb(width: int, height: int) -> bytes:
    """A PNG file of few bytes and many pixels, all of which are there."""
    rows = zlib.compressobj(9)
    data = b"".join(rows.compress(b"\0" * (width + 1)) for _ in range(height)) + rows.flush()
    return png(width, height, chunk(b"IDAT", data), chunk(b"IEND", b""))


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "header of a bomb": (lambda: png(60_000, 60_000, chunk(b"IDAT", b""), chunk(b"IEND", b"")), "100,000,000 pixels"),
    "whole bomb": (lambda: bomb(10_001, 10_000), "100,000,000 pixels"),
    "bomb as gif": (lambda: b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b";", "pixels|none of"),
    "bomb as tiff": (lambda: saved(noise(), "TIFF").replace(struct.pack("<HHII", 256, 4, 1, 37),
                                                          struct.pack("<HHII", 256, 4, 1, 2**31 - 1)), "pixels"),
    "empty": (lambda: b"", "empty"),
    "text": (lambda: b"this is no picture at all\n" * 9, "none of PNG, JPEG"),
    "svg": (lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>', "none of"),
    "eps": (lambda: saved(noise(), "EPS"), "none of"),
    "pdf": (lambda: saved(noise(), "PDF"), "none of"),
    "ico": (lambda: saved(noise(), "ICO"), "none of"),
    "no width": (lambda: b"P6\n0 5\n255\n", "pixels|none of"),
    "chunk of text": (
        lambda: png(1, 1, chunk(b"zTXt", b"a\0\0" + zlib.compress(b" " * 10**8)), chunk(b"IDAT", b"")), "large",
    ),
    **{
        f"truncated {form}": (lambda form=form: cut(saved(noise(size=(200, 200)), form)), "")
        for form in ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "PPM", "AVIF")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_bad_picture_is_an_error_that_names_it(name: str) -> None:
    """Guards a run against one file: no crash, no gigabytes, no program, and a sentence that says why."""
    make, reason = HOSTILE[name]
    good = Picture(ORDINARY["png"](), "image 1")
    before = decode(good)
    worker = sandbox().worker
    sentence = f"(?s)^image 2 of message 1 \\(bad\\) cannot be decoded: .*({reason})"
    with pytest.raises(RequestError, match=sentence) as failed:
        decode(Picture(make(), "image 2 of message 1 (bad)"))
    assert failed.value.code == "invalid_row"
    assert (decode(good) == before).all()
    assert sandbox().worker is worker, "it has not died of it"


def test_pictures_that_only_look_bad_are_decoded(tmp_path: Path) -> None:
    """Guards odd but whole files: directories of TIFF in a circle, large EXIF data, an animation that says no end."""
    huge = turned(6)
    huge[0x9286] = b"x" * 60_000
    gif = saved(noise("P"), "GIF")
    endless = gif[:-1] + gif[gif.index(b"!") : -1] * 10_000
    for data in (recursive_tiff(), saved(noise(), "JPEG", exif=huge), endless):
        path = tmp_path / "picture"
        path.write_bytes(data)
        assert (decode(Picture(path, "image 1")) == np.asarray(load_image(str(path)))).all()


def test_a_worker_that_dies_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the rows after one whose picture takes too long, or breaks the interpreter of its decoder."""
    limits = Limits(memory=decoding.LIMITS.memory, cpu_seconds=0.5)
    process = Sandbox("tests.media.stubs:Broken", limits=limits)
    monkeypatch.setattr(decoding, "sandbox", lambda: process)
    good = Picture(ORDINARY["png"](), "image 1")
    for data, reason in (
        (b"slow", "does not end within 0.5 s"),
        (b"crash", "interpreter"),
        (b"large", "too much memory"),
    ):
        with pytest.raises(RequestError, match=f"image 2 cannot be decoded: it .*{reason}"):
            decode(Picture(data, "image 2"))
        assert decode(good).shape == (*SIDE[::-1], 3)
    process.close()


def test_missing_pillow_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards users without Pillow, which is an extra: the sentence has the command that installs it."""
    monkeypatch.setattr("cbatch.extras.find_spec", lambda package: None)
    decoding.sandbox.cache_clear()
    with pytest.raises(ConfigError, match=r"Images need Pillow.*pip install .*\[images\]"):
        decode(Picture(ORDINARY["png"](), "image 1"))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
def test_a_large_picture_leaves_no_memory() -> None:
    """Guards the pictures behind a large one: whether there is memory for them must not depend on what came before."""
    large = Image.new("RGB", (4000, 3000))
    decode(Picture(ORDINARY["tiff"](), "image 1"))
    process = psutil.Process(sandbox().worker.pid)
    before = process.memory_info().rss
    assert decode(Picture(saved(large, "TIFF"), "image 1")).shape == (3000, 4000, 3)
    assert process.memory_info().rss < before + 20 * 2**20
    process = Sandbox("tests.media.stubs:Fragmented", limits=decoding.LIMITS)
    before, after = process.call("sizes")
    assert after < before + 8 * 2**20
    process.close()
