"""An engine that many share: each caller gets what it would get alone, and what ends early leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from cbatch.api import Engine
from cbatch.base.errors import EngineError
from cbatch.base.outputs import TokenEvent
from cbatch.base.params import SamplingParams
from cbatch.base.request import EventCallback, Request
from cbatch.engine.stats import StepRecord
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.engine.thread import EngineThread
from tests.support.faults import wait_until
from tests.support.generation import generate
from tests.support.shared_engine import CONFIG, LONG, SHORT, SharedEngineStress, check_idle, new_engine
from tests.support.tiny_models import loaded, make_network


def alone(prompt: list[int], params: SamplingParams = SHORT) -> Sequence[int]:
    return _alone(tuple(prompt), params)


@cache
def _alone(prompt: tuple[int, ...], params: SamplingParams) -> Sequence[int]:
    with new_engine() as engine:
        return engine.generate(prompt, params).token_ids


@pytest.fixture
def engine() -> Iterator[Engine]:
    with new_engine() as made:
        yield made


@pytest.fixture
def slow_engine(engine: Engine) -> Engine:
    """Each of its steps takes at least 20 ms, so that requests are unfinished for long."""
    forward = engine.core.runner.forward
    engine.core.runner.forward = lambda batch: (time.sleep(0.02), forward(batch))[1]  # type: ignore[method-assign]
    return engine


def run_together(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls that run on a thread each. Fails if one of them hangs."""
    pool = ThreadPoolExecutor(len(calls))
    try:
        return [future.result(timeout=20) for future in [pool.submit(call) for call in calls]]
    finally:
        pool.shutdown(wait=False)


def wait_for_tokens(engine: Engine, count: int = 1) -> None:
    wait_until(lambda: engine.stats().num_tokens >= count)


@pytest.mark.slow
def test_many_threads_use_an_engine_in_every_way(model_folder: Path) -> None:
    """Guards all of it at once: calls, streams, loops of asyncio, maps, cancelling and exceptions."""
    stress = SharedEngineStress(model_folder, seed=0)
    stress.run(num_threads=24, seconds=1.5)
    assert min(stress.counts[name] for name in ("generate", "stream", "leave_stream", "async", "leave_async")) > 2


# Closing.


def test_closing_ends_whoever_waits(slow_engine: Engine) -> None:
    """Guards callers on other threads against waiting for ever when the engine is closed."""

    def close() -> None:
        wait_for_tokens(slow_engine, 4)
        slow_engine.close()

    single, awaited, several, streamed, _ = run_together(
        lambda: slow_engine.generate([1, 2], LONG),
        lambda: asyncio.run(slow_engine.agenerate([1, 2], LONG)),
        lambda: slow_engine.generate([[3], [4]], LONG.merged({"n": 2})),
        lambda: [event.completion for event in slow_engine.stream([[5], [6]], LONG)],
        close,
    )
    ended = [single, awaited, *several, *(one for one in streamed if one is not None)]
    assert [one.error.code for one in ended] == ["cancelled"] * 6


def test_requests_that_meet_a_close_end() -> None:
    """Guards the moment in which an engine is closed: a request is run or refused, and never forgotten."""
    with SteppingEngine(CONFIG, loaded(make_network("llama"))) as core:
        for attempt in range(12):
            thread, ends, is_closed = EngineThread(core), queue.SimpleQueue[TokenEvent](), threading.Event()

            def submit_until_closed(
                thread: EngineThread = thread, ends: Any = ends, is_closed: threading.Event = is_closed
            ) -> int:
                for number in count(1):
                    is_last = is_closed.is_set()
                    thread.submit(Request(prompt_ids=[1, 2], params=SamplingParams(max_tokens=1)), ends.put)
                    if is_last:
                        return number
                    time.sleep(0.0001)
                raise AssertionError

            def close(
                thread: EngineThread = thread, is_closed: threading.Event = is_closed, attempt: int = attempt
            ) -> int:
                time.sleep(0.0003 * attempt)
                thread.close()
                is_closed.set()
                return 0

            num_submitted = sum(run_together(submit_until_closed, submit_until_closed, close))
            for _ in range(num_submitted):
                assert ends.get(timeout=20).finish_reason in ("length", "error")
            assert ends.empty() and not thread._requests and not core.has_work


def test_a_signal_handler_may_close_the_engine(slow_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a deadlock of a handler with the code that it interrupts, here in the middle of a submission."""
    inbox, submitted = slow_engine.thread._inbox, list[Any]()

    class Inbox:
        """Closes the engine from within `put`, on the same thread."""

        get, get_nowait, qsize = inbox.get, inbox.get_nowait, inbox.qsize

        def put(self, command: Any) -> None:
            submitted.append(command)
            inbox.put(command)
            if len(submitted) == 1:
                slow_engine.close()

    monkeypatch.setattr(slow_engine.thread, "_inbox", Inbox())
    (done,) = run_together(lambda: slow_engine.generate([1, 2], LONG))
    assert done.error.code == "cancelled" and len(submitted) == 2


# Failures.


def test_waiting_on_the_engines_own_thread_is_refused(engine: Engine) -> None:
    """Guards against a deadlock: a callback that waits for its own engine gets an error."""
    stream, refused = engine.stream([5, 6], LONG), list[str]()

    def observe(step: StepRecord) -> None:
        waits: list[Callable[[], Any]] = [
            lambda: engine.generate([1]),
            lambda: next(stream),
            lambda: next(engine.map([[1]])),
            lambda: asyncio.run(engine.agenerate([1])),
            lambda: asyncio.run(anext(engine.astream([1]))),  # type: ignore[arg-type]
        ]
        for wait in waits:
            with pytest.raises(EngineError, match="on the engine's own thread") as caught:
                wait()
            refused.append(str(caught.value))

    engine.on_step = observe
    assert engine.generate([1, 2], SHORT).token_ids == alone([1, 2])
    assert len(refused) >= 5
    engine.on_step = None
    assert [event.token_id for event in stream] == alone([5, 6], LONG)


# Ctrl-C.


@contextmanager
def interrupted(engine: Engine, tokens: int) -> Iterator[None]:
    """Ctrl-C in the block, after some tokens of the engine; it must arrive at once and leave the cache free."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    sent: list[float] = []

    def interrupt() -> None:
        wait_for_tokens(engine, tokens)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            thread.start()
            yield
        assert time.monotonic() - sent[0] < 2
        check_idle(engine, within_s=2)  # with the traceback in memory, as a notebook keeps it
        assert caught.value.__traceback__ is not None
    finally:
        thread.join()
        signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("use", [Engine.generate, lambda *call: list(Engine.stream(*call))], ids=["call", "stream"])
def test_an_interrupted_call_frees_the_cache(use: Callable[..., Any], slow_engine: Engine) -> None:
    """Guards Ctrl-C: it arrives at once, the requests are cancelled, and the engine goes on."""
    with interrupted(slow_engine, tokens=4):
        use(slow_engine, [[1, 2], [3]], LONG)
    assert slow_engine.generate([1, 2], SHORT).token_ids == alone([1, 2])


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupted_submission_frees_the_cache(engine: Engine, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards Ctrl-C while requests are submitted: those that are there already are cancelled."""
    submit, calls = EngineThread.submit, list[Request]()

    def interrupt(self: EngineThread, request: Request, on_event: EventCallback) -> None:
        calls.append(request)
        submit(self, request, on_event)
        if len(calls) == at:
            raise KeyboardInterrupt

    for use in (engine.generate, engine.stream):
        calls.clear()
        with monkeypatch.context() as patched:
            patched.setattr(EngineThread, "submit", interrupt)
            with pytest.raises(KeyboardInterrupt) as caught:
                use([[1], [2], [3]], LONG)
        check_idle(engine, within_s=0.1)
        assert caught.value.__traceback__ is not None


# Other processes and other threads.


def in_child(work: Callable[[], None]) -> None:
    """Runs `work` in a fork of this process, and fails if it raises or hangs."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_child_is_refused(engine: Engine) -> None:
    """Guards a child against waiting for a thread that it does not have, and its parent against the child's end."""
    stream, results = engine.stream([1, 2], LONG), engine.map([[1, 2]] * 3, params={"max_tokens": 9}, window=1)
    next(stream), next(results)

    def work() -> None:
        for use in (
            lambda: engine.generate([1, 2]),
            lambda: engine.stream([1, 2]),
            lambda: engine.astream([1, 2]),
            lambda: engine.map([[1, 2]]),
            lambda: next(stream),
            lambda: next(results),
        ):
            with pytest.raises(EngineError, match="belongs to the process that made it"):
                use()
        stream.close()
        engine.close()

    in_child(work)
    assert len(list(stream)) == 139 and len(list(results)) == 2


def test_a_stepping_engine_changes_hands_only_when_it_is_free() -> None:
    """Guards the owner of a SteppingEngine: of several threads one gets it, and its end sets it free."""
    with SteppingEngine(CONFIG, loaded(make_network("llama"))) as core:
        barrier, refused = threading.Barrier(4), queue.SimpleQueue[str]()

        def use() -> int:
            barrier.wait()
            try:
                core.flush()
            except EngineError as error:
                refused.put(str(error))
            return barrier.wait()

        run_together(*[use] * 4)
        assert refused.qsize() == 3 and "only that thread may use it" in refused.get()
        owner = core._owner
        assert owner is not None
        owner.join()  # it dies without a word
        assert generate(core, [[1, 2]], SHORT)[0].token_ids == alone([1, 2])


def test_an_engine_may_be_made_of_anothers_model(engine: Engine) -> None:
    """Guards a running engine against a second one on its model, which changes the attention to check itself."""
    stream = engine.stream([1, 2], LONG)
    for _ in range(2):
        next(stream)
        with Engine(CONFIG, loaded=engine.loaded) as other:
            assert other.generate([3], SHORT).token_ids == alone([3])
    assert len(list(stream)) == 138 and engine.stats().num_retries == 0


def test_calls_start_no_threads_but_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards programs that never ask for concurrency: one thread, and only from the first request on."""
    monkeypatch.setattr("cbatch.api.tqdm", None)  # it starts a thread of its own, also if it is disabled
    before = set(threading.enumerate())
    with new_engine() as other:
        assert set(threading.enumerate()) == before
        other.generate([1, 2], SHORT)
        assert [one.name for one in set(threading.enumerate()) - before] == ["cbatch-engine"]
    assert set(threading.enumerate()) == before
