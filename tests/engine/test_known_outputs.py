"""Requests that have some of their tokens already: each goes on as if the engine had just generated them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from cbatch.base.outputs import KnownOutput
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from tests.support.all_features import ASKED, expected, make, run
from tests.support.samples import sampled

PLACES = {"first": 0.0, "middle": 0.5, "last but one": 0.95, "end": 1.0}
"""How much of each output is known."""


def beginnings(share: float) -> dict[str, KnownOutput]:
    """The beginning of each output of `expected`, at least one token."""
    found = {}
    for name, events in expected().items():
        if "prompt_logprobs" in ASKED[name]:
            continue
        tokens = [event[0] for event in events if event[0] is not None]
        logprobs = [event[5] for event in events if event[5] is not None]
        count = max(int(share * len(tokens)), 1)
        found[name] = KnownOutput(tokens[:count], logprobs[:count])
    return found


SETTINGS: list[dict[str, Any]] = [{}, {"ahead": True, "max_batch_tokens": 7}, {"speculate": 4}]


@pytest.mark.parametrize("way", sampled(product(PLACES, SETTINGS), 5, keep=[("middle", SETTINGS[1])]), ids=str)
def test_outputs_go_on_with_the_same_events(way: tuple[str, dict[str, Any]]) -> None:
    """Guards every feature: noise, penalties, forms, stop strings and limits meet the state of one run."""
    place, settings = way
    engine = make(**{"ahead": False} | settings)
    assert run(engine, known=beginnings(PLACES[place])) == expected()


def test_known_tokens_need_no_step() -> None:
    """Guards requests whose tokens end them: their events are there at once, and nothing waits for a step."""
    engine = make(ahead=False)
    params = SamplingParams(max_tokens=3, n=2, ignore_eos=True)
    known = [KnownOutput([70, 71, 72]), KnownOutput([70, 71, 72, 73])]
    engine.add_request(Request(prompt_ids=[5, 6], params=params, known=known))
    events = engine.take_events()
    assert [event.token_id for event in events if event.sample_index == 0] == [70, 71, 72]
    assert [event.finish_reason for event in events if event.finish_reason] == ["length", "length"]
    assert all(event.is_known for event in events) and len(events) == 6, "a lower limit counts"
    assert not engine.has_work and not engine._requests


def test_a_request_may_be_cancelled_before_its_known_tokens_were_taken() -> None:
    """Guards against events of a request whose caller has left."""
    engine = make(ahead=False)
    known = [KnownOutput([70, 71])]
    number = engine.add_request(Request(prompt_ids=[5, 6], params=SamplingParams(max_tokens=9), known=known))
    assert engine.has_work
    engine.cancel(number)
    assert engine.take_events() == [] and not engine.has_work and engine.scheduler.pool.num_used == 0
