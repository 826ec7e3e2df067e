"""The engine's thread: every request ends, whatever happens."""

from __future__ import annotations

import queue
import threading
import weakref
from itertools import count
from typing import Any

import pytest
import torch

from cbatch.base.outputs import TokenEvent
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.engine.thread import EngineThread
from cbatch.sample.output import PendingSample
from tests.support.generation import generate
from tests.support.tiny_models import make_engine, make_network, make_prompts, no_collector


@pytest.fixture
def engine_thread() -> Any:
    with make_engine(make_network("llama")) as engine:
        made = EngineThread(engine)
        yield made
        made.close()


def request(prompt: list[int], **params: Any) -> Request:
    return Request(prompt_ids=prompt, params=SamplingParams(**params))


def collect(engine_thread: EngineThread, prompt: list[int], **params: Any) -> queue.SimpleQueue[TokenEvent]:
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    engine_thread.submit(request(prompt, **params), events.put)
    return events


def until_end(events: queue.SimpleQueue[TokenEvent]) -> list[TokenEvent]:
    taken = [events.get(timeout=30)]
    while taken[-1].finish_reason is None:
        taken.append(events.get(timeout=30))
    return taken


def test_cancelling_frees_memory_and_sends_no_more(engine_thread: EngineThread) -> None:
    """Guards Ctrl-C on one answer while another goes on."""
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    asked = request([1, 2, 3], max_tokens=140)
    engine_thread.submit(asked, events.put)
    events.get(timeout=30)
    engine_thread.cancel(asked)
    until_end(collect(engine_thread, [4, 5], max_tokens=3))
    assert engine_thread.engine.scheduler.pool.num_used == 0
    while not events.empty():
        assert events.get().finish_reason is None
    assert engine_thread.engine.stats().num_running == engine_thread.engine.stats().num_waiting == 0


class FailingForward:
    """A model's forward that raises the errors it is given, one a call, and then works again."""

    def __init__(self, engine_thread: EngineThread, *errors: Exception) -> None:
        self._forward = engine_thread.engine.runner.forward
        self._errors = list(errors)
        self.sizes: list[int] = []
        engine_thread.engine.runner.forward = self  # type: ignore[assignment,method-assign]

    def __call__(self, batch: Any) -> Any:
        self.sizes.append(len(batch.ids))
        if self._errors:
            raise self._errors.pop(0)
        return self._forward(batch)


def greedy(prompt: list[int], count: int) -> list[int]:
    return list(generate(make_engine(make_network("llama")), [prompt], SamplingParams(max_tokens=count))[0].token_ids)


LOST = RuntimeError("device lost")
HICCUPS = [RuntimeError("hiccup")] * EngineThread.MAX_RETRIES
FULL = torch.OutOfMemoryError("CUDA out of memory")
DRIVER = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")


@pytest.mark.parametrize(
    ("errors", "sizes"),
    [(HICCUPS, [30] * 4), ([*HICCUPS, FULL], [30] * 5), ([DRIVER] * 4, [30, 30, 15, 7, 3])],
    ids=["hiccups", "hiccups, then out of memory", "out of memory, as drivers say it"],
)
def test_a_step_that_fails_is_tried_again(
    errors: list[Exception], sizes: list[int], engine_thread: EngineThread
) -> None:
    """Guards a long run against hiccups and moments without memory, and its text against steps that count twice."""
    prompt = make_prompts([30])[0]
    faults = FailingForward(engine_thread, *errors)
    tokens = [event.token_id for event in until_end(collect(engine_thread, prompt, max_tokens=6))]
    assert tokens == greedy(prompt, 6) and faults.sizes[: len(sizes)] == sizes and engine_thread.failure is None
    assert engine_thread.num_retries == len(errors) and engine_thread.num_shrinks == 3 * (errors[0] is DRIVER)
    assert engine_thread.last_error == f"{type(errors[-1]).__name__}: {errors[-1]}"


def test_a_step_that_keeps_failing_ends_every_request(engine_thread: EngineThread) -> None:
    """Guards front ends against hanging if a kernel or the device fails permanently."""
    FailingForward(engine_thread, *[LOST] * (EngineThread.MAX_RETRIES + 1))
    (event,) = until_end(collect(engine_thread, [1, 2]))
    assert event.error is not None and event.error.code == "internal_error"
    assert str(engine_thread.failure) == "device lost"
    (late,) = until_end(collect(engine_thread, [3]))
    assert late.error is not None and "device lost" in str(late.error)


def test_a_kernel_that_does_not_fit_ends_the_engine_with_a_sentence(engine_thread: EngineThread) -> None:
    """Guards a later launch that takes too much shared memory: neither retries nor smaller steps help."""
    errors = pytest.importorskip("triton.runtime.errors")
    faults = FailingForward(engine_thread, *[errors.OutOfResources(131072, 101376, "shared memory")] * 9)
    (event,) = until_end(collect(engine_thread, [1, 2, 3]))
    assert event.error is not None and str(event.error) == (
        "The engine failed: a kernel needs 131072 of shared memory, and this GPU has 101376; "
        "--attention reference does without such kernels"
    )
    assert faults.sizes == [3] and engine_thread.num_retries == engine_thread.num_shrinks == 0


@pytest.mark.parametrize("where", ["forward", "sample"])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_finished_requests_are_reported_after_a_failure(
    run_ahead: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a request whose last token is computed against the failure of a step launched before that was known."""
    engine = make_engine(make_network("llama"), run_ahead=run_ahead)
    owner, name = (engine.runner, "forward") if where == "forward" else (PendingSample, "__init__")
    works, calls = getattr(owner, name), count()

    def lost(*args: Any) -> Any:
        if next(calls):
            raise RuntimeError("device lost")
        return works(*args)

    monkeypatch.setattr(owner, name, lost)
    engine_thread = EngineThread(engine)
    ready = threading.Event()
    engine_thread._inbox.put(lambda: ready.wait(10) and None)
    short, long = (collect(engine_thread, prompt, max_tokens=size) for prompt, size in (([1, 2], 1), ([3, 4], 5)))
    ready.set()
    (event,) = until_end(short)
    assert event.finish_reason == "length" and event.token_id is not None
    assert [event.finish_reason for event in until_end(long)] == [None, "error"]
    engine_thread.close()


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_step_that_never_completes_ends_every_request(run_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against retrying for ever: with overlap, a step can be launched after each one that failed.

    The thread keeps the error, but not the tensors of that step.
    """
    activations = weakref.WeakSet[torch.Tensor]()

    def get(evaluation: PendingSample) -> None:
        tensor = torch.zeros(3)
        activations.add(tensor)
        raise RuntimeError("device lost")

    monkeypatch.setattr(PendingSample, "get", get)
    engine_thread = EngineThread(make_engine(make_network("llama"), run_ahead=run_ahead))
    with no_collector():
        (event,) = until_end(collect(engine_thread, [1, 2]))
        assert event.error is not None and str(engine_thread.failure) == "device lost" and not activations
    assert engine_thread.num_retries == EngineThread.MAX_RETRIES
    engine_thread.close()


def test_the_thread_is_warmed_up_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the first request against what a device does once for each thread; and the thread, if that fails."""
    engine, seen = make_engine(make_network("llama")), []

    def fail() -> None:
        seen.append((threading.current_thread().name, engine.stats().num_steps))
        raise RuntimeError("device busy")

    monkeypatch.setattr(engine.runner, "warm_up_thread", fail)
    engine_thread = EngineThread(engine)
    assert len(until_end(collect(engine_thread, [1, 2], max_tokens=3))) == 3
    engine_thread.close(close_engine=True)
    assert seen == [("cbatch-engine", 0)] and engine_thread.num_retries == 0


def test_a_smaller_batch_grows_again(engine_thread: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the rest of a long run after a moment without memory: steps grow back to their size."""
    monkeypatch.setattr(engine_thread, "_patience", 1)
    scheduler = engine_thread.engine.scheduler
    before = scheduler.max_batch_tokens, scheduler.max_seqs
    FailingForward(engine_thread, *[FULL] * 3)
    until_end(collect(engine_thread, make_prompts([9])[0], max_tokens=1))
    assert scheduler.max_batch_tokens < before[0]
    until_end(collect(engine_thread, make_prompts([9])[0], max_tokens=60))
    assert (scheduler.max_batch_tokens, scheduler.max_seqs) == before and engine_thread.num_shrinks == 2


@pytest.mark.slow
def test_never_having_enough_memory_is_a_failure(engine_thread: EngineThread) -> None:
    """Guards against shrinking for ever."""
    FailingForward(engine_thread, *[FULL] * 50)
    (event,) = until_end(collect(engine_thread, [1, 2, 3]))
    assert event.error is not None and "fits in the device's memory" in str(event.error)


def test_a_failed_step_holds_no_memory_when_it_is_retried(engine_thread: EngineThread) -> None:
    """Guards a retry: the tensors of the failed step are freed, even if its exception is part of a cycle."""
    activations, left = weakref.WeakSet[torch.Tensor](), []
    forward = engine_thread.engine.runner.forward

    def full(batch: Any) -> Any:
        left.append(len(activations))
        if len(left) > 3:
            return forward(batch)
        tensor = torch.zeros(3)
        activations.add(tensor)
        error = torch.OutOfMemoryError("CUDA out of memory")
        error.me = error  # type: ignore[attr-defined]
        raise error

    engine_thread.engine.runner.forward = full  # type: ignore[method-assign]
    until_end(collect(engine_thread, make_prompts([9])[0], max_tokens=6))
    assert left[:4] == [0, 0, 0, 0]


def test_a_failing_text_harms_no_other_request(engine_thread: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what a step commits: a search for stop strings that raises ends its own request, and nothing is redone."""

    class Broken:
        stop_reason = None

        def push(self, token_id: int, *, may_stop: bool) -> str:
            raise RuntimeError("no such byte")

    prompt = make_prompts([5])[0]
    add = engine_thread.engine.add_request

    def adding(request: Request) -> int:
        request_id = add(request)
        if len(request.prompt_ids) == 2:
            engine_thread.engine._requests[request_id][0].detokenizer = Broken()  # type: ignore[assignment]
        return request_id

    monkeypatch.setattr(engine_thread.engine, "add_request", adding)
    broken, fine = collect(engine_thread, [1, 2]), collect(engine_thread, prompt, max_tokens=4)
    (event,) = until_end(broken)
    assert event.error is not None and "no such byte" in str(event.error)
    assert [event.token_id for event in until_end(fine)] == greedy(prompt, 4)
    assert engine_thread.num_retries == 0


def test_a_reader_that_fails_ends_its_own_request(engine_thread: EngineThread) -> None:
    """Guards the requests beside one whose `on_event` raises: all its outputs end with an error, and they go on."""
    prompt, seen = make_prompts([5])[0], list[TokenEvent]()

    def read(event: TokenEvent) -> None:
        seen.append(event)
        if event.token_id is not None:
            raise ValueError("no such column")

    ready = threading.Event()
    engine_thread._inbox.put(lambda: ready.wait(10) and None)
    engine_thread.submit(request([1, 2], max_tokens=50, n=2), read)
    fine = collect(engine_thread, prompt, max_tokens=6)
    ready.set()
    assert [event.token_id for event in until_end(fine)] == greedy(prompt, 6)
    assert [event.sample_index for event in seen] == [0, 0, 1] and seen[0].error is None
    assert all(event.error is not None and "no such column" in str(event.error) for event in seen[1:])
    assert engine_thread.failure is None and engine_thread.num_retries == 0
    assert engine_thread.engine.scheduler.pool.num_used == 0


def test_closing_ends_unfinished_requests(engine_thread: EngineThread) -> None:
    """Guards readers against waiting for ever when a thread is closed: running, waiting and late requests end."""
    running, waiting = list[TokenEvent](), list[TokenEvent]()

    def close_at_once(event: TokenEvent) -> None:
        if not running:
            engine_thread.submit(request([4, 5]), waiting.append)
            engine_thread.close()
        running.append(event)

    engine_thread.submit(request([1, 2, 3], max_tokens=140, n=2), close_at_once)
    engine_thread._thread.join(timeout=30)
    late = collect(engine_thread, [6], max_tokens=3)
    ends = [event for event in running if event.finish_reason is not None]
    assert [event.sample_index for event in ends] == [0, 1]
    for event in (*ends, *waiting, *until_end(late)):
        assert event.error is not None and event.error.code == "cancelled"
    assert len(waiting) == 1 and not engine_thread.engine.has_work
    assert engine_thread.engine.scheduler.pool.num_used == 0
