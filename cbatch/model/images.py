"""The images of a model's requests: what it makes of pictures, kept by their contents in bounded memory.

Inputs of the vision tower are large, and rows are read far ahead. So they are kept for the requests that came first, as
far as memory allows; those of others are made again, by threads, when their requests are among the next.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import chain, islice
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.base.errors import RequestError, in_short
from cbatch.base.request import ImageTexts, PlacedImage, Request
from cbatch.media.decoding import decode
from cbatch.media.pictures import Picture, Video
from cbatch.model.hf.vision import ProcessedImage, Vision
from cbatch.runtime.batch import ImageRows
from cbatch.runtime.memory import clear_frames, is_out_of_memory, release_memory
from cbatch.schedule.admission import priority_key
from cbatch.schedule.output import ScheduledChunk
from cbatch.schedule.prefill_budget import schedule_key
from cbatch.schedule.sequence import TokenSequence

INPUT_BYTES = 1 << 28
"""Of the tower's inputs that are kept for requests that wait; and of those that are made before steps need them."""

LAYOUT_BYTES, SMALL = 1 << 26, 1 << 12
"""Of what stands for images in prompts, and of the largest input that says how an image is laid out."""

WORKERS = 2
"""Threads that make inputs: one decodes while the other processes."""

LOOK_AHEAD = 64
"""Waiting requests whose inputs are made before a step needs them."""

TOGETHER_BYTES = 1 << 24
"""Of inputs of images of one shape that the tower computes together on a GPU, which large ones fill alone."""

STEP_SECONDS = 1.0
"""After which the tower begins no more images for a step: on a CPU, tokens of others would wait for minutes."""

STALE = 1 << 13
"""Inputs that came before so many others are of requests that have failed: fewer rows are read ahead."""


class _Bounded:
    """Values by names, in bounded memory. Thread-safe.

    What has been used least recently leaves; if it `keeps_first`, nothing else enters.
    """

    def __init__(self, most_bytes: int, *, keeps_first: bool = False) -> None:
        self._most, self._keeps_first = most_bytes, keeps_first
        self._bytes = self._count = 0
        self._held: OrderedDict[str, tuple[Any, int, int]] = OrderedDict()
        self._lock = RLock()

    def get(self, name: str) -> Any:
        with self._lock:
            if name in self._held and not self._keeps_first:
                self._held.move_to_end(name)
            return self._held.get(name, (None,))[0]

    def put(self, name: str, value: Any, size: int, *, at_any_rate: bool = False) -> None:
        with self._lock:
            self.drop(name)
            while self._keeps_first and self._held and self._count - next(iter(self._held.values()))[2] > STALE:
                self.drop(next(iter(self._held)))
            self._count += 1
            if self._keeps_first and self._bytes + size > self._most and not at_any_rate:
                return
            self._held[name], self._bytes = (value, size, self._count), self._bytes + size
            while not self._keeps_first and self._bytes > self._most:
                self.drop(next(iter(self._held)))

    def drop(self, name: str) -> None:
        with self._lock:
            if name in self._held:
                self._bytes -= self._held.pop(name)[1]


class _Wanted(NamedTuple):
    """An image that the tower shall compute, and the requests that wait for it."""

    image: PlacedImage
    inputs: ProcessedImage
    sequences: list[TokenSequence]

    @property
    def shape(self) -> Hashable:
        return self.inputs.num_rows, *((name, one.shape) for name, one in self.inputs.inputs.items())


class Images:
    """The pictures of requests as a model takes them: how they stand in a prompt, and rows of embeddings.

    The rows are computed before the first step that may need them, on the engine's thread; that decodes nothing.
    """

    def __init__(self, vision: Vision, device: torch.device, most_bytes: int, *, alone: bool) -> None:
        """
        most_bytes: of the rows that are kept for requests to come
        alone:      whether each image is computed by itself, so that others do not change bits of its rows
        """
        self._vision, self._device, self._together_bytes = vision, device, 0 if alone else TOGETHER_BYTES
        self._layouts, self._features = _Bounded(LAYOUT_BYTES), _Bounded(most_bytes)
        self._inputs = _Bounded(INPUT_BYTES, keeps_first=True)
        self._threads = ThreadPoolExecutor(WORKERS, "cbatch-images")
        self._input_bytes = INPUT_BYTES // 16
        """Of the latest image."""
        self._making: dict[str, Future[RequestError | None]] = {}
        self._ready: dict[str, Tensor] = {}
        """The rows that the next step can have."""
        self.num_given = self.num_encoded = 0
        """Images of requests, and those that the tower has computed."""
        self.encoding_s = 0.0
        """Seconds of the engine's thread for that."""

    def texts(self, pictures: Sequence[Picture]) -> ImageTexts:
        """The texts that stand for pictures in a prompt. Raises RequestError for one that cannot be read."""
        context = self._vision.context[0]
        markers = [self._vision.marker(picture.kind) for picture in pictures]  # says it if the model takes none
        texts = [self._layout(picture, name).text for picture, name in self._named(pictures)]
        kinds = [picture.kind for picture in pictures]
        numbered = [self._vision.numbered(text, kinds[:i].count(kinds[i])) for i, text in enumerate(texts)]
        return context._replace(markers=markers, texts=numbered)

    def _named(self, pictures: Sequence[Picture]) -> Iterator[tuple[Picture, str]]:
        """Pictures of a conversation with the digest of each, which ends otherwise if others make it something else."""
        num_images = sum(picture.kind == "image" for picture in pictures)
        ending = "0" if self._vision.context[1].text and num_images > 1 else ""
        return ((picture, picture.digest() + ending) for picture in pictures)

    def place(self, request: Request) -> None:
        """Says where the images of a request stand among its token ids, once these are known."""
        placeholders, start = self._vision.placeholders, 0
        places = [place for place, token in enumerate(request.prompt_ids) if token in placeholders]
        content, images, layouts = list(request.prompt_ids), list[PlacedImage](), list[ProcessedImage]()
        for picture, digest in self._named(request.pictures):
            layouts.append(self._layout(picture, digest))
            if (stop := start + layouts[-1].num_rows) == start:
                raise picture.invalid("stands for no token of this model")
            image = PlacedImage(picture, digest, np.array(places[start:stop], np.int64))
            name = int(digest, 16) << 32
            for row, place in enumerate(image.places.tolist()):
                content[place] = name + row
            images.append(image)
            start = stop
        assert start == len(places), "other placeholders than those of the images"
        request.images, request.content_ids = images, content
        if self._vision.two_way is not None:
            runs = np.split(np.array(places), np.flatnonzero(np.diff(places) > 1) + 1)
            request.two_way_spans = [(int(run[0]), int(run[-1]) + 1) for run in runs]
        request.positions = self._vision.positions(request.prompt_ids, layouts)

    def begin_step(
        self, running: Iterable[TokenSequence], waiting: Iterable[TokenSequence], max_tokens: int
    ) -> list[tuple[TokenSequence, RequestError]]:
        """Computes rows that the next step may need, about as many as it has tokens; half while requests decode.

        Threads make the inputs of the next images meanwhile. Returns requests whose images cannot be had, and why.
        """
        prompts = [
            one for one in running if one.request.images and one.num_computed <= one.request.images[-1].places[-1]
        ]
        oldest = min(prompts, key=priority_key, default=None)
        prompts.sort(key=lambda one: (one is not oldest, schedule_key(one)))
        tokens = rows = max_tokens
        if any(one.is_decoding for one in running):
            rows = -(-rows // 2)
        before, self._ready, ahead = self._ready, {}, INPUT_BYTES
        failed, wanted = list[tuple[TokenSequence, RequestError]](), dict[str, _Wanted]()
        for sequence in chain(prompts, islice(waiting, LOOK_AHEAD)):
            stop = sequence.num_computed + tokens
            tokens = max(tokens - sequence.num_pending, 0)
            try:
                for image in sequence.request.images:
                    if image.places[-1] < sequence.num_computed or image.digest in self._ready:
                        continue
                    found = before.get(image.digest)
                    found = self._features.get(image.digest) if found is None else found
                    if found is not None:
                        if image.places[0] < stop:
                            self._ready[image.digest] = found
                    elif image.digest in wanted:
                        wanted[image.digest].sequences.append(sequence)
                    elif (inputs := self._inputs_of(image)) and image.places[0] < stop and rows > 0:
                        wanted[image.digest] = _Wanted(image, inputs, [sequence])
                        rows -= inputs.num_rows
                    else:
                        ahead -= self._input_bytes
            except RequestError as error:
                failed.append((sequence, error))
            if ahead <= 0:
                break
        failed += self._encode(wanted.values())
        return list({id(sequence): (sequence, error) for sequence, error in failed}.values())

    def num_ready(self, sequence: TokenSequence, num_tokens: int) -> int:
        """How many of its next tokens a request can compute in this step: up to an image whose rows are not there."""
        start = sequence.num_computed
        for image in sequence.request.images:
            if image.places[-1] < start or image.places[0] >= start + num_tokens or image.digest in self._ready:
                continue
            if (found := self._features.get(image.digest)) is None:
                return max(int(image.places[0]) - start, 0)
            self._ready[image.digest] = found
        return num_tokens

    def wait(self) -> None:
        """Waits, for a moment, until a thread has made inputs, if there is nothing else to do."""
        wait([one for one in self._making.values() if not one.done()], 0.1, FIRST_COMPLETED)

    def rows(self, chunks: Sequence[ScheduledChunk]) -> ImageRows | None:
        """The rows of a step's chunks that images replace; None if there are none."""
        places, parts, ends, begin = list[NDArray[np.int64]](), list[Tensor](), list[NDArray[np.int64]](), 0
        for chunk in chunks:
            spans = np.array(chunk.sequence.request.two_way_spans, np.int64).reshape(-1, 2)
            for image in chunk.sequence.request.images:
                first, last = np.searchsorted(image.places, [chunk.start, chunk.stop])
                if first < last:
                    places.append(image.places[first:last] - chunk.start + begin)
                    parts.append(self._ready[image.digest][first:last])
                    if len(spans):
                        ends.append(spans[spans[:, 0].searchsorted(image.places[first:last], "right") - 1, 1])
            begin += chunk.num_tokens
        if not places:
            return None
        found, only_in_windows = np.concatenate(ends) if ends else None, self._vision.two_way == "windows"
        return ImageRows(np.concatenate(places), torch.cat(parts), None, found, only_in_windows)

    def close(self) -> None:
        """Ends the threads and frees the rows and the tower."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._ready, self._features = {}, _Bounded(0)
        self._vision.unload()

    def _layout(self, picture: Picture, digest: str) -> ProcessedImage:
        """An image without its pixels."""
        found: ProcessedImage | None = self._layouts.get(digest)
        return found or self._process(picture, digest)

    def _process(self, picture: Picture, digest: str, *, is_next: bool = False) -> ProcessedImage:
        now = picture.unchanged()
        try:
            if isinstance(now, Video):
                made = self._vision.process_video(now)
            else:
                made = self._vision.process(decode(now), is_alone=digest == picture.digest())
        except RequestError:
            raise
        except Exception as error:  # such as for a picture that is too narrow for the model
            raise picture.invalid(f"cannot be processed: {in_short(error)}") from error
        self._input_bytes = made.nbytes
        if is_next or self._features.get(digest) is None:
            self._inputs.put(digest, made, made.nbytes, at_any_rate=is_next)
        layout = made._replace(inputs={name: one for name, one in made.inputs.items() if one.nbytes <= SMALL})
        self._layouts.put(digest, layout, len(layout.text) + layout.nbytes + SMALL)
        return layout

    def _inputs_of(self, image: PlacedImage) -> ProcessedImage | None:
        """The tower's inputs; None as long as a thread makes them. Raises RequestError if it could not."""
        if (future := self._making.get(image.digest)) is not None:
            if not future.done():
                return None
            del self._making[image.digest]
            if (error := future.result()) is not None:
                raise error
        found: ProcessedImage | None = self._inputs.get(image.digest)
        if found is None:
            self._making[image.digest] = self._threads.submit(self._make_inputs, image)
        return found

    def _make_inputs(self, image: PlacedImage) -> RequestError | None:
        try:
            self._process(image.picture, image.digest, is_next=True)
        except RequestError as error:
            return RequestError(error.code, str(error))  # without frames, which hold pixels
        except BaseException as error:
            return RequestError("internal_error", f"{image.picture.name} cannot be processed: {in_short(error)}")
        return None

    def _encode(self, wanted: Iterable[_Wanted]) -> list[tuple[TokenSequence, RequestError]]:
        """Computes images, together where they have one shape. Returns the requests of those that failed, and why."""
        groups, failed = dict[Hashable, list[list[_Wanted]]](), list[tuple[TokenSequence, RequestError]]()
        for one in wanted:
            alike = groups.setdefault(one.shape, [[]])
            if (len(alike[-1]) + 1) * one.inputs.nbytes > self._together_bytes:
                alike.append([])
            alike[-1].append(one)
        started = time.perf_counter()
        for group in chain.from_iterable(groups.values()):
            if time.perf_counter() - started > STEP_SECONDS:  # the oldest prompt's come first
                break
            if len(group) > 1 and self._encode_together(group) is None:
                continue
            for one in group:
                if (error := self._encode_together([one])) is not None:
                    self._inputs.drop(one.image.digest)
                    failed += [(sequence, error) for sequence in one.sequences]
        return failed

    def _encode_together(self, group: Sequence[_Wanted]) -> RequestError | None:
        """Computes images of one shape. Returns why it cannot: the tower fails, or has no memory twice."""
        started, names = time.perf_counter(), [one.image.digest for one in group]
        for is_last in (False, True):
            try:
                found = self._vision.features([one.inputs for one in group])
                break
            except RequestError as error:
                return error
            except Exception as error:
                problem, is_final = in_short(error), is_last or not is_out_of_memory(error)
                clear_frames(error)
            if is_final:
                return RequestError("internal_error", f"{group[0].image.picture.name} cannot be encoded: {problem}")
            release_memory(self._device)
        seconds = time.perf_counter() - started
        self.num_encoded, self.encoding_s = self.num_encoded + len(group), self.encoding_s + seconds
        for name, rows, one in zip(names, found, group, strict=True):
            self._inputs.drop(name)
            self._features.put(name, rows, rows.nbytes)
            self._ready[name] = rows
            one.sequences[0].request.images_s += seconds / len(group)
        return None
