"""Many callers on one engine: each of their results must be the one that the same request gets alone."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.engine.streams import AsyncStream, Mailbox, Stream
from cbatch.requests.completion import Completion
from cbatch.requests.output_processor import OutputProcessor, StreamEvent
from tests.support.faults import wait_until
from tests.support.tiny_models import loaded, make_network

Row = dict[str, Any]

ROWS: list[Row] = [
    {"prompt": "hello", "max_tokens": 9},
    {"prompt": "hello world", "max_tokens": 12, "temperature": 1.0},
    {"prompt": "hello world", "max_tokens": 8, "temperature": 1.0, "n": 3},
    {"prompt": "user", "max_tokens": 30, "stop": ["e", "x", "st"], "temperature": 1.0},
    {"prompt": "user", "max_tokens": 20, "stop": ["a"], "n": 2, "temperature": 1.0},
    {"prompt": "system", "max_tokens": 10, "regex": "[ab]{3,9}", "temperature": 1.0},
    {"prompt": "system", "max_tokens": 10, "choice": ["hello", "world"]},
    {"prompt": "assistant", "max_tokens": 6, "logprobs": 2},
    {"prompt": "plain text", "raw": True, "max_tokens": 15, "top_p": 0.8, "temperature": 1.0},
    {"prompt_token_ids": [5, 6, 7, 8], "max_tokens": 18},
    {"prompt_token_ids": [9] * 40, "max_tokens": 3},
    {"prompt_token_ids": [9] * 40, "max_tokens": 4, "prompt_logprobs": 1},
    {"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}], "max_tokens": 7},
    {"prompt": "hello", "max_tokens": 60, "repetition_penalty": 1.2, "ignore_eos": True},
    {"prompt_token_ids": [], "max_tokens": 3},
    {"prompt_token_ids": [99999], "max_tokens": 3},
    {"prompt_token_ids": [3] * 500, "max_tokens": 3},
    {"messages": [{"role": "stranger", "content": "hi"}], "max_tokens": 3},
    {"prompt": "hello", "temperature": -1},
    {"prompt": "hello", "regex": "[unclosed"},
]
"""Requests of all kinds, some of them wrong."""
ROWS = [{"seed": number, **row} for number, row in enumerate(ROWS)]

Outcome = str | list[tuple[Any, ...]]

SHORT, LONG = SamplingParams(max_tokens=6), SamplingParams(max_tokens=140)
CONFIG = EngineConfig(block_size=4, kv_blocks=96, device="cpu")


def new_engine() -> Engine:
    """An engine without a tokenizer."""
    return Engine(CONFIG, loaded=loaded(make_network("llama")))


def make_engine(folder: Path) -> Engine:
    """A shared engine whose cache holds a few of the rows at once, so that some wait and some are preempted."""
    return Engine(folder, device="cpu", dtype="float32", block_size=4, kv_blocks=70, max_seqs=12, max_batch_tokens=64)


def outcome(completion: Completion) -> Outcome:
    """Parts no other request may change."""
    if completion.error is not None:
        return completion.error.code
    return [(one.text, one.reasoning, one.finish_reason, tuple(one.token_ids)) for one in completion.choices]


def outcomes_alone(folder: Path, rows: Sequence[Row] = ROWS) -> list[Outcome]:
    """The outcome of each row, one after the other on an engine of its own."""
    with make_engine(folder) as engine:
        return [outcome(engine.generate(row)) for row in rows]


class StreamChecker:
    """Takes the events of a stream, and compares their texts with those of the completions."""

    def __init__(self) -> None:
        self.completions: dict[int, Completion] = {}
        self._texts: Counter[tuple[int, int]] = Counter()
        self._read: dict[tuple[int, int], str] = {}

    def take(self, event: StreamEvent) -> None:
        place = event.index, event.sample_index
        assert event.index not in self.completions, "an event came after its request's completion"
        self._read[place] = self._read.get(place, "") + event.text
        if (completion := event.completion) is not None:
            self.completions[event.index] = completion
            for choice in completion.choices if completion.error is None else ():
                assert self._read[event.index, choice.index] == choice.text

    def outcomes(self) -> list[Outcome]:
        return [outcome(completion) for _, completion in sorted(self.completions.items())]


def read_all(events: Iterable[StreamEvent]) -> list[Outcome]:
    """The outcomes of a stream's requests, by their number."""
    checker = StreamChecker()
    for event in events:
        checker.take(event)
    return checker.outcomes()


def check_idle(engine: Engine, *, within_s: float = 10.0) -> None:
    """Waits until the engine has nothing to do, and asserts that no request has left anything behind."""
    core, thread = engine.core, engine.thread
    wait_until(lambda: not (thread._requests or core._requests or core.has_work) and thread._inbox.empty(), within_s)
    assert core.scheduler.pool.num_used == 0, "blocks leak"
    core.scheduler.check_integrity()


def alive(*kinds: type, before: Sequence[Any] = ()) -> list[Any]:
    """The objects of exactly these kinds that somebody still holds.

    before: objects that do not count: those of other tests in this process
    """
    gc.collect()
    known = {id(one) for one in before}
    return [found for found in gc.get_objects() if type(found) in kinds and id(found) not in known]


def still_alive(*kinds: type, before: Sequence[Any], within_s: float = 5.0) -> str:
    """Names and numbers of the objects that somebody still holds after so long, or nothing.

    A thread that has done its work may be about to leave what it held.
    """
    deadline = time.monotonic() + within_s
    while held := alive(*kinds, before=before):
        if time.monotonic() > deadline:
            return str(dict(Counter(type(one).__name__ for one in held)))
        held.clear()
        time.sleep(0.01)
    return ""


PER_REQUEST = (Request, OutputProcessor, Stream, AsyncStream, Mailbox)


class ConsumerError(Exception):
    """Raised by a consumer of results on purpose."""


class SharedEngineStress:
    """Threads that use one engine in every way at once, for some time."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._expected = outcomes_alone(folder)
        self._seed = seed
        self._folder = folder

    def run(self, num_threads: int, seconds: float) -> None:
        """Raises AssertionError if a result differs from the one alone, or if anything is left behind."""
        threads_before = set(threading.enumerate())
        before = alive(*PER_REQUEST, asyncio.Future, asyncio.Task)
        with make_engine(self._folder) as engine:
            stop_at = time.monotonic() + seconds
            threads = [
                threading.Thread(target=self._work, args=(engine, number, stop_at), name=f"caller-{number}")
                for number in range(num_threads)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout=seconds + 60)
            hanging = [thread.name for thread in threads if thread.is_alive()]
            assert not hanging, f"{hanging} wait for ever"
            assert not self.failures, "\n".join(self.failures[:3])
            assert engine.stats().num_retries == 0, engine.stats().last_error
            check_idle(engine)
            held = still_alive(*PER_REQUEST, before=before)
            assert not held, f"somebody still holds {held}"
            pending = [one for one in alive(asyncio.Future, asyncio.Task, before=before) if not one.done()]
            assert not pending, f"futures are pending: {pending}"
            self.counts["preemptions"] = engine.stats().num_preemptions
            self.counts["tokens"] = engine.stats().num_tokens
        wait_until(lambda: not set(threading.enumerate()) - threads_before, 5)  # readers of maps that were left

    def _work(self, engine: Engine, number: int, stop_at: float) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        actions: list[Callable[[Engine, random.Random], None]] = [
            self._generate,
            self._stream,
            self._leave_stream,
            self._async,
            self._leave_async,
            self._map,
        ]
        while time.monotonic() < stop_at and not self.failures:
            action = rng.choice(actions)
            try:
                action(engine, rng)
            except BaseException:
                self.failures.append(f"{action.__name__} of caller {number}:\n{traceback.format_exc()}")
            self.counts[action.__name__.strip("_")] += 1

    def _pick(self, rng: random.Random) -> tuple[list[Row], list[Outcome]]:
        numbers = rng.choices(range(len(ROWS)), k=rng.randint(1, 4))
        return [ROWS[number] for number in numbers], [self._expected[number] for number in numbers]

    def _generate(self, engine: Engine, rng: random.Random) -> None:
        rows, expected = self._pick(rng)
        assert [outcome(one) for one in engine.generate(rows)] == expected

    def _stream(self, engine: Engine, rng: random.Random) -> None:
        rows, expected = self._pick(rng)
        assert read_all(engine.stream(rows)) == expected

    def _leave_stream(self, engine: Engine, rng: random.Random) -> None:
        """Two streams are open; one is left somehow, and the other is still right."""
        rows, expected = self._pick(rng)
        other, stream = engine.stream(rows), engine.stream(self._pick(rng)[0])
        num_read, way = rng.randint(0, 12), rng.randrange(4)
        with suppress(StopIteration, ConsumerError):
            for _ in range(num_read):
                next(stream)
            if way == 0:
                stream.close()
            elif way == 1:
                with stream:
                    raise ConsumerError
            elif way == 2:
                assert read_all(other) == expected
                raise ConsumerError
            else:
                threading.Thread(target=stream.close).start()
                for _ in stream:
                    pass
        del stream
        if way != 2:
            assert read_all(other) == expected

    def _async(self, engine: Engine, rng: random.Random) -> None:
        """A loop of its own with several tasks."""
        picked = [self._pick(rng) for _ in range(3)]

        async def read(rows: list[Row]) -> list[Outcome]:
            checker = StreamChecker()
            async for event in engine.astream(rows):
                checker.take(event)
            return checker.outcomes()

        async def complete(rows: list[Row]) -> list[Outcome]:
            return [outcome(one) for one in await engine.agenerate(rows)]

        async def main() -> list[list[Outcome]]:
            return list(await asyncio.gather(read(picked[0][0]), complete(picked[1][0]), read(picked[2][0])))

        assert asyncio.run(main()) == [expected for _, expected in picked]

    def _leave_async(self, engine: Engine, rng: random.Random) -> None:
        """Tasks are cancelled, streams are left, and another task is still right."""
        left, cancelled = self._pick(rng)[0], self._pick(rng)[0]
        rows, expected = self._pick(rng)
        delay, num_read = rng.random() * 0.1, rng.randint(0, 9)

        async def leave() -> None:
            stream = engine.astream(left)
            for _ in range(num_read):
                await anext(stream, None)

        async def main() -> list[Outcome]:
            kept = asyncio.create_task(engine.agenerate(rows))
            doomed = asyncio.create_task(engine.agenerate(cancelled))
            await leave()
            await asyncio.sleep(delay)
            doomed.cancel()
            with suppress(asyncio.CancelledError):
                await doomed
            return [outcome(one) for one in await kept]

        assert asyncio.run(main()) == expected

    def _map(self, engine: Engine, rng: random.Random) -> None:
        rows, expected = self._pick(rng)
        with closing(engine.map(rows * 3, window=4)) as results:
            num_taken = rng.randint(1, 3 * len(rows))
            taken = [outcome(result) for result, _ in zip(results, range(num_taken), strict=False)]
        assert taken == (expected * 3)[:num_taken]
