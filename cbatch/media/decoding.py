"""Pictures as pixels, which a process of its own decodes (see `child.py`)."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch.base.errors import RequestError, reason_of
from cbatch.extras import require_package
from cbatch.isolate.child import Limits
from cbatch.isolate.sandbox import Sandbox
from cbatch.isolate.worker import WorkerFailed
from cbatch.media.pictures import Picture

LIMITS = Limits(memory=1 << 30, cpu_seconds=20)
"""For one picture."""


def decode(picture: Picture) -> NDArray[np.uint8]:
    """Its pixels as [height, width, 3] in RGB, as transformers' `load_image` gives them: turned as its EXIF data say.

    Of an animation, the first frame. Raises RequestError for a picture that cannot be read or decoded, or has more
    pixels than `child.MAX_PIXELS`, and ConfigError if Pillow is not installed.
    """
    with tempfile.NamedTemporaryFile(prefix="cbatch-pixels-") as file:
        width, height = _ask(picture, "decode", file.name)
        return np.fromfile(file.name, np.uint8).reshape(height, width, 3)


def size_of(picture: Picture) -> tuple[int, int]:
    """Width and height of what `decode` gives. Raises as that does, unless what is wrong is behind the header."""
    width, height = _ask(picture, "size")
    return width, height


@lru_cache(maxsize=1)
def sandbox() -> Sandbox:
    """The process that decodes. Raises ConfigError if Pillow is not installed."""
    require_package("PIL")
    return Sandbox("cbatch.media.child:PictureServer", limits=LIMITS)


def _ask(picture: Picture, method: str, *arguments: Any) -> tuple[int, int]:
    process = sandbox()
    try:
        width, height = process.call(method, picture.read(), *arguments)
    except WorkerFailed as failed:
        raise picture.invalid(f"cannot be decoded: {failed}") from failed
    except OSError as error:
        sentence = f"The process that decodes images cannot be started: {reason_of(error)}."
        raise RequestError("internal_error", sentence) from error
    return int(width), int(height)
