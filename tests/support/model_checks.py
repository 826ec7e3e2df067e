"""Checks an architecture in the engine: it equals the model's own greedy decoding, is refused, or is wrong."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from cbatch.base.errors import ModelError
from cbatch.base.params import SamplingParams
from cbatch.engine.stats import StepRecord
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.families import declared_kinds
from tests.support.architectures import NOT_BUILT_HERE, draw, make_architecture
from tests.support.generation import generate
from tests.support.planted_faults import (
    INDEX_FAULTS,
    STATE_FAULTS,
    leak_neighbour,
    shift_chunk_grid,
    shift_positions,
    widen_window,
)
from tests.support.tiny_models import generate_alone, make_engine, make_prompts

EQUAL, REFUSED, NOT_BUILT, INSENSITIVE = "equal", "refused", "not built", "insensitive"
UNSEEN = " is not seen"
"""How a difference ends that says that a fault makes none, as it may be with some weights."""
GAINS = (1.5, 2.5, 4.0, 1.0)

# Longer than every window, chunk and threshold of the architectures; the first two begin alike, and come twice.
TRUNK = make_prompts([37], seed=3)[0]
PROMPTS = [TRUNK + tail for tail in make_prompts([9, 1], seed=4)] + make_prompts([60, 1, 7, 20], seed=6)
PROMPTS += PROMPTS[:2]
LENGTHS = [6, 12, 5, 20, 20, 10, 6, 12]
PARAMS = [SamplingParams(max_tokens=length) for length in LENGTHS]
Outputs = list[list[int]]
Fault = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class CheckResult:
    """`status` is EQUAL, REFUSED or NOT_BUILT; anything else is a fault of the engine or of this check."""

    status: str
    reason: str = ""


def check_model(model_type: str, differences: Callable[[Any, SteppingEngine], list[str]]) -> CheckResult:
    """Builds a tiny model of a type, proves that its context matters, and compares.

    differences: names what differs from the model's own output, given the network and an engine for `run_combined`
    """
    try:
        network = make_architecture(model_type, GAINS[0])
    except Exception as error:  # whatever a library raises for a model it cannot make
        return CheckResult(NOT_BUILT, plain_reason(str(error)))
    try:
        engine = small_engine(network)
    except ModelError as error:
        return CheckResult(REFUSED, plain_reason(str(error)))
    result = CheckResult(INSENSITIVE, "no weights were found with which its output depends on its context")
    for gain in GAINS:
        draw(network, gain)
        if depends_on_context(network):
            wrong = differences(network, engine)
            result = CheckResult("wrong", ", ".join(wrong)) if wrong else CheckResult(EQUAL)
            if not wrong or not all(one.endswith(UNSEEN) for one in wrong):
                return result
            engine = small_engine(network)  # without prefixes that other weights have computed
    return result


def plain_reason(message: str) -> str:
    """An error without the name of the class and without figures that rounding decides."""
    message = re.sub(r"^\w+ is not supported: |^Class validation error[^\n]*\n\s*|\w+Error: ", "", message.strip())
    line = next((line.strip() for line in message.splitlines() if line.strip()), "no reason given")
    return re.sub(r" by (\d([\d.e+-]*\d)?|nan)", "", line).rstrip(".")


def small_engine(network: Any) -> SteppingEngine:
    """An engine that chunks PROMPTS, shares their blocks, makes them wait for each other, and preempts them."""
    return make_engine(network, max_batch_tokens=16, max_seqs=6, kv_blocks=28)


def compare_combined_run(network: Any, engine: SteppingEngine) -> list[str]:
    """One run that does everything at once, compared with the model's own forward over each finished output."""
    outputs = run_combined(engine)
    pairs = zip(PROMPTS, outputs, strict=True)
    return [] if all(is_greedy_output(network, prompt, output) for prompt, output in pairs) else ["combined"]


def with_fault(plant: Fault) -> Callable[[Any, SteppingEngine], list[str]]:
    """`compare_combined_run` with a fault in the engine, which it must name as a difference."""

    def differences(network: Any, engine: SteppingEngine) -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            return compare_combined_run(network, engine)

    return differences


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
        faults += INDEX_FAULTS
    unseen = [plant for plant in faults if not with_fault(plant)(network, engine)]
    if engine.model.chunk_multiple > 1 and keeps_to_grid(network, shift_chunk_grid):
        unseen.append(shift_chunk_grid)
    return [f"{plant.__name__}{UNSEEN}" for plant in unseen]


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


def run_combined(engine: SteppingEngine) -> Outputs:
    rows = {engine.add(prompt, params): row for row, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))}
    outputs: Outputs = [[] for _ in PROMPTS]
    for step in itertools.count():
        if step % 6 == 5 and step < 20:  # with recurrent layers, requests that wait for a snapshot seldom lack blocks
            engine.scheduler.shrink(2)
            while not engine.grow():
                pass
        for event in engine.step():
            if event.request_id is not None and event.token_id is not None:
                outputs[rows[event.request_id]].append(event.token_id)
        if not engine.has_work:
            break
    assert [len(output) for output in outputs] == LENGTHS
    assert engine.scheduler.num_preemptions > 0, "nothing was preempted"
    assert engine.scheduler.num_cached_tokens > len(TRUNK), "no blocks were shared"
    return outputs


def is_greedy_output(network: Any, prompt: list[int], output: list[int]) -> bool:
    """Whether each output token is the model's own choice after the tokens before it, which is greedy decoding."""
    logits = reference_logits(network, [prompt + output[:-1]])[0, len(prompt) - 1 :]
    return bool(logits.argmax(-1).tolist() == output)


def depends_on_context(network: Any) -> bool:
    """Whether the first of 14 tokens, more than a window, decides what follows, and outputs are varied."""
    prompts = make_prompts([14] * 3, seed=5)
    ids = torch.tensor(prompts + [[prompt[0] % 80 + 1, *prompt[1:]] for prompt in prompts])
    for _ in range(10):
        ids = torch.cat([ids, reference_logits(network, ids)[:, -1].argmax(-1, keepdim=True)], dim=1)
    outputs: Outputs = ids[:, 14:].tolist()
    changed = all(before != after for before, after in zip(outputs[:3], outputs[3:], strict=True))
    return changed and sum(len(set(output)) > 4 for output in outputs) > 3


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


def reference_logits(network: Any, ids: Any) -> torch.Tensor:
    """Logits [N, T, vocabulary] of the model's own forward, without our attention and without a cache."""
    with eager_attention(network), torch.inference_mode():
        logits: torch.Tensor = network(input_ids=torch.as_tensor(ids), use_cache=False).logits
    return logits


@contextmanager
def eager_attention(network: Any) -> Iterator[None]:
    before = network.config.get_text_config()._attn_implementation
    network.set_attn_implementation("eager")
    try:
        yield
    finally:
        network.set_attn_implementation(before)


def compare_all_scenarios(network: Any, engine: SteppingEngine) -> list[str]:
    """Runs each scenario alone, and compares it with `generate` of transformers. Returns those that differ."""
    network.generation_config.eos_token_id = None
    with eager_attention(network):
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


def outcome(model_type: str, result: CheckResult) -> str:
    """Entry in docs/models.md for a model type."""
    if result.status == EQUAL:
        return "equal, on a fast path" if model_type in declared_kinds() else "equal, by transformers"
    reason = NOT_BUILT_HERE[model_type] if result.status == NOT_BUILT else result.reason
    return f"{result.status}: {reason}"


def outcomes_in(page: str) -> list[tuple[str, str]]:
    """The model types that docs/models.md names, and what it says of them."""
    rows = [
        line.strip("| ").split(" | ")
        for line in page.splitlines()
        if line.startswith(("| equal", "| refused", "| not"))
    ]
    return [(name, said) for said, names in rows for name in re.findall("`([^`]+)`", names)]
