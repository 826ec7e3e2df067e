"""Streams, for loops and for asyncio: in any order, left at any point, read by anybody."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from cbatch.api import Engine
from cbatch.base.params import SamplingParams
from cbatch.engine.streams import AsyncStream, Stream
from cbatch.requests.output_processor import StreamEvent
from tests.support.faults import wait_until
from tests.support.shared_engine import (
    LONG,
    SHORT,
    check_idle,
    new_engine,
)
from tests.support.tiny_models import make_prompts, no_collector

WHOLE = SamplingParams(max_tokens=40)
"""For outputs that are read to their end."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    with new_engine() as made:
        yield made


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """An engine that other tests use, too: each must leave it idle."""
    yield shared
    check_idle(shared)


@pytest.fixture
def slow_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Its steps take at least 10 ms. The requests of the test must not run to their end."""
    forward, before = engine.core.runner.forward, engine.stats().num_tokens
    monkeypatch.setattr(engine.core.runner, "forward", lambda batch: (time.sleep(0.01), forward(batch))[1])
    yield engine
    assert engine.stats().num_tokens - before < 140


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Runs a loop of asyncio, and fails if it hangs."""
    return asyncio.run(asyncio.wait_for(main, timeout=20))


# Leaving a stream.


def drop(stream: Stream) -> None:
    """Nobody holds it any more."""


def abandon(stream: Stream) -> None:
    """A generator that reads it is left."""

    def texts() -> Iterator[str]:
        for event in stream:
            yield event.text

    next(texts())


def fail(stream: Stream) -> None:
    """Its consumer raises."""
    with pytest.raises(ZeroDivisionError), stream:
        next(stream)
        raise ZeroDivisionError


@pytest.mark.parametrize("leave", [drop, abandon, fail, Stream.close], ids=lambda leave: leave.__name__)
@pytest.mark.parametrize("num_read", [0, 7])
def test_leaving_a_stream_frees_it(slow_engine: Engine, leave: Callable[[Stream], None], num_read: int) -> None:
    """Guards the cache against streams that are left half-way, without help from the collector of cycles."""
    with no_collector():
        stream = slow_engine.stream([[1, 2], [3]], LONG)
        for _ in range(num_read):
            next(stream)
        leave(stream)
        del stream
        check_idle(slow_engine, within_s=1)


def test_an_idle_engine_holds_no_request(engine: Engine) -> None:
    """Guards the memory of prompts and results that were read, while the engine waits for the next request."""
    with no_collector():
        stream = engine.stream([1, 2], SHORT)
        (reader,) = (weakref.ref(request.on_event) for request in stream._group._submitted)
        assert len(list(stream)) == 6
        del stream
        check_idle(engine)
        wait_until(lambda: reader() is None, 1)


def test_closing_a_stream_wakes_its_reader(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a thread or a task that waits for an event of a stream which another one closes."""
    forward, is_reached, may_go_on = engine.core.runner.forward, threading.Event(), threading.Event()

    def blocked(batch: Any) -> Any:
        is_reached.set()
        assert may_go_on.wait(60)
        return forward(batch)

    async def main() -> None:
        waited = engine.astream([1, 2], LONG)
        task = asyncio.create_task(rest_of(waited))
        await asyncio.sleep(0.02)
        await waited.aclose()
        assert await task == []

    monkeypatch.setattr(engine.core.runner, "forward", blocked)
    stream, events = engine.stream([1, 2], LONG), list[StreamEvent]()
    reader = threading.Thread(target=lambda: events.extend(stream), daemon=True)
    reader.start()
    assert is_reached.wait(20)
    time.sleep(0.02)  # now it waits
    stream.close()
    reader.join(timeout=20)
    assert not reader.is_alive() and not events
    run(main())
    may_go_on.set()


def test_threads_share_the_events_of_a_stream(engine: Engine) -> None:
    """Guards a stream that several threads or tasks read: each event goes to one of them, and all come to an end."""
    prompts = make_prompts([5, 9])
    alone = [list(one.token_ids) for one in engine.generate(prompts, WHOLE)]
    stream, events = engine.stream(prompts, WHOLE), list[StreamEvent]()
    readers = [threading.Thread(target=lambda: events.extend(iter(stream)), daemon=True) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(timeout=20)
    assert not any(reader.is_alive() for reader in readers)
    assert sorted(event.index for event in events) == [0] * 40 + [1] * 40
    done = {event.index: event.completion for event in events if event.completion is not None}
    assert [list(done[index].token_ids) for index in (0, 1)] == alone

    async def main() -> list[list[StreamEvent]]:
        stream = engine.astream(prompts, WHOLE)
        return await asyncio.gather(*[rest_of(stream) for _ in range(3)])

    assert sorted(event.index for read in run(main()) for event in read) == [0] * 40 + [1] * 40


def test_a_stream_keeps_its_engine() -> None:
    """Guards streams and maps of an engine that nobody else holds: it is closed after them, and not before."""

    def stream() -> Iterator[StreamEvent]:
        return new_engine().stream([[1, 2], [3]], SHORT)

    async def astream() -> list[StreamEvent]:
        return [event async for event in new_engine().astream([[1, 2], [3]], SHORT)]

    before = set(threading.enumerate())
    assert len(list(stream())) == len(run(astream())) == 12
    assert [one.error for one in new_engine().map([[1, 2], [3]], params={"max_tokens": 6})] == [None, None]
    gc.collect()
    wait_until(lambda: not set(threading.enumerate()) - before, 5)


# Loops of asyncio.


@pytest.mark.parametrize("num_read", [0, 5])
@pytest.mark.parametrize("way", ["break", "aclose", "async with", "cancel", "timeout"])
def test_leaving_an_async_stream_frees_it(slow_engine: Engine, way: str, num_read: int) -> None:
    """Guards the cache against tasks that leave a stream; a cancelled one frees it even while its task is held."""

    async def read(stream: AsyncStream, count: int) -> None:
        for _ in range(count):
            await anext(stream)

    async def main() -> None:
        stream = slow_engine.astream([[1, 2], [3]], LONG)
        await read(stream, num_read)
        if way == "break":
            del stream
        elif way == "aclose":
            await stream.aclose()
            assert [event async for event in stream] == []
        elif way == "async with":
            with pytest.raises(ZeroDivisionError):
                async with stream:
                    raise ZeroDivisionError
        elif way == "cancel":
            task = asyncio.create_task(read(stream, 200))
            await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.wait([task])
            await asyncio.to_thread(check_idle, slow_engine, within_s=1)
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(read(stream, 10**6), timeout=0.03)
        await asyncio.to_thread(check_idle, slow_engine, within_s=1)

    run(main())


@pytest.mark.parametrize("when", ["encoding", "running"])
def test_cancelling_a_call_cancels_its_requests(
    slow_engine: Engine, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards `agenerate` and `astream` in tasks that are cancelled, also while their prompts are encoded."""
    engine, encoding, may_go_on = slow_engine, threading.Event(), threading.Event()
    encoded = engine._encoded

    def encode(*args: Any) -> Any:
        requests = encoded(*args)
        encoding.set()
        return (one for one in requests if may_go_on.wait(20))

    monkeypatch.setattr(engine, "_encoded", encode)
    if when == "running":
        may_go_on.set()

    async def main() -> None:
        tasks = [
            asyncio.create_task(engine.agenerate([1, 2], LONG)),
            asyncio.create_task(rest_of(engine.astream([1, 2], LONG))),
        ]
        assert await asyncio.to_thread(encoding.wait, 20)
        started = engine.stats().num_tokens
        while when == "running" and engine.stats().num_tokens < started + 2:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        may_go_on.set()
        await asyncio.wait(tasks)
        assert tasks[0].cancelled()

    before = engine.stats().num_tokens
    run(main())
    check_idle(engine, within_s=1)
    assert (engine.stats().num_tokens == before) == (when == "encoding")


async def rest_of(stream: AsyncIterator[StreamEvent]) -> list[StreamEvent]:
    return [event async for event in stream]


def test_a_loop_that_is_closed_early_cancels_its_requests(slow_engine: Engine) -> None:
    """Guards the cache against a stream whose loop is closed, even with a wake-up pending, while it is still held."""
    loop = asyncio.new_event_loop()
    stream = slow_engine.astream([1, 2], LONG)

    loop.run_until_complete(anext(stream))  # type: ignore[arg-type]
    num_tokens = slow_engine.stats().num_tokens
    wait_until(lambda: slow_engine.stats().num_tokens > num_tokens + 1)  # events come, and the loop does not run
    loop.close()
    check_idle(slow_engine, within_s=1)
    assert not stream._is_closed
