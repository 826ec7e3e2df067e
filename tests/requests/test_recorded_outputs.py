"""Outputs that are kept: made again exactly, and given only to requests that would have generated the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cbatch.base.config import EngineConfig
from cbatch.base.params import PARAM_NAMES
from cbatch.base.request import Request, RequestDefaults
from cbatch.batch.line_processor import LineProcessor
from cbatch.batch.templates import lines_of
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.engine.thread import EngineThread
from cbatch.requests.recorded_outputs import content_key, events_of, record
from cbatch.schedule.limits import SequenceLimits
from tests.support.faults import wait_until
from tests.support.shared_engine import ROWS

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
WIDE = SequenceLimits(context=256, cache=10_000)


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[SteppingEngine]:
    with SteppingEngine(EngineConfig(model=str(model_folder), device="cpu", dtype="float32")) as made:
        yield made


def requests(engine: SteppingEngine, rows: list[Any]) -> list[Request]:
    lines = LineProcessor(engine.input_processor(RequestDefaults()))
    made = map(lines.process, lines_of(rows))
    return [one for one in made if isinstance(one, Request)]


def test_records_give_the_same_completion(engine: SteppingEngine) -> None:
    """Guards every kind of result: stop strings, several outputs, log-probabilities, forms, empty outputs."""
    asked = requests(engine, [*ROWS, {"prompt": "a", "max_tokens": 0, "echo": True}, {"prompt": "b", "logprobs": 2}])
    thread, computed = EngineThread(engine), [engine.output_processor(request) for request in asked]
    for outputs in computed:
        thread.submit(outputs.request, outputs.take)
    wait_until(lambda: all(outputs.is_finished for outputs in computed), 60)
    thread.close()
    assert len(computed) > 12
    for outputs in computed:
        data = record(outputs)
        if (completion := outputs.completion()).error is not None:
            assert data is None and completion.error.code in ("prompt_too_long", "invalid_row")
            continue
        assert data is not None
        again = engine.output_processor(outputs.request)
        for event in events_of(data):
            again.take(event)
        one, other = again.completion(), outputs.completion()
        assert again.is_finished and one.to_dict() == other.to_dict()
        assert one.choices == other.choices and one.prompt_logprobs == other.prompt_logprobs


CHANGES: dict[str, Any] = {
    "max_tokens": 7,
    "min_tokens": 3,
    "thinking_budget": 2,
    "n": 2,
    "top_k": 4,
    "min_p": 0.1,
    "truncate_prompt": "left",
    "seed": 8,
    "stop": ["x"],
    "stop_token_ids": [7],
    "ignore_eos": True,
    "repetition_penalty": 1.5,
    "logit_bias": {"5": 1.0},
    "bad_words": ["z"],
    "allowed_token_ids": [1, 2, 3],
    "logprobs": 1,
    "prompt_logprobs": 1,
    "echo": True,
    "skip_special_tokens": False,
    "response_format": {"type": "json_object"},
    "regex": "[a-z]+",
    "choice": ["a", "b"],
    "grammar": 'start: "x"',
    "close_forms": False,
    "pretty_json": True,
    "loop_guard": True,
}
"""A value of each parameter that is not its default; the others become 0.5."""


def test_everything_that_decides_an_output_is_in_its_key(engine: SteppingEngine) -> None:
    """Guards rows against answers to something else: every sampling parameter, the prompt, and what else is asked."""
    # The weights of an adapter count, and the prompt that an effort gives.
    names = [name for name in PARAM_NAMES if name not in ("lora", "reasoning_effort")]
    base = {"prompt": "a", "temperature": 1.0, "seed": 7, "max_tokens": 9}
    rows = [base, *(base | {name: CHANGES.get(name, 0.5)} for name in names), base | {"prompt": "b"}]
    made = requests(engine, rows)
    assert len(made) == len(rows)
    keys = [content_key("model", WIDE, request) for request in made]
    assert len(set(keys)) == len(rows)
    one = made[0]
    short = SequenceLimits(context=256, cache=len(one.prompt_ids) + 3)
    other: list[dict[str, Any]] = [
        {"tools": [TOOL]},
        {"tags": ("<think>",)},
        {"is_thinking": True},
        {"opens_thinking": True},
        {"prefix": "a"},
        {"adapter": "weights"},
        {"prompt_ids": [*one.prompt_ids, 1]},
    ]
    others = [content_key("model", WIDE, replace(one, **fields)) for fields in other]
    others += [content_key("other model", WIDE, one), content_key("model", short, one)]
    assert len({*keys, *others}) == len(rows) + len(others)


def test_what_decides_nothing_is_not_in_it(engine: SteppingEngine) -> None:
    """Guards hits: names, columns and places of rows do not count, nor the seed of greedy rows."""
    same = [
        {"prompt": "a", "max_tokens": 3},
        {"id": "x", "prompt": "a", "max_tokens": 3, "column": 5},
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "priority": 4, "seed": 9},
    ]
    assert len({content_key("model", WIDE, request) for request in requests(engine, same)}) == 1
    sampled = [row | {"temperature": 1.0} for row in same]
    assert len({content_key("model", WIDE, request) for request in requests(engine, sampled)}) == 3
    seeded = [row | {"seed": 3} for row in sampled]
    assert len({content_key("model", WIDE, request) for request in requests(engine, seeded)}) == 1
