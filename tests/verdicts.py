"""What becomes of an architecture in the engine: equal to its own greedy decoding, refused, or wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cbatch.engine.engine import Engine
from cbatch.engine.errors import ModelError
from cbatch.engine.params import SamplingParams
from tests.architectures import make_architecture
from tests.tiny import make_engine, make_prompts

GAINS = (1.5, 2.5, 4.0, 1.0)


@dataclass(frozen=True)
class Verdict:
    word: str
    reason: str = ""


class InsensitiveError(AssertionError):
    """No weights were found with which the output depends on the context."""


def own_greedy(network: Any, prompts: list[list[int]], length: int) -> list[list[int]]:
    """What the model's own forward makes of prompts of one length, without any cache: [prompts][length]."""
    ids = torch.tensor(prompts)
    before = network.config._attn_implementation
    network.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            for _ in range(length):
                logits = network(input_ids=ids, use_cache=False).logits[:, -1]
                ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    finally:
        network.set_attn_implementation(before)
    return ids[:, len(prompts[0]) :].tolist()


def depends_on_context(network: Any) -> bool:
    """Whether the first token of a prompt decides what comes after it, and outputs are varied."""
    prompts = make_prompts([14] * 3, seed=5)
    changed = [[prompt[0] % 80 + 1, *prompt[1:]] for prompt in prompts]
    outputs = own_greedy(network, prompts + changed, 12)
    before, after = outputs[:3], outputs[3:]
    return all(a != b for a, b in zip(before, after, strict=True)) and sum(len(set(o)) > 4 for o in outputs) > 3


def follows_itself(network: Any, prompts: list[list[int]], outputs: list[list[int]]) -> bool:
    """Whether each output token is the model's own choice after the tokens before it, which is greedy decoding."""
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt + output[:-1]])
        before = network.config._attn_implementation
        network.set_attn_implementation("eager")
        try:
            with torch.inference_mode():
                logits = network(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
        finally:
            network.set_attn_implementation(before)
        if logits.argmax(-1).tolist() != output:
            return False
    return True


TRUNK = make_prompts([37], seed=3)[0]
PROMPTS = [TRUNK + tail for tail in make_prompts([9, 1], seed=4)] + make_prompts([60, 1, 7, 20], seed=6)
PROMPTS += PROMPTS[:2]
LENGTHS = [6, 12, 5, 20, 20, 10, 6, 12]


def run_combined(engine: Engine) -> list[list[list[int]]]:
    rounds = []
    params = [SamplingParams(max_tokens=length) for length in LENGTHS]
    for _ in range(1):
        rounds.append([output.token_ids for output in engine.generate(PROMPTS, params)])
    assert engine.scheduler.num_preemptions > 0, 'p'
    assert engine.scheduler.num_cached_tokens > 0
    return rounds


def judge(model_type: str) -> Verdict:
    try:
        network = make_architecture(model_type)
    except Exception as error:
        return Verdict("not built", str(error))
    try:
        engine = make_engine(network, max_batch_tokens=16, max_seqs=6, kv_blocks=28)
    except ModelError as error:
        return Verdict("refused", str(error))
    for gain in GAINS:
        network = make_architecture(model_type, gain)
        if depends_on_context(network):
            break
    else:
        return Verdict("insensitive")
    engine = make_engine(network, max_batch_tokens=16, max_seqs=6, kv_blocks=28)
    for number, outputs in enumerate(run_combined(engine)):
        if not follows_itself(network, PROMPTS, outputs):
            return Verdict("WRONG", f"round {number} gain {gain}")
    return Verdict("equal", f"gain {gain}")
