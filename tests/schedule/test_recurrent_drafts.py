"""Drafts of models with recurrent state, which goes back to before a rejected token."""

from __future__ import annotations

from typing import Any

import pytest

from cbatch.base.config import EngineConfig
from cbatch.base.params import SamplingParams
from cbatch.engine.stats import StepRecord
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.loader import LoadedModel
from cbatch.schedule.output import ScheduledChunk
from cbatch.schedule.recurrent_states import RecurrentStates
from tests.support.architectures import make_architecture
from tests.support.drafts import Prophet, propose_by
from tests.support.generation import generate
from tests.support.tiny_models import fast, loaded, make_prompts

PROMPTS = make_prompts([20, 3, 25, 1])
PARAMS = [SamplingParams(max_tokens=40, temperature=1.0, seed=seed) for seed in range(4)]


def outputs(model: LoadedModel, speculate: Any, **config: Any) -> tuple[list[list[int]], SteppingEngine]:
    settings: dict[str, Any] = {"block_size": 16, "kv_blocks": 40, "max_seqs": 4} | config
    with SteppingEngine(EngineConfig(device="cpu", speculate=speculate, **settings), model) as engine:
        found = [list(one.token_ids) for one in generate(engine, PROMPTS, PARAMS)]
        engine.scheduler.check_integrity()
        assert engine.scheduler.pool.num_used == 0
        return found, engine


RARER = [("lfm2", fast), ("qwen3_5_text", loaded), ("bamba", loaded)]


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("kind", "make"), [("qwen3_5_text", fast), *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in RARER)]
)
def test_output_is_the_same(kind: str, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards states after drafts that are right, wrong and partly right; few slots, preemption, overlap, n."""
    model = make(make_architecture(kind))
    wanted, _ = outputs(model, "off")
    propose_by(monkeypatch, Prophet(wanted, 80))
    accepted = 0
    for config in (
        {},
        {"run_ahead": True},
        {"prefix_cache": False, "state_slots": 8},
        {"state_slots": 5},
        {"kv_blocks": 9},
        {"max_batch_tokens": 9, "run_ahead": True},
    ):
        found, engine = outputs(model, 5, **config)
        assert found == wanted, config
        accepted += engine.stats().num_accepted_tokens
        assert engine.stats().num_drafted_tokens > engine.stats().num_accepted_tokens, config
    assert accepted > 100


def keep_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants: the state of a rejected token is used (vLLM #39273)."""

    def planted(self: RecurrentStates, chunk: ScheduledChunk, accepted: int) -> None:
        state = chunk.sequence.state
        if state is not None and state.undrafted is not None:
            self.slots.drop(state.undrafted)
            state.undrafted = None

    monkeypatch.setattr(RecurrentStates, "settle_draft", planted)


def replay_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants: accepted tokens are not computed again from the state before the draft."""
    settle = RecurrentStates.settle_draft

    def planted(self: RecurrentStates, chunk: ScheduledChunk, accepted: int) -> None:
        settle(self, chunk, accepted)
        chunk.sequence.num_computed += chunk.sequence.num_to_catch_up
        chunk.sequence.num_to_catch_up = 0

    monkeypatch.setattr(RecurrentStates, "settle_draft", planted)


@pytest.mark.kernels
@pytest.mark.parametrize("fault", [keep_the_state, replay_too_little])
def test_planted_faults_are_seen(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test above: a wrong state changes outputs."""
    model = fast(make_architecture("qwen3_5_text"))
    wanted, _ = outputs(model, "off")
    propose_by(monkeypatch, Prophet(wanted, 80))
    fault(monkeypatch)
    assert outputs(model, 5)[0] != wanted


@pytest.mark.kernels
def test_replayed_tokens_are_no_part_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the step-time controller and what a bench records: a request that replays tokens decodes."""
    model, replayed = fast(make_architecture("lfm2")), 0
    propose_by(monkeypatch, Prophet(outputs(model, "off")[0], 80))
    engine = SteppingEngine(EngineConfig(device="cpu", speculate=5, block_size=16, kv_blocks=40, max_seqs=4), model)

    def note(record: StepRecord) -> None:
        nonlocal replayed
        scheduled = record.scheduled
        replayed += sum(chunk.caught_up for chunk in scheduled.chunks)
        assert scheduled.num_decoding == sum(chunk.is_decode for chunk in scheduled.chunks)

    engine.on_step = note
    with engine:
        generate(engine, PROMPTS, PARAMS)
    assert replayed > 5
