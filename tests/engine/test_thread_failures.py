"""No thread that fails leaves another waiting: whatever it raises, the run ends with a sentence."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.base.errors import EngineError
from cbatch.base.request import Request, RequestDefaults
from cbatch.batch.engine_driver import EngineStream
from cbatch.batch.line_processor import LineProcessor
from cbatch.batch.lines import Line, RowOptions
from cbatch.batch.rounds import Rounds
from cbatch.batch.row import Row
from cbatch.batch.writer import RowWriter, run_stream
from cbatch.engine import streams
from cbatch.engine.model_runner import ModelRunner
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.engine.thread import EngineThread
from cbatch.model.loader import LoadedModel
from cbatch.requests.completion import Choice, Completion
from cbatch.requests.input_processor import InputProcessor
from cbatch.requests.output_processor import OutputProcessor
from cbatch.validation.validation import Validation
from tests.support.faults import TIMEOUT_S, Fault, Panic, in_time
from tests.support.queued_requests import queued
from tests.support.samples import sampled

FAULTS = [Panic("boom"), MemoryError("boom"), ValueError("boom")]
WORST = sampled(FAULTS, 1, keep=FAULTS[:1])


@pytest.fixture(scope="module")
def loaded(model_folder: Path) -> Iterator[LoadedModel]:
    with Engine(EngineConfig(model=str(model_folder), device="cpu")) as made:
        yield made.loaded


@pytest.fixture
def engine(loaded: LoadedModel) -> Iterator[Engine]:
    with Engine(EngineConfig(device="cpu", max_seqs=4), loaded=loaded) as made:
        yield made


PLACES: dict[str, tuple[type, str, bool]] = {
    "the reader, encoding": (InputProcessor, "encode", False),
    "the reader, before the row": (LineProcessor, "process", False),
    "the reader, submitting": (EngineStream, "_submit", False),
    "the engine's thread, adding": (SteppingEngine, "add_request", False),
    "the engine's thread, stepping": (SteppingEngine, "step", True),
    "the engine's thread, at its start": (ModelRunner, "warm_up_thread", True),
    "the engine's thread, delivering": (EngineThread, "_deliver", False),
    "the engine's callback": (OutputProcessor, "take", False),
    "the engine's callback, always": (OutputProcessor, "take", True),
    "the consumer": (OutputProcessor, "completion", False),
}


@pytest.mark.parametrize("error", WORST, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", PLACES)
def test_a_run_ends_whatever_a_thread_raises(
    place: str, error: BaseException, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards every thread of a batch: each row has its outcome, or the run ends with an error that can be told."""
    owner, name, always = PLACES[place]
    Fault(monkeypatch, owner, name, error, always=always)
    written: list[int] = []

    class Output(RowWriter):
        def write(self, rows: Sequence[Row]) -> Iterable[int]:
            written.extend(row.index for row in rows)
            return super().write(rows)

    defaults = RequestDefaults(params={"max_tokens": 2, "ignore_eos": True})
    stream = EngineStream(engine.thread, LineProcessor(engine.core.input_processor(defaults)), window=4)
    lines = [Line(index, b'{"prompt": "a"}') for index in range(6)]
    ended = in_time(lambda: run_stream(stream, Output(), lines, lambda rows: None))
    assert ended is None or (isinstance(ended, EngineError | Exception) and "boom" in str(ended))
    assert ended is not None or sorted(written) == list(range(6))


@pytest.mark.parametrize("error", WORST, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", ["the engine's thread, stepping", "the engine's callback, always"])
def test_the_callers_of_an_engine_are_told(
    place: str, error: BaseException, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards programs: what fails on the engine's thread reaches whoever waits, in each way of waiting."""
    owner, name, always = PLACES[place]
    monkeypatch.setattr(streams, "POLL_SECONDS", 0.05)
    Fault(monkeypatch, owner, name, error, always=always)

    async def generate() -> Any:
        return await engine.agenerate("a", {"max_tokens": 2})

    ways: list[Callable[[], Any]] = [
        lambda: engine.generate("a", {"max_tokens": 2}),
        lambda: [event.completion for event in engine.stream("a", {"max_tokens": 2})][-1],
        lambda: asyncio.run(generate()),
    ]
    for way in ways:
        ended = in_time(way)
        assert "boom" in str(ended if isinstance(ended, EngineError) else ended.error)


@pytest.mark.parametrize("error", WORST, ids=lambda error: type(error).__name__)
def test_a_round_that_breaks_ends_its_row(error: BaseException) -> None:
    """Guards rows whose tools run or whose answers are checked, on threads whose errors nobody sees otherwise."""
    asked: list[Any] = []
    done = threading.Event()

    class Broken(Rounds):
        def _dialog(self, request: Request) -> Iterator[Any]:  # type: ignore[override]
            yield request
            raise error

    def ask(*arguments: Any) -> None:
        asked.append(arguments[1])
        done.set()

    loop = Broken(RowOptions(validation=Validation.of([bool])), None, ask)  # type: ignore[arg-type]
    row = queued(0, Request(prompt_ids=[1], where="line 1"))
    assert loop.take(row, Completion(row.request, choices=[Choice(text="a")]))
    assert done.wait(TIMEOUT_S) and asked[0].error.code == "internal_error" and "boom" in str(asked[0].error)
    loop.close()
