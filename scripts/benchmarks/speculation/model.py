"""A model that computes everything, and then says what a script tells it to say; and drafts that know the script.

So a random model of a real size can rewrite its prompt: its steps cost what they cost, and what comes out is known.

The most that drafts from texts can gain: they end before their first wrong token, and all of them are tried. So nothing
is computed in vain, and nothing has to be learnt first. What remains are the tokens that no text foresees, the time of
steps with drafts, and the look for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray

from cbatch import SteppingEngine
from cbatch.attention.base import AttentionBackend
from cbatch.model.cpu import CpuModel
from cbatch.model.loader import LoadedModel
from cbatch.runtime.batch import Logits, RaggedBatch, SampledTokens
from cbatch.runtime.kv_cache import KVCache
from cbatch.schedule.draft_policy import DraftPolicy
from cbatch.schedule.draft_sources import DraftSources, Proposal
from cbatch.schedule.drafts import Drafts
from cbatch.schedule.output import SchedulerOutput
from cbatch.schedule.sequence import TokenSequence
from scripts.benchmarks.models import RandomTensors, load_random
from scripts.benchmarks.shapes import Config

Script = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]
"""The next tokens [R], from the tokens [R] that the model has just read and their positions [R] in their sequences."""

BONUS = np.float32(1e4)
"""More than any logit of a random model."""


class ScriptedModel(CpuModel):
    """A model on the CPU's fast path whose logits have a large bonus for the token of the script.

    script: None leaves the logits as they are
    """

    script: Script | None = None

    def forward(self, batch: RaggedBatch, kv_cache: KVCache, attention: AttentionBackend) -> Logits:
        logits = super().forward(batch, kv_cache, attention)
        if self.script is None:
            return logits
        told = self.script(batch.ids[batch.rows], batch.positions[batch.rows])
        values, rows = logits.values.numpy(), np.arange(len(told))
        values[rows, told] += BONUS
        return Logits(logits.values, SampledTokens(told, values[rows, told]))


def load_scripted(name: str, config: Config) -> tuple[LoadedModel, ScriptedModel]:
    """A random bfloat16 model as an engine takes it, and the model itself, to give it scripts."""
    device = torch.device("cpu")
    model = ScriptedModel(config, RandomTensors(config, device, torch.bfloat16), torch.bfloat16)
    return replace(load_random(name, config, device, fast_path=False), fast_model=model), model


class ForesightedSources(DraftSources):
    """Proposes what a text says, as far as the output will agree."""

    def __init__(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> None:
        super().__init__(min_match=1)
        self._outputs = {tuple(prompt): output for prompt, output in zip(prompts, outputs, strict=True)}

    def propose(self, sequence: TokenSequence, count: int) -> Proposal | None:
        found = super().propose(sequence, count)
        if found is None:
            return None
        output = self._outputs[tuple(sequence.token_ids[: sequence.num_prompt])]
        coming = output[sequence.num_generated : -1]  # nothing comes after the last token, so its draft gains nothing
        right = list(takewhile(lambda pair: pair[0] == pair[1], zip(found.tokens, coming, strict=False)))
        return Proposal(found.tokens[: len(right)], found.matched) if right else None


class EagerPolicy(DraftPolicy):
    """Always looks, and drafts all that is found."""

    def rests(self, scheduled: SchedulerOutput) -> bool:
        return False

    def looks_at(self, sequence: TokenSequence) -> bool:
        return super().looks_at(sequence) or True

    def _worth(self, scheduled: SchedulerOutput, found: Mapping[int, Proposal], budget: int) -> list[int]:
        return [number for number, proposal in found.items() for _ in proposal.tokens]


def foresee(engine: SteppingEngine, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> None:
    """Makes a new engine with `--speculate auto` draft what is right. outputs: of the prompts"""
    drafts = engine.scheduler.drafts
    assert isinstance(drafts, Drafts), "an engine that does not speculate"
    drafts._sources = ForesightedSources(prompts, outputs)
    drafts._policy = EagerPolicy(None)
