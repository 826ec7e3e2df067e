"""The thread that owns the engine: every request ends, wherever it comes from and whatever happens."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from cbatch.engine.driver import Driver
from cbatch.engine.params import SamplingParams
from cbatch.engine.request import TokenEvent
from tests.tiny import make_engine, make_network, make_prompts


@pytest.fixture
def driver() -> Any:
    made = Driver(make_engine(make_network("llama")))
    yield made
    made.close()


def collect(driver: Driver, prompt: list[int], **params: Any) -> queue.SimpleQueue[TokenEvent]:
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    driver.submit(prompt, SamplingParams(**params), events.put)
    return events


def until_end(events: queue.SimpleQueue[TokenEvent]) -> list[TokenEvent]:
    taken = [events.get(timeout=30)]
    while taken[-1].finish_reason is None:
        taken.append(events.get(timeout=30))
    return taken


def test_many_threads_share_one_engine(driver: Driver) -> None:
    """Guards submission from any thread: each request gets its own tokens, as the engine alone gives them."""
    prompts = make_prompts([3, 9, 14, 5, 7, 2])
    results: dict[int, list[int | None]] = {}

    def work(number: int) -> None:
        results[number] = [e.token_id for e in until_end(collect(driver, prompts[number], max_tokens=10))]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = make_engine(make_network("llama")).generate(prompts, SamplingParams(max_tokens=10))
    assert [results[number] for number in range(6)] == [output.token_ids for output in expected]


def test_a_refused_request_ends_with_its_error(driver: Driver) -> None:
    """Guards against waiting for ever on a prompt that the engine refuses."""
    (event,) = until_end(collect(driver, []))
    assert event.error is not None and event.error.code == "invalid_row"


def test_cancelling_frees_memory_and_sends_no_more(driver: Driver) -> None:
    """Guards Ctrl-C on one answer while another goes on."""
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    ticket = driver.submit([1, 2, 3], SamplingParams(max_tokens=140), events.put)
    events.get(timeout=30)
    driver.cancel(ticket)
    until_end(collect(driver, [4, 5], max_tokens=3))
    assert driver.engine.blocks.num_used == 0
    while not events.empty():
        assert events.get().finish_reason is None
    assert driver.load.running == driver.load.waiting == 0


def test_a_failed_step_ends_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards front ends against hanging when a kernel or the device fails."""
    driver = Driver(make_engine(make_network("llama")))

    def failing(batch: Any) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(driver.engine.runner, "forward", failing)
    (event,) = until_end(collect(driver, [1, 2]))
    assert event.error is not None and event.error.code == "internal_error"
    assert str(driver.failure) == "device lost"
    (late,) = until_end(collect(driver, [3]))
    assert late.error is not None and "device lost" in str(late.error)
    driver.close()


def test_a_request_that_breaks_the_engine_in_a_new_way_harms_no_other(driver: Driver) -> None:
    """Guards the thread itself: an exception that nobody foresaw ends one request."""
    (event,) = until_end(collect(driver, ["no", "ids"]))  # type: ignore[list-item]
    assert event.error is not None and event.error.code == "internal_error"
    assert len(until_end(collect(driver, [1, 2], max_tokens=3))) == 3
