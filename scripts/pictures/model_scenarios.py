"""Scenarios in which an architecture has to give its own greedy output, and faults of the engine that must show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from cbatch.attention import reference
from cbatch.base.params import SamplingParams
from cbatch.engine.stats import StepRecord
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.hf import indexed
from cbatch.schedule.recurrent_states import RecurrentStates
from tests.support.generation import generate
from tests.support.model_checks import (
    LENGTHS,
    PARAMS,
    PROMPTS,
    TRUNK,
    UNSEEN,
    Fault,
    Outputs,
    run_combined,
    with_fault,
)
from tests.support.planted_faults import STATE_FAULTS, leak_neighbour, shift_positions, widen_window
from tests.support.tiny_models import eager_attention, generate_alone, make_engine, make_prompts


def compare_all_scenarios(network: Any, engine: SteppingEngine) -> list[str]:
    """Runs each scenario alone, and compares it with `generate` of transformers. Returns those that differ."""
    network.generation_config.eos_token_id = None
    expected = generate_alone(network, PROMPTS, LENGTHS)
    runs: dict[str, Callable[[], Outputs]] = {
        "whole prompts": lambda: run_all_at_once(network, max_batch_tokens=256, prefix_cache=False),
        "chunks of 7 tokens": lambda: run_all_at_once(network, max_batch_tokens=7, prefix_cache=False),
        "preempted": lambda: run_all_at_once(network, block_size=1, kv_blocks=96, prefix_cache=False, preempted=True),
        "prefixes shared": lambda: run_all_at_once(network, max_batch_tokens=64, kv_blocks=100, times=2),
        "rows come and go": lambda: run_with_arrivals(network),
        "combined": lambda: run_combined(engine),
    }
    different = [name for name, run in runs.items() if run() != expected]
    sampled = run_all_at_once(network, max_batch_tokens=256, prefix_cache=False, temperature=1.0)
    if run_all_at_once(network, max_batch_tokens=7, kv_blocks=28, temperature=1.0) != sampled:
        different.append("temperature 1")
    if not keeps_to_grid(network):
        different.append("chunk grid")
    return different


def run_all_at_once(
    network: Any, *, times: int = 1, preempted: bool = False, temperature: float = 0.0, **config: Any
) -> Outputs:
    engine = make_engine(network, **config)
    params = [replace(one, temperature=temperature) for one in PARAMS]
    for _ in range(times):
        outputs = [list(output.token_ids) for output in generate(engine, PROMPTS, params)]
    assert not preempted or engine.scheduler.num_preemptions > 0, "nothing was preempted"
    assert times == 1 or engine.scheduler.num_cached_tokens > 200, "no blocks were shared"
    return outputs


def run_with_arrivals(network: Any) -> Outputs:
    """A request arrives every second step, beside another that is cancelled soon."""
    engine = make_engine(network, max_batch_tokens=16, max_seqs=4)
    outputs: Outputs = [[] for _ in PROMPTS]
    rows: dict[int, int] = {}
    step = 0
    while engine.has_work or len(rows) < len(PROMPTS):
        if step % 2 == 0 and len(rows) < len(PROMPTS):
            row = len(rows)
            rows[engine.add(PROMPTS[row], PARAMS[row])] = row
            doomed = engine.add(PROMPTS[row][::-1], SamplingParams(max_tokens=50))
        for event in engine.step():
            if event.request_id in rows and event.token_id is not None:
                outputs[rows[event.request_id]].append(event.token_id)
        if step % 2 == 1:
            engine.cancel(doomed)
        step += 1
    return outputs


def keeps_to_grid(network: Any, plant: Fault | None = None) -> bool:
    """Whether a long prompt is cut at multiples of what recurrent layers take together, or where a snapshot is made."""
    [prompt] = make_prompts([140], seed=8)
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        multiple = make_engine(network).model.chunk_multiple
        with make_engine(network, max_seqs=2, max_batch_tokens=multiple + 5) as engine:
            engine.add(prompt, SamplingParams(max_tokens=1))
            cuts: list[bool] = []

            def note(record: StepRecord) -> None:
                for chunk in record.scheduled.chunks:
                    is_snapshot = chunk.state is not None and chunk.state.snapshot is not None
                    cuts.append(chunk.is_last or is_snapshot or chunk.stop % multiple == 0)

            engine.on_step = note
            while engine.has_work:
                engine.step()
    assert len(cuts) > 1, "the prompt is not cut"
    return all(cuts)


def unseen_faults(network: Any, engine: SteppingEngine) -> list[str]:
    """Which faults planted in the engine do not change what comes out."""
    faults: list[Fault] = [shift_positions] if depends_on_positions(network) else []
    if engine.model.layers:
        faults.append(leak_neighbour)
    if any(engine.model.windows):
        faults.append(widen_window)
    if engine.model.states:
        faults += STATE_FAULTS
    if not all(layer.value_dim for layer in engine.model.layers):
        faults += [ignore_index, forget_old_index]
    unseen = [plant for plant in faults if not with_fault(plant)(network, engine)]
    if engine.model.chunk_multiple > 1 and keeps_to_grid(network, shift_chunk_grid):
        unseen.append(shift_chunk_grid)
    return [f"{plant.__name__}{UNSEEN}" for plant in unseen]


def depends_on_positions(network: Any) -> bool:
    """Whether position ids change what comes out."""
    ids, positions = torch.tensor([TRUNK]), torch.arange(len(TRUNK))[None]
    with eager_attention(network), torch.inference_mode():
        logits = [
            network(
                input_ids=ids,
                position_ids=positions + shift * (positions > 8),
                attention_mask=torch.ones_like(ids),  # otherwise a gap begins another text
                use_cache=False,
            ).logits
            for shift in (0, 1)
        ]
    return not torch.equal(*logits)


def ignore_index(patch: pytest.MonkeyPatch) -> None:
    """Attention sees all tokens, and not only those that an indexer has chosen."""
    patch.setattr(reference, "_chosen", lambda indices, stop: torch.ones(len(indices), stop, dtype=torch.bool))


def forget_old_index(patch: pytest.MonkeyPatch) -> None:
    """An indexer finds zeros instead of the keys of earlier steps."""
    update = indexed.IndexView.update_indexer

    def forgetful(self: Any, keys: torch.Tensor, layer: int) -> torch.Tensor:
        found = update(self, keys, layer).clone()
        found[:, : self._sequence.start] = 0
        return found

    patch.setattr(indexed.IndexView, "update_indexer", forgetful)


def shift_chunk_grid(patch: pytest.MonkeyPatch) -> None:
    """Prompts of models with recurrent layers are cut where the budget of a step ends."""
    begin = RecurrentStates.begin_step

    def anywhere(self: RecurrentStates, running: Any, room: int) -> None:
        begin(self, running, room)
        self.multiple = 1

    patch.setattr(RecurrentStates, "begin_step", anywhere)
