"""The process that decodes pictures and videos: damage to a file, or a flaw in a decoder, harms nothing else.

It answers with numbers, and writes pixels to a file that it is given.
"""

from __future__ import annotations

import ctypes
import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from PIL import Image, ImageOps, ImageSequence, UnidentifiedImageError

from cbatch.extras import require_package

MAX_PIXELS = 100_000_000
"""Of the largest picture."""

FORMATS = "Png Jpeg WebP Gif Bmp Tiff Ppm Avif".split()
"""Those of raster images that Pillow itself decodes. Others would start programs or render."""

VIDEO_FORMATS = "mov,mp4,matroska,webm,avi,mpegts"
"""Those of FFmpeg that are read. Others would open further files and addresses."""

_ANIMATION = re.compile(rb"GIF8|\x89PNG|RIFF.{4}WEBP", re.DOTALL)

_ROWS = 256
"""How many rows of pixels are written at once."""


class PictureServer:
    """Decodes files of the FORMATS."""

    def __init__(self) -> None:
        for name in FORMATS:
            with suppress(ImportError):  # of AVIF, which older versions lack
                import_module(f"PIL.{name}ImagePlugin")
        self._formats = [name for name in map(str.upper, FORMATS) if name in Image.OPEN]
        Image.MAX_IMAGE_PIXELS = MAX_PIXELS
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with suppress(AttributeError):  # of other systems than glibc, which else keeps what large pictures have left
            ctypes.CDLL(None).mallopt(-3, 2**23)  # M_MMAP_THRESHOLD

    def decode(self, data: bytes, path: str) -> tuple[int, int]:
        """Writes the pixels to a file, of each row and in it of each pixel red, green and blue, and gives its size."""
        image: Image.Image = self._opened(data)
        ImageOps.exif_transpose(image, in_place=True)
        if image.mode != "RGB":
            image = image.convert("RGB")
        width, height = image.size
        with open(path, "wb") as file:  # noqa: PTH123
            for top in range(0, height, _ROWS):
                file.write(image.crop((0, top, width, min(top + _ROWS, height))).tobytes())
        return width, height

    def count(self, data: bytes) -> tuple[int, float]:
        """How many frames a video or an animation has, and how many of them are shown in a second."""
        if (image := self._animation(data)) is not None:
            # As in browsers, a frame without a duration is shown for a tenth of a second.
            shown_ms = [frame.info.get("duration") or 100 for frame in ImageSequence.Iterator(image)]
            return len(shown_ms), 1000 * len(shown_ms) / sum(shown_ms)
        with _opened_video(data) as file:
            stream, hidden, end = file.streams.video[0], list[bool](), 0.0
            for packet in file.demux():
                if packet.size:
                    end = max(end, float(((packet.pts or 0) + (packet.duration or 0)) * packet.time_base))
                    hidden += [packet.is_discard] if packet.stream is stream else []
            announced_s = 0 if stream.frames else (file.duration or 0) / 1e6 - 0.5  # which is not exact
            if len(hidden) < stream.frames or end < announced_s:
                raise ValueError(f"it is cut off behind frame {len(hidden):,}")
            return hidden.count(False), float(stream.average_rate or 0)

    def frames(self, data: bytes, numbers: list[int], max_pixels: int, path: str) -> tuple[int, int]:
        """Writes the frames with these ascending numbers, as `decode` writes a picture, and gives their size."""
        size = 0, 0
        with open(path, "wb") as file:  # noqa: PTH123
            for number, one in enumerate(self._frames(data)):
                if number in numbers:
                    is_image = isinstance(one, Image.Image)
                    image = one.convert("RGB") if is_image else one.to_image().rotate(one.rotation, expand=True)
                    if number > numbers[0] and image.size != size:
                        raise ValueError("it has frames of several sizes")
                    size = image.size
                    if len(numbers) * image.width * image.height > max_pixels:
                        raise ValueError(f"{len(numbers)} frames of {image.width} × {image.height} pixels are too many")
                    file.write(image.tobytes() * numbers.count(number))
                if number == numbers[-1]:
                    return size
        raise ValueError(f"it ends before frame {numbers[-1] + 1:,}")

    def _frames(self, data: bytes) -> Iterator[Any]:
        """Images of Pillow, or frames of PyAV."""
        if (animation := self._animation(data)) is not None:
            yield from ImageSequence.Iterator(animation)
            return
        with _opened_video(data) as file:
            for frame in file.decode(video=0):
                if frame.is_corrupt:
                    raise ValueError("it is damaged")
                yield frame

    def _animation(self, data: bytes) -> Image.Image | None:
        """The file as Pillow opens it; None for files that PyAV does."""
        return self._opened(data) if not data or _ANIMATION.match(data) else None

    def _opened(self, data: bytes) -> Image.Image:
        try:
            image = Image.open(io.BytesIO(data), formats=self._formats)
        except UnidentifiedImageError:
            raise ValueError(f"it is none of {', '.join(self._formats)}" if data else "it is empty") from None
        except (Image.DecompressionBombWarning, Image.DecompressionBombError):
            raise ValueError(f"it has more than {MAX_PIXELS:,} pixels") from None
        if 0 in image.size:
            raise ValueError("it has no pixels")
        return image


@contextmanager
def _opened_video(data: bytes) -> Iterator[Any]:
    """The file as PyAV opens it. Raises ValueError for one that it cannot read, and ConfigError without PyAV."""
    require_package("av")
    import av  # type: ignore[import-not-found, unused-ignore]

    try:
        with av.open(io.BytesIO(data), options={"format_whitelist": VIDEO_FORMATS}, metadata_errors="replace") as file:
            yield file
    except (av.FFmpegError, IndexError) as error:
        problem = getattr(error, "strerror", "it has no pictures")
        raise ValueError(f"it is damaged, or no video of the formats {VIDEO_FORMATS}: {problem}") from error
