"""Images of many requests: bounded memory, bounded steps, and pictures that break nobody else's request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.base.outputs import TokenEvent
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.engine import loading
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model import images as images_module
from cbatch.model.hf.vision import Vision
from cbatch.model.images import TOGETHER_BYTES
from tests.support.image_model import save_image_model, save_picture

pytestmark = pytest.mark.usefixtures("in_folder")
ROWS = 16
"""Of an image of the model."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def make_engine(model: Path) -> Iterator[Callable[..., SteppingEngine]]:
    made: list[SteppingEngine] = []

    def make(**config: Any) -> SteppingEngine:
        made.append(SteppingEngine(EngineConfig(model=str(model), device="cpu", dtype="float32", **config)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def ask(engine: SteppingEngine, *pictures: int, text: str = "?", tokens: int = 6) -> Request:
    """Submits a request with pictures of these numbers."""
    for number in pictures:
        if not (path := Path(f"{number}.png")).exists():
            save_picture(path, number)
    content: Any = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
    given = [(f"{number}.png", f"image {place}") for place, number in enumerate(pictures, start=1)]
    request = Request(messages=[{"role": "user", "content": content if pictures else text}], given_pictures=given)
    made = engine.input_processor().process(request, bytes, SamplingParams(max_tokens=tokens, ignore_eos=True))
    assert isinstance(made, Request), str(made.error)
    engine.add_request(made)
    return made


def run(engine: SteppingEngine) -> dict[int | None, list[TokenEvent]]:
    """The events of each request."""
    events: dict[int | None, list[TokenEvent]] = {}
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
        engine.scheduler.check_integrity()
    return events


def tokens_of(engine: SteppingEngine, *pictures: int, **options: Any) -> list[int | None]:
    request = ask(engine, *pictures, **options)
    return [event.token_id for event in run(engine)[request.request_id]]


def parts(engine: SteppingEngine) -> tuple[Any, Any]:
    """The object that keeps its images, and the model's vision."""
    assert engine._images is not None
    return engine._images, engine.loaded.vision


def test_memory_is_bounded_and_the_same_tokens_come(
    make_engine: Callable[..., SteppingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the memory of inputs, which many waiting requests would fill, and those that had to be made again."""
    alone = make_engine(max_seqs=2)
    expected = [tokens_of(alone, number) for number in range(12)]
    assert len(set(map(tuple, expected))) > 6
    images, vision = parts(engine := make_engine(max_seqs=2, media_cache="0"))
    size = vision.process(np.zeros((40, 40, 3), np.uint8)).nbytes
    monkeypatch.setattr(images_module, "INPUT_BYTES", 2 * size)
    images._inputs._most, images._input_bytes, most = 3 * size, size, 0
    requests = [ask(engine, number) for number in range(12)]
    is_kept = [images._inputs.get(one.images[0].digest) is not None for one in requests]
    assert is_kept == [True] * 3 + [False] * 9
    found: dict[int | None, list[int | None]] = {}
    while engine.has_work:
        for event in engine.step():
            found.setdefault(event.request_id, []).append(event.token_id)
        most = max(most, images._inputs._bytes)
    assert [found[one.request_id] for one in requests] == expected
    assert most <= 6 * size and images._inputs._bytes == 0 and images._ready == {}
    assert (images.num_given, images.num_encoded, images._features._bytes) == (12, 12, 0)


def test_inputs_of_failed_requests_leave() -> None:
    """Guards memory that would stay full of images of requests that never come."""
    held = images_module._Bounded(2, keeps_first=True)
    for name in ("first", "second", "third"):
        held.put(name, name, 1)
    assert held.get("third") is None
    held.put("next", "next", 1, at_any_rate=True)
    assert (held.get("next"), held._bytes) == ("next", 3)
    for _ in range(images_module.STALE):
        held.put("other", "other", 1)
    assert held.get("first") is None and held._bytes <= 2


def test_the_engine_decodes_nothing_and_waits_for_nobody(
    make_engine: Callable[..., SteppingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards requests that would wait for a picture of another one, which takes long to decode."""
    images, _ = parts(engine := make_engine())
    slow = ask(engine, 1)
    images._inputs.drop(slow.images[0].digest)
    go_on, threads, decode = threading.Event(), list[str](), images_module.decode

    def decode_late(picture: Any) -> Any:
        threads.append(threading.current_thread().name)
        assert go_on.wait(60)
        return decode(picture)

    monkeypatch.setattr(images_module, "decode", decode_late)
    quick = ask(engine, text="no picture")
    events: list[TokenEvent] = []
    while not events or events[-1].finish_reason is None:
        events += engine.step()
    assert {event.request_id for event in events} == {quick.request_id}
    go_on.set()
    assert len(run(engine)[slow.request_id]) == 6
    assert threads and all(name.startswith("cbatch-images") for name in threads)


@pytest.mark.parametrize("change", ["deleted", "changed"])
def test_a_picture_that_is_gone_fails_its_request_only(make_engine: Callable[..., SteppingEngine], change: str) -> None:
    """Guards the other requests of a step, and rows of one picture that would stand for another."""
    images, _ = parts(engine := make_engine())
    requests = [ask(engine, number) for number in range(3)]
    images._inputs.drop(requests[1].images[0].digest)
    Path("1.png").unlink()
    if change == "changed":
        save_picture(Path("1.png"), 77)
    events = run(engine)
    assert [len(events[one.request_id]) for one in requests] == [6, 1, 6]
    error = events[requests[1].request_id][0].error
    assert error is not None and error.code == "invalid_row"
    assert str(error) == "image 1 (1.png) " + (
        "cannot be read: No such file or directory" if change == "deleted" else "has changed since it was read"
    )
    assert not engine._requests


@pytest.mark.parametrize(("error", "times", "fails"), [
    (ValueError("a strange picture"), 1, True),
    (torch.OutOfMemoryError("CUDA out of memory"), 1, False),
    (torch.OutOfMemoryError("CUDA out of memory"), 2, True),
])  # fmt: skip
@pytest.mark.parametrize("together", [False, True])
def test_a_tower_that_raises_fails_its_request_only(
    make_engine: Callable[..., SteppingEngine],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    times: int,
    fails: bool,
    together: bool,
) -> None:
    """Guards the other requests, and a second try if memory ran out. What fails beside others is computed alone."""
    images, vision = parts(engine := make_engine())
    images._together_bytes = TOGETHER_BYTES if together else 0
    times *= 1 + (together and fails)
    requests = [ask(engine, number) for number in range(3)]
    bad, compute, left = images._inputs.get(requests[1].images[0].digest), vision.features, [error] * times

    def features(images: Sequence[Any]) -> Any:
        if left and any(one is bad for one in images):
            raise left.pop()
        return compute(images)

    monkeypatch.setattr(vision, "features", features)
    events = run(engine)
    assert [len(events[one.request_id]) for one in requests] == [6, 1 if fails else 6, 6]
    if fails:
        assert str(events[requests[1].request_id][0].error) == f"image 1 (1.png) cannot be encoded: {said(error)}"
    assert images._inputs._bytes == 0 and not left


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if isinstance(error, ValueError) else str(error)


def test_a_step_encodes_about_as_much_as_it_computes(
    make_engine: Callable[..., SteppingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the time between tokens: the tower would compute all images of all prompts first."""
    _, vision = parts(engine := make_engine(max_batch_tokens=4 * ROWS, max_seqs=8))
    compute, counts = vision.features, list[int]()

    def features(images: Sequence[Any]) -> Any:
        counts[-1] += len(images)
        return compute(images)

    monkeypatch.setattr(vision, "features", features)
    decoding = ask(engine, text="x", tokens=100)
    while engine.num_computed(decoding) < len(decoding.prompt_ids):
        engine.step()
    prompt = ask(engine, *range(6), tokens=1)
    while engine._requests.get(prompt.request_id or 0):
        counts.append(0)
        events = engine.step()
        assert decoding.request_id in [event.request_id for event in events]
    assert sum(counts) == 6 and max(counts) == 2


def test_the_oldest_prompt_advances(make_engine: Callable[..., SteppingEngine]) -> None:
    """Guards a long prompt, whose images would never come because shorter prompts are always there."""
    engine = make_engine(max_batch_tokens=ROWS, max_seqs=4, prefix_cache=False)
    long = ask(engine, *range(6), tokens=1)
    engine.step()
    for number in range(100):
        ask(engine, number % 50 + 10, tokens=1)
        engine.step()
        if long.request_id not in engine._requests:
            return
    pytest.fail("The long prompt was not computed.")


def test_equal_images_are_computed_once(make_engine: Callable[..., SteppingEngine]) -> None:
    """Guards --media-cache, and rows that a request needs still after they have left it."""
    expected = tokens_of(make_engine(), 1, 2)
    for size, encoded in (("1MiB", 2), ("0", 4)):
        images, _ = parts(engine := make_engine(media_cache=size, prefix_cache=False, max_batch_tokens=7))
        assert [tokens_of(engine, 1, 2) for _ in range(2)] == [expected, expected]
        assert images.num_encoded == encoded
        stats = engine.stats()
        assert (stats.num_images, stats.num_encoded_images) == (4, encoded) and stats.images_s > 0


def test_an_image_without_tokens_is_an_error(
    make_engine: Callable[..., SteppingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the step of other requests, and an answer that would not be about the picture."""
    _, vision = parts(engine := make_engine())
    process = vision.process
    monkeypatch.setattr(vision, "process", lambda pixels, is_alone: process(pixels)._replace(text="", num_rows=0))
    with pytest.raises(AssertionError, match=r"image 1 \(1.png\) stands for no token of this model"):
        ask(engine, 1)


def test_the_tower_comes_before_the_cache(
    make_engine: Callable[..., SteppingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the memory of a GPU, of which the KV cache takes nearly all that is free."""
    empty, measure, seen = torch.empty, loading.measure_cache, list[Any]()

    def measured(*arguments: Any) -> Any:
        seen.append("measured")
        return measure(*arguments)

    def made(size: Any, *arguments: Any, **options: Any) -> Any:
        seen.extend([size] if size == 12345 else [])
        return empty(size, *arguments, **options)

    monkeypatch.setattr(loading, "is_accelerator", lambda device: True)
    monkeypatch.setattr(loading, "measure_cache", measured)
    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(Vision, "load", lambda vision: seen.append("loaded"))
    make_engine(media_cache="12345")
    assert seen == ["loaded", 12345, "measured"]
    with pytest.raises(ConfigError, match=r"--media-cache is an amount of memory"):
        make_engine(media_cache="50%")
