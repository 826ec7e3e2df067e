"""Requests that use every feature of sampling, and what each of them gets when it runs alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from cbatch.base.config import EngineConfig
from cbatch.base.outputs import KnownOutput, TokenEvent
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.loader import LoadedModel

QUESTION = "Tell me a story about a dog and a cat in a garden."

SCHEMA = {
    "type": "json_schema",
    "json_schema": {"schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
}

ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "top_p": 0.9, "seed": 3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "drawn with penalties": {"temperature": 1.2, "frequency_penalty": 1.0, "seed": 4},
    "form": {"regex": "[a-f]{3,9}!", "temperature": 1.0, "seed": 5},
    "form that ends by itself": {"choice": ["yes", "no", "perhaps"]},
    "form that forces text": {"regex": "I think that it is (yes|no), as all of them said, and the (dog|cat), too\\."},
    "form that is closed": {"response_format": SCHEMA, "temperature": 1.0, "seed": 8},
    "form that is closed, with log-probabilities": {"response_format": SCHEMA, "logprobs": 1},
    "stop string": {"stop": ["a"]},
    "stop tokens": {"stop_token_ids": tuple(range(40, 60)), "ignore_eos": True},
    "late stop": {"stop_token_ids": tuple(range(300)), "min_tokens": 5},
    "bad words": {"bad_words": ["the", "dog"]},
    "allowed tokens": {"allowed_token_ids": tuple(range(30, 90))},
    "drawn from allowed tokens": {"allowed_token_ids": tuple(range(300)), "temperature": 1.0, "seed": 7},
    "form of allowed tokens": {"allowed_token_ids": tuple(range(300)), "choice": ["yes", "no", "perhaps"]},
    "log-probabilities": {"logprobs": 3, "temperature": 0.7, "seed": 6},
    "scored prompt": {"prompt_logprobs": 2, "max_tokens": 3},
    "scored prompt alone": {"prompt_logprobs": 0, "max_tokens": 0},
    "one token": {"max_tokens": 1},
}


@cache
def demo() -> LoadedModel:
    return SteppingEngine(EngineConfig(dtype="float32", device="cpu")).loaded


def make(*, ahead: bool, speculate: Any = "off", **config: Any) -> SteppingEngine:
    return SteppingEngine(EngineConfig(device="cpu", run_ahead=ahead, speculate=speculate, **config), demo())


def add_all(engine: SteppingEngine, known: Mapping[str, KnownOutput] = MappingProxyType({})) -> dict[int, str]:
    """The names of all kinds of requests, by their ids. `known`: what some of them have already, by their names."""
    found = {}
    for number, (name, asked) in enumerate(ASKED.items()):
        params = SamplingParams(max_tokens=22, ignore_eos=True).merged(asked)
        prompt = QUESTION if number % 2 else f"{QUESTION} Call them number {number} and number {number + 1}."
        has = [known[name]] if name in known else []
        request = Request(prompt_ids=engine.encode(prompt), params=params, known=has)
        found[engine.add_request(request)] = name
    return found


def outcome(event: TokenEvent) -> tuple[Any, ...]:
    """All of an event except the number of cached tokens."""
    return (
        event.token_id, event.text, event.finish_reason, event.stop_reason, event.error and event.error.code,
        event.logprobs, event.prompt_logprobs and list(event.prompt_logprobs),
    )  # fmt: skip


def steps(engine: SteppingEngine, *, shaken: bool = False) -> Iterator[list[TokenEvent]]:
    """Events of each step until all requests are done. shaken: most running requests are preempted repeatedly"""
    while engine.has_work:
        if shaken and engine.stats().num_steps % 4 == 3:
            while engine.shrink():
                pass
            while not engine.scheduler.grow():
                pass
        events = engine.step()
        engine.scheduler.check_integrity()
        yield events


def run(
    engine: SteppingEngine, *, shaken: bool = False, known: Mapping[str, KnownOutput] = MappingProxyType({})
) -> dict[str, list[tuple[Any, ...]]]:
    """The outputs of all requests of `ASKED`; checks that nothing is left in the end. known: see `add_all`"""
    names = add_all(engine, known)
    found: dict[str, list[tuple[Any, ...]]] = {name: [] for name in names.values()}
    for events in steps(engine, shaken=shaken):
        for event in events:
            assert event.request_id is not None
            found[names[event.request_id]].append(outcome(event))
    assert engine.scheduler.pool.num_used == 0 and not engine._requests
    return found


@cache
def expected() -> dict[str, list[tuple[Any, ...]]]:
    """Outputs of the requests one after the other, without overlap."""
    return run(make(ahead=False, max_seqs=1, prefix_cache=False))


SETTINGS: list[dict[str, Any]] = [
    {},
    {"prefix_cache": False},
    {"max_batch_tokens": 7},
    {"max_seqs": 3},
    {"kv_blocks": 9},
    {"kv_blocks": 11, "prefix_cache": False, "max_batch_tokens": 20},
]
