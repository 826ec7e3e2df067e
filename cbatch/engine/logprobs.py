"""Log-probabilities of chosen tokens and of the likeliest ones, from raw logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cbatch.engine.request import TokenLogprobs

LEAST = -9999.0
"""What stands for minus infinity, which JSON does not have; OpenAI's own number."""

MAX_ELEMENTS = 2**26
"""Logits that are turned into float32 at once: 256 MiB."""


def token_logprobs(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """For each row of logits [N, V]: the log-probability of its token, and its `counts[i]` likeliest tokens.

    Not a number where the logits are none.
    """
    size = max(MAX_ELEMENTS // logits.shape[-1], 1)
    found: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), size):
        part = slice(start, start + size)
        found += _logprobs(logits[part], token_ids[part], counts[part])
    return found


def _logprobs(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    logprobs.clamp_(min=LEAST)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None]).squeeze(1)
    top = logprobs.topk(min(max(counts), logits.shape[-1]), dim=-1)
    rows = zip(token_ids, chosen.tolist(), top.indices.tolist(), top.values.tolist(), counts, strict=True)
    return [
        TokenLogprobs(token, logprob, list(zip(ids[:count], values[:count], strict=True)))
        for token, logprob, ids, values, count in rows
    ]
