"""Logits and requests with which every sampler is tested, and what the definition in torch draws from them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.runtime.batch import SampledTokens
from cbatch.sample import sampler
from cbatch.sample.row_masks import RowMasks
from cbatch.sample.sampler import Sampler, gumbel_noise
from cbatch.schedule.sequence import TokenSequence

LOGIT_SHAPES = ["normal", "peaked", "flat", "masked", "equal", "one left"]


def make_logits(shape: str, rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    if shape == "peaked":
        logits[:, : min(40, vocabulary)] += torch.linspace(15, 5, min(40, vocabulary))
    elif shape == "flat":
        logits /= 1000
    elif shape == "masked":
        logits[torch.rand(rows, vocabulary, generator=generator) < 0.7] = -math.inf
        logits[:, 0] = 0.0
    elif shape == "equal":
        logits = logits.round() / 2
    elif shape == "one left":
        logits[:] = -math.inf
        logits[:, vocabulary // 3] = -5.0
    return logits


def make_requests(count: int, seed: int = 0, **fixed: Any) -> list[TokenSequence]:
    """Requests whose filters are drawn from the values that matter, unless they are fixed."""
    rng = np.random.default_rng(seed)
    values: dict[str, list[float]] = {
        "temperature": [0.05, 0.6, 1.0, 1.7, 50.0],
        "top_k": [0, 0, 1, 5, 50, 10**6],
        "top_p": [0.1, 0.5, 0.9, 0.999, 1.0, 1.0],
        "min_p": [0.0, 0.0, 0.02, 0.5],
    }
    made = []
    for row in range(count):
        params = {name: rng.choice(choice).item() for name, choice in values.items()} | fixed
        made.append(
            TokenSequence(0, [1] * 5, Request(params=SamplingParams(**params), max_new_tokens=9, seed=seed + row))
        )
    return made


def positions_of(sequences: list[TokenSequence]) -> list[int]:
    return [len(sequence.token_ids) for sequence in sequences]


def sample(logits: torch.Tensor, sequences: list[TokenSequence], masks: RowMasks | None = None) -> SampledTokens[Any]:
    """As an engine samples on the device of the logits."""
    return Sampler(logits.device).sample(logits, sequences, positions_of(sequences), masks=masks)


def draw_in_torch(logits: torch.Tensor, sequences: list[TokenSequence]) -> list[int]:
    return sampler._draw_rows(logits, range(len(sequences)), sequences, positions_of(sequences)).tolist()


def noise_key(seed: int, sample_index: int, position: int) -> tuple[int, int]:
    """The two words that stand for one draw: see `sampler.noise_keys`."""
    words = np.array([[seed & 0xFFFFFFFFFFFFFFFF], [sample_index], [position]], np.uint64)
    high, low = sampler.noise_keys(*words)[:, 0].tolist()
    return high, low


def score(logits: torch.Tensor, sequence: TokenSequence, token: int) -> float:
    key = torch.tensor([noise_key(sequence.request.seed, sequence.sample_index, sequence.num_tokens)])
    return float(logits[token] / sequence.params.temperature + gumbel_noise(key, torch.tensor([[token]]))[0, 0])


def is_on_edge(logits: torch.Tensor, params: SamplingParams, token: int) -> bool:
    scaled = logits.double() / params.temperature
    if 0 < params.top_k < len(logits):
        scaled[scaled < scaled.topk(params.top_k).values[-1]] = -math.inf
    shares = scaled.softmax(-1)
    is_before = (scaled > scaled[token]) | ((scaled == scaled[token]) & (torch.arange(len(logits)) < token))
    gap = min(
        abs(float(shares[is_before].sum()) - params.top_p), abs(float(shares[token] / shares.max()) - params.min_p)
    )
    return gap < 1e-5
