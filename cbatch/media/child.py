"""The process that decodes pictures: damage to a file, or a flaw in a decoder, harms nothing else.

It answers with numbers, and writes pixels to a file that it is given.
"""

from __future__ import annotations

import ctypes
import io
import warnings
from contextlib import suppress
from importlib import import_module

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

MAX_PIXELS = 100_000_000
"""Of the largest picture."""

FORMATS = "Png Jpeg WebP Gif Bmp Tiff Ppm Avif".split()
"""Those of raster images that Pillow itself decodes. Others would start programs or render."""

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

    def size(self, data: bytes) -> tuple[int, int]:
        """Width and height as `decode` gives them, mostly without decoding pixels."""
        image = self._opened(data)
        size = image.size
        if image.format == "TIFF":  # is turned already
            return size
        behind = data[data.find(b"IDAT") :] if image.format == "PNG" else b""
        # Pillow decodes any PNG to see whether metadata follow behind its pixels.
        is_last = image.format == "PNG" and not any(kind in behind for kind in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"))
        exif = Image.Image.getexif(image) if is_last else image.getexif()
        return size[::-1] if exif.get(ExifTags.Base.Orientation) in (5, 6, 7, 8) else size

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
