"""Greedy float32 output equals transformers' `generate`, whatever the batch; and planted faults are seen."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from cbatch.base.params import SamplingParams
from cbatch.engine.stepping_engine import SteppingEngine
from tests.support.generation import generate_greedily
from tests.support.planted_faults import leak_neighbour, shift_positions, widen_window
from tests.support.samples import sampled
from tests.support.tiny_models import FAMILIES, generate_alone, make_engine, make_network, make_prompts

# Longer and shorter than the windows (12) and budgets, with outputs that end at very different times.
PROMPT_LENGTHS = [1, 40, 3, 90, 17, 2, 25, 60, 5, 12, 13]
OUTPUT_LENGTHS = [30, 4, 18, 9, 25, 1, 12, 20, 40, 7, 3]
SCENARIOS: dict[str, dict[str, Any]] = {
    "skewed lengths at once": {"max_batch_tokens": 256},
    "budget of 7 tokens": {"max_batch_tokens": 7},
    "cache so small that rows are preempted": {"kv_blocks": 27, "max_batch_tokens": 64},
}


FAMILIES_TO_TEST = sampled(FAMILIES, 3, keep=["llama", "gemma2"])
"""One plain family, and one with windows, softcaps and norms of its own."""


@cache
def network_of(family: str) -> Any:
    return make_network(family)


@cache
def expected_of(family: str) -> list[list[int]]:
    return generate_alone(network_of(family), make_prompts(PROMPT_LENGTHS), OUTPUT_LENGTHS)


def run_all(engine: SteppingEngine) -> list[list[int]]:
    """Generates everything at once, with the scheduler's invariants checked after every step."""
    step = engine.step

    def checked_step() -> Any:
        events = step()
        engine.scheduler.check_integrity()
        return events

    engine.step = checked_step  # type: ignore[method-assign]
    outputs = generate_greedily(engine, make_prompts(PROMPT_LENGTHS), OUTPUT_LENGTHS)
    assert engine.scheduler.pool.num_used == 0, "blocks leaked"
    return outputs


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("family", FAMILIES_TO_TEST)
def test_equals_generate(family: str, scenario: str) -> None:
    """Guards all of the engine at once: scheduling, chunking, preemption, positions, paging, masks."""
    engine = make_engine(network_of(family), **SCENARIOS[scenario])
    assert run_all(engine) == expected_of(family)
    if "preempted" in scenario:
        assert engine.stats().num_preemptions > 0, "the scenario preempts nothing"


@pytest.mark.parametrize("family", FAMILIES_TO_TEST)
def test_equals_generate_while_rows_come_and_go(family: str) -> None:
    """Guards admission and removal in every step: a row enters each second step, and some are cancelled."""
    engine = make_engine(network_of(family), max_batch_tokens=16, max_seqs=4)
    outputs: dict[int, list[int]] = {}
    rows: dict[int, int] = {}
    waiting = list(enumerate(zip(make_prompts(PROMPT_LENGTHS), OUTPUT_LENGTHS, strict=True)))
    steps = 0
    while waiting or engine.has_work:
        if waiting and steps % 2 == 0:
            row, (prompt, length) = waiting.pop(0)
            rows[engine.add(prompt, SamplingParams(max_tokens=length))] = row
            outputs[row] = []
            doomed = engine.add(prompt[::-1], SamplingParams(max_tokens=50))
        for event in engine.step():
            if event.request_id in rows and event.token_id is not None:
                outputs[rows[event.request_id]].append(event.token_id)
        if steps % 2 == 1:
            engine.cancel(doomed)
        engine.scheduler.check_integrity()
        steps += 1
    assert [outputs[row] for row in range(len(outputs))] == expected_of(family)


@pytest.mark.parametrize("budget", [256, 16])
@pytest.mark.parametrize("family", FAMILIES_TO_TEST)
def test_equals_generate_with_shared_prefixes(family: str, budget: int) -> None:
    """Guards blocks that several requests read: beside the one that computes them, later, and again from the cache.

    Prompts begin alike, in the middle of a block and at its end, one being the beginning of others.
    """
    trunks, tails = make_prompts([50, 37], seed=3), make_prompts([9, 1, 4, 14, 2, 5], seed=4)
    prompts = [trunks[number % 2] + tail for number, tail in enumerate(tails)]
    prompts += [prompts[0][:48], prompts[0], prompts[0] + prompts[1]]
    lengths = [12] * len(prompts)
    expected = generate_alone(network_of(family), prompts, lengths)
    engine = make_engine(network_of(family), max_batch_tokens=budget, kv_blocks=80)
    for _ in range(2):
        assert generate_greedily(engine, prompts, lengths) == expected
        assert engine.scheduler.pool.num_used == 0
    scheduler = engine.scheduler
    assert scheduler.num_cached_tokens > 0.6 * scheduler.num_prompt_tokens


@pytest.mark.parametrize("plant", [shift_positions, leak_neighbour, widen_window])
def test_planted_faults_are_seen(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the oracle itself: with a fault planted in a running engine, the comparison must fail."""
    engine = make_engine(network_of("mistral"), max_batch_tokens=256)
    plant(monkeypatch)
    assert run_all(engine) != expected_of("mistral")
