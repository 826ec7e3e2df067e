"""Overlapped steps against plain ones: the same outputs beside any other requests, and no leaks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from cbatch.base.params import SamplingParams
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.sample.output import PendingSample
from tests.support.all_features import SETTINGS, add_all, expected, make, outcome, run, steps
from tests.support.generation import generate
from tests.support.samples import sampled
from tests.support.tiny_models import make_engine, make_network, make_prompts

FEW_BLOCKS = sampled([{}, {"kv_blocks": 9, "max_batch_tokens": 20}], 1, keep=[{"kv_blocks": 9, "max_batch_tokens": 20}])


@pytest.mark.slow
@pytest.mark.parametrize("way", sampled(product(SETTINGS, (False, True)), 4, keep=[(SETTINGS[-1], True)]), ids=str)
def test_output_is_the_same(way: tuple[dict[str, Any], bool]) -> None:
    """Guards every feature, with and without overlap and prefix cache, in small steps, with few slots."""
    settings, ahead = way
    engine = make(ahead=ahead, **settings)
    assert run(engine) == expected()
    assert run(engine) == expected()


@pytest.mark.parametrize("way", sampled(product((True, False), (False, True)), 2, keep=[(True, True)]), ids=str)
def test_output_is_the_same_after_preemption(way: tuple[bool, bool]) -> None:
    """Guards requests that lose their blocks while tokens are in flight, and are computed again."""
    prefix_cache, ahead = way
    engine = make(ahead=ahead, prefix_cache=prefix_cache, max_batch_tokens=100)
    assert run(engine, shaken=True) == expected()
    assert engine.stats().num_preemptions > 30


@pytest.mark.slow
@pytest.mark.parametrize("settings", FEW_BLOCKS, ids=str)
def test_cancelling_at_any_step_changes_no_other_request(settings: dict[str, Any]) -> None:
    """Guards cancelled requests with tokens in flight: the tokens are dropped, and no block leaks."""
    engine = make(ahead=True, **settings)
    for cancel_at in range(0, 24, 3):
        names = add_all(engine)
        found: dict[int, list[tuple[Any, ...]]] = {number: [] for number in names}
        gone = list(names)[cancel_at % 7 :: 7]
        for number, events in enumerate(steps(engine)):
            for event in events:
                assert event.request_id is not None
                found[event.request_id].append(outcome(event))
            if number == cancel_at:
                for request_id in gone:
                    engine.cancel(request_id)
        for request_id, name in names.items():
            wanted = expected()[name]
            assert found[request_id] == (wanted[: len(found[request_id])] if request_id in gone else wanted)
        assert engine.scheduler.pool.num_used == 0 and not engine._requests


class Hiccup(RuntimeError):
    """A planted fault."""


def every(count: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Raises instead of every `count`-th call and the one after it."""
    calls = 0

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % count in (0, 1) and calls > 1:
            raise Hiccup
        return function(*args, **kwargs)

    return sometimes


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "sample", "get"])
@pytest.mark.parametrize("settings", FEW_BLOCKS, ids=str)
def test_steps_that_fail_lose_nothing(where: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards retries, wherever a step fails: each event comes once, also those of the previous step."""
    engine, wanted = make(ahead=True, **settings), expected()
    if where == "forward":
        monkeypatch.setattr(engine.runner, "forward", every(5, engine.runner.forward))
    else:
        name = "__init__" if where == "sample" else "get"
        monkeypatch.setattr(PendingSample, name, every(5, getattr(PendingSample, name)))
    names = add_all(engine)
    found: dict[str, list[tuple[Any, ...]]] = {name: [] for name in names.values()}
    failures = 0
    while engine.has_work:
        try:
            events = engine.step()
        except Hiccup:
            failures += 1
        else:
            for event in events:
                assert event.request_id is not None
                found[names[event.request_id]].append(outcome(event))
        engine.scheduler.check_integrity()
    assert found == wanted and failures > 5 and engine.scheduler.pool.num_used == 0


def keep_events(monkeypatch: pytest.MonkeyPatch, *lengths: int) -> tuple[SteppingEngine, list[int]]:
    """An engine with a request of each length that keeps the events of its first step, since the next one failed."""
    engine = make_engine(make_network("llama"), run_ahead=True)
    asked = zip(make_prompts([5, 6]), lengths, strict=True)
    ids = [engine.add(prompt, SamplingParams(max_tokens=length)) for prompt, length in asked]
    assert engine.step() == []
    with monkeypatch.context() as patched:
        patched.setattr(PendingSample, "__init__", every(2, lambda *_: None))
        PendingSample.__init__(None)  # type: ignore[arg-type,misc]
        with pytest.raises(Hiccup):
            engine.step()
    return engine, ids


@pytest.mark.parametrize("length", [4, 1])
def test_a_cancelled_request_gets_no_event_that_was_kept(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards callers from events of cancelled requests, even if the request had ended and its event was kept."""
    engine, (first, second) = keep_events(monkeypatch, length, 4)
    engine.cancel(first)
    events = [event for events in steps(engine) for event in events]
    assert {event.request_id for event in events} == {second} and len(events) == 4


def test_the_model_is_launched_before_the_previous_step_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the overlap: while the host waits for a step, the device has the next one; no step is wasted."""
    engine = make_engine(make_network("llama"), run_ahead=True)
    done: list[str] = []
    forward, get = engine.runner.forward, PendingSample.get

    def note(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (done.append(name), function(*args))[1]

    monkeypatch.setattr(engine.runner, "forward", note("forward", forward))
    monkeypatch.setattr(PendingSample, "get", note("get", get))
    generate(engine, make_prompts([5]), SamplingParams(max_tokens=4))
    assert done == ["forward", *["forward", "get"] * 3, "get"], "the end of the output is known when it is scheduled"
    assert engine.stats().num_steps == 4


def test_running_out_of_memory_on_completion_shrinks_the_step_in_flight() -> None:
    """Guards smaller steps after a call that only completes a step and runs out of memory."""
    engine = make_engine(make_network("llama"), run_ahead=True)
    engine.add(make_prompts([5])[0], SamplingParams(max_tokens=1))
    assert engine.step() == [] and len(engine.step()) == 1
    assert engine._num_scheduled == 5 and engine.shrink() and engine.limits.max_batch_tokens == 2
