"""The images of a model's requests: what it makes of pictures, kept by their contents in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.base.request import ImageTexts, PlacedImage, Request
from cbatch.media.decoding import decode
from cbatch.media.pictures import Picture
from cbatch.model.hf.vision import ProcessedImage, Vision
from cbatch.runtime.batch import ImageRows
from cbatch.schedule.output import ScheduledChunk

PROCESSED_BYTES = 1 << 30
"""Of images that are processed, and not yet encoded: those of requests that wait. Others are read again in time."""


class _Bounded:
    """Values by names, the least recently used of which are dropped when they take too much memory. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._bytes = most_bytes, 0
        self._held: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, name: str) -> Any:
        with self._lock:
            if name not in self._held:
                return None
            self._held.move_to_end(name)
            return self._held[name][0]

    def put(self, name: str, value: Any, size: int) -> None:
        with self._lock:
            self._drop(name)
            self._held[name], self._bytes = (value, size), self._bytes + size
            while self._bytes > self._most and len(self._held) > 1:
                self._drop(next(iter(self._held)))

    def drop(self, name: str) -> None:
        with self._lock:
            self._drop(name)

    def _drop(self, name: str) -> None:
        if name in self._held:
            self._bytes -= self._held.pop(name)[1]


class Images:
    """What a model makes of pictures: how they stand in a prompt, and rows of embeddings.

    The rows are computed with the first step that needs them, on the engine's thread; all else by the caller's.
    """

    def __init__(self, vision: Vision, most_bytes: int) -> None:
        """most_bytes: of the rows that are kept for requests to come"""
        self._vision = vision
        self._processed, self._features = _Bounded(PROCESSED_BYTES), _Bounded(most_bytes)
        self.num_encoded = 0
        """Images that the tower has computed."""

    def texts(self, pictures: Iterable[Picture]) -> ImageTexts:
        """What stands for pictures in a prompt. Raises RequestError for one that cannot be read."""
        return ImageTexts(self._vision.marker, [self._processed_of(picture).text for picture in pictures])

    def place(self, request: Request) -> None:
        """Says where the images of a request stand among its token ids, once these are known."""
        placeholder, start = self._vision.placeholder, 0
        places = [place for place, token in enumerate(request.prompt_ids) if token == placeholder]
        content, images = list(request.prompt_ids), list[PlacedImage]()
        for picture in request.pictures:
            stop = start + self._processed_of(picture).num_rows
            image = PlacedImage(picture, np.array(places[start:stop], np.int64))
            name = int(picture.digest(), 16) << 32
            for row, place in enumerate(image.places.tolist()):
                content[place] = name + row
            images.append(image)
            start = stop
        assert start == len(places), "other placeholders than those of the images"
        request.images, request.content_ids = images, content
        if self._vision.two_way is not None:
            runs = np.split(np.array(places), np.flatnonzero(np.diff(places) > 1) + 1)
            request.two_way_spans = [(int(run[0]), int(run[-1]) + 1) for run in runs]
        request.positions = self._vision.positions(request.prompt_ids, list(map(self._processed_of, request.pictures)))

    def rows(self, chunks: Sequence[ScheduledChunk]) -> ImageRows | None:
        """The rows of a step's chunks that images replace; None if there are none."""
        places, parts, ends, begin = list[NDArray[np.int64]](), list[Tensor](), list[NDArray[np.int64]](), 0
        for chunk in chunks:
            spans = np.array(chunk.sequence.request.two_way_spans, np.int64).reshape(-1, 2)
            for image in chunk.sequence.request.images:
                first, last = np.searchsorted(image.places, [chunk.start, chunk.stop])
                if first < last:
                    places.append(image.places[first:last] - chunk.start + begin)
                    parts.append(self._features_of(image.picture)[first:last])
                    if len(spans):
                        ends.append(spans[spans[:, 0].searchsorted(image.places[first:last], "right") - 1, 1])
            begin += chunk.num_tokens
        if not places:
            return None
        found, only_in_windows = np.concatenate(ends) if ends else None, self._vision.two_way == "windows"
        return ImageRows(np.concatenate(places), torch.cat(parts), None, found, only_in_windows)

    def _processed_of(self, picture: Picture) -> ProcessedImage:
        name = picture.digest()
        found: ProcessedImage | None = self._processed.get(name)
        if found is None:
            found = self._vision.process(decode(picture))
            self._processed.put(name, found, found.nbytes)
        return found

    def _features_of(self, picture: Picture) -> Tensor:
        name = picture.digest()
        found: Tensor | None = self._features.get(name)
        if found is None:
            found = self._vision.features(self._processed_of(picture))
            self.num_encoded += 1
            self._features.put(name, found, found.nbytes)
        return found
