"""Checks an architecture in the engine: it equals the model's own greedy decoding, is refused, or is wrong."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from cbatch.base.errors import ModelError
from cbatch.base.params import SamplingParams
from cbatch.engine.stepping_engine import SteppingEngine
from tests.support.architectures import NOT_BUILT_HERE, draw, make_architecture
from tests.support.declared import has_declaration
from tests.support.tiny_models import eager_attention, make_engine, make_prompts

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


def run_combined(engine: SteppingEngine) -> Outputs:
    rows = {engine.add(prompt, params): row for row, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))}
    outputs: Outputs = [[] for _ in PROMPTS]
    for step in itertools.count():
        if step % 6 == 5 and step < 20:  # with recurrent layers, requests that wait for a snapshot seldom lack blocks
            engine.scheduler.shrink(2)
            while not engine.scheduler.grow():
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


def reference_logits(network: Any, ids: Any) -> torch.Tensor:
    """Logits [N, T, vocabulary] of the model's own forward, without our attention and without a cache."""
    with eager_attention(network), torch.inference_mode():
        logits: torch.Tensor = network(input_ids=torch.as_tensor(ids), use_cache=False).logits
    return logits


def outcome(model_type: str, result: CheckResult) -> str:
    """Entry in docs/models.md for a model type."""
    if result.status == EQUAL:
        return "equal, on a fast path" if has_declaration(model_type) else "equal, by transformers"
    reason = NOT_BUILT_HERE[model_type] if result.status == NOT_BUILT else result.reason
    is_declared = result.status == REFUSED and has_declaration(model_type)
    return f"{result.status}{', but equal on a fast path' if is_declared else ''}: {reason}"


def outcomes_in(page: str) -> list[tuple[str, str]]:
    """The model types that docs/models.md names, and what it says of them."""
    rows = [
        line.strip("| ").split(" | ")
        for line in page.splitlines()
        if line.startswith(("| equal", "| refused", "| not"))
    ]
    return [(name, said) for said, names in rows for name in re.findall("`([^`]+)`", names)]
