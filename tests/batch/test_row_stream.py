"""The stream of rows: what is given before it ends, and what becomes of rows in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cbatch.base.config import EngineConfig
from cbatch.base.errors import EngineError
from cbatch.base.request import RequestDefaults
from cbatch.batch.engine_driver import EngineStream
from cbatch.batch.line_processor import LineProcessor
from cbatch.batch.lines import Line
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.engine.thread import EngineThread
from tests.support.faults import slow_steps, wait_until


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[SteppingEngine]:
    with SteppingEngine(EngineConfig(model=str(model_folder), device="cpu", max_seqs=4)) as made:
        yield made


@pytest.fixture
def engine_thread(engine: SteppingEngine) -> Iterator[EngineThread]:
    made = EngineThread(engine)
    yield made
    made.close()
    assert made.failure is None and engine.scheduler.pool.num_used == 0


def stream_on(engine_thread: EngineThread, window: int = 8, max_tokens: int = 2) -> EngineStream:
    defaults = RequestDefaults(params={"max_tokens": max_tokens, "ignore_eos": True})
    return EngineStream(engine_thread, LineProcessor(engine_thread.engine.input_processor(defaults)), window=window)


def endless() -> Iterator[Line]:
    index = 0
    while True:
        yield Line(index, b'{"prompt": "a"}')
        index += 1


def wait_for_reader_to_end() -> None:
    wait_until(lambda: all(thread.name != "cbatch-reader" for thread in threading.enumerate()))


def test_many_heavy_rows_wait_unread(engine_thread: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory: rows are read as far as their weight allows, however many the window may hold."""
    monkeypatch.setattr("cbatch.batch.engine_driver.WINDOW_BYTES", 2**20)
    num_taken = 0

    def heavy() -> Iterator[Line]:
        nonlocal num_taken
        while True:
            num_taken += 1
            yield Line(num_taken, b'{"prompt": "a", "note": "%s"}' % (b"x" * 100_000))

    with closing(stream_on(engine_thread, window=1000).finished(heavy())) as finished:
        num_finished = 0
        while num_finished < 3:
            num_finished += len(next(finished))
        next(finished)
    assert num_taken == 4  # the last one waits for a place
    wait_for_reader_to_end()


def test_leaving_the_iteration_cancels_what_is_in_flight(engine_thread: EngineThread) -> None:
    """Guards the engine against requests of a consumer that went away, and against a reader that waits for ever."""
    stream = stream_on(engine_thread, max_tokens=90)
    with slow_steps(), closing(stream.finished(endless())) as finished:
        next(finished)
        wait_until(lambda: engine_thread.engine.stats().num_running >= 4)
    wait_for_reader_to_end()
    wait_until(lambda: engine_thread.engine.stats().num_running == 0)
    assert engine_thread.engine.stats().num_waiting == 0


@pytest.mark.parametrize(
    "error", [KeyError("the source broke"), SystemExit("the source broke"), KeyboardInterrupt("Ctrl-C")]
)
def test_what_the_source_raises_comes_after_the_rows_before_it(
    engine_thread: EngineThread, error: BaseException
) -> None:
    """Guards rows against an input that breaks off, its error against being wrapped, and exits against a hang."""

    def breaking() -> Iterator[Line]:
        yield from (Line(index, b'{"prompt": "a"}') for index in range(5))
        raise error

    found = []
    with pytest.raises(type(error), match=str(error)):
        for requests in stream_on(engine_thread).finished(breaking()):
            found += [request.completion.index for request in requests]
    assert sorted(found) == list(range(5))


@pytest.mark.parametrize("source", [endless, lambda: iter([Line(index, b'{"prompt": "a"}') for index in range(9)])])
def test_closing_the_engine_ends_the_stream(engine: SteppingEngine, source: Callable[[], Iterator[Line]]) -> None:
    """Guards against error rows for requests that a closed engine has lost, and against reading on for ever."""
    engine_thread, found = EngineThread(engine), []
    with slow_steps(), pytest.raises(EngineError, match="closed before the last row was finished"):
        for rows in stream_on(engine_thread, window=100, max_tokens=90).finished(source()):
            found += [row.completion for row in rows]
            if engine.stats().num_running:
                engine_thread.close()
    assert all(completion.error is None for completion in found)
    wait_for_reader_to_end()


def test_closing_the_engine_after_the_last_row_is_no_error(engine: SteppingEngine) -> None:
    """Guards complete results against an engine that is closed while the consumer still reads."""
    engine_thread, found = EngineThread(engine), []
    lines = [Line(index, b'{"prompt": "a"}') for index in range(3)]
    stream = stream_on(engine_thread)
    for rows in stream.finished(iter(lines)):
        found += rows
        if stream.has_given_all:
            engine_thread.close()
    assert len(found) == 3
