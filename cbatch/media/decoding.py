"""Pictures and videos as pixels, which a process of its own decodes (see `child.py`)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch.base.errors import RequestError, in_short, reason_of
from cbatch.extras import require_package
from cbatch.isolate.child import Limits
from cbatch.isolate.sandbox import Sandbox
from cbatch.isolate.worker import WorkerFailed
from cbatch.media.pictures import Picture, Video

LIMITS = Limits(memory=1 << 30, cpu_seconds=20)
"""For one picture."""

VIDEO_LIMITS = Limits(memory=2 << 30, cpu_seconds=20, cpu_seconds_per_mb=5, wall_seconds=600)
"""For one video, whose bytes are larger."""

MAX_FRAMES, MAX_VIDEO_PIXELS = 768, 300_000_000
"""Of what is taken of a video, in all."""


def decode(picture: Picture) -> NDArray[np.uint8]:
    """Its pixels as [height, width, 3] in RGB, as transformers' `load_image` gives them: turned as its EXIF data say.

    Of an animation, the first frame. Raises RequestError for a picture that cannot be read or decoded, or has more
    pixels than `child.MAX_PIXELS`, and ConfigError if Pillow is not installed.
    """
    with tempfile.NamedTemporaryFile(prefix="cbatch-pixels-") as file:
        width, height = _ask(picture, "decode", picture.read(), file.name)
        return np.fromfile(file.name, np.uint8).reshape(height, width, 3)


def decode_video(video: Video, sample: Callable[[dict[str, Any]], Any]) -> tuple[NDArray[np.uint8], dict[str, Any]]:
    """Its frames as [frames, height, width, 3] in RGB, and what transformers' `VideoMetadata` has about them.

    sample: gives the numbers of those that are taken of a file; all of those that are pictures are

    Raises RequestError for what cannot be read, decoded or sampled, or is too much, and ConfigError without Pillow.
    """
    data = b"" if video.frames else video.read()
    count, fps = (len(video.frames), video.fps) if video.frames else _ask(video, "count", data)
    try:
        about: dict[str, Any] = {"total_num_frames": count, "fps": fps, "duration": count / fps}
        numbers = [*range(count)] if video.frames else sorted(map(int, sample(about)))
        about["frames_indices"] = [*numbers]
    except Exception as error:  # of a program of the model's
        raise video.invalid(f"cannot be sampled, of {count:,} frames: {in_short(error)}") from error
    if not 0 < len(numbers) <= MAX_FRAMES:
        raise video.invalid(f"gives {len(numbers):,} frames, and there may be {MAX_FRAMES}")
    if video.frames:
        first = decode(video.frames[0])
        if count * first.size > 3 * MAX_VIDEO_PIXELS:
            raise video.invalid(f"has more than {MAX_VIDEO_PIXELS:,} pixels")
        pixels = [first, *map(decode, video.frames[1:])]
        if len({one.shape for one in pixels}) > 1:
            raise video.invalid("has frames of several sizes")
        return np.stack(pixels), about
    with tempfile.NamedTemporaryFile(prefix="cbatch-pixels-") as file:
        width, height = _ask(video, "frames", data, numbers, MAX_VIDEO_PIXELS, file.name)
        return np.fromfile(file.name, np.uint8).reshape(len(numbers), height, width, 3), about


@lru_cache
def sandbox(limits: Limits = LIMITS) -> Sandbox:
    """The process that decodes. Raises ConfigError if Pillow is not installed."""
    require_package("PIL")
    return Sandbox("cbatch.media.child:PictureServer", limits=limits)


def _ask(picture: Picture, method: str, *arguments: Any) -> Any:
    process = sandbox(VIDEO_LIMITS) if picture.kind == "video" else sandbox()
    try:
        return process.call(method, *arguments)
    except WorkerFailed as failed:
        raise picture.invalid(f"cannot be decoded: {failed}") from failed
    except OSError as error:
        sentence = f"The process that decodes images cannot be started: {reason_of(error)}."
        raise RequestError("internal_error", sentence) from error
