"""Log-probabilities of given tokens and of the likeliest ones, from raw logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cbatch.engine.base.outputs import TokenLogprobs
from cbatch.engine.runtime.transfer import HostCopy

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have. OpenAI uses the same number."""

MAX_ELEMENTS = 2**26
"""Most logits that are converted to float32 at once: 256 MiB."""


class PendingLogprobs:
    """Log-probabilities that a device is computing: of each row's token and of the likeliest tokens."""

    def __init__(self, logits: Tensor, token_ids: Tensor, counts: Sequence[int]) -> None:
        """
        logits:    [N, V]
        token_ids: [N] int64 on the same device
        counts:    [N], how many of the likeliest tokens each row wants
        """
        self._counts = counts
        size = max(MAX_ELEMENTS // logits.shape[-1], 1)
        most = min(max(counts, default=0), logits.shape[-1])
        parts = [_score(logits[at : at + size], token_ids[at : at + size], most) for at in range(0, len(counts), size)]
        self._parts = [HostCopy(token_ids), *(HostCopy(*part) for part in parts)]

    def get(self) -> list[TokenLogprobs]:
        """Waits for one record for each row. They are NaN if the logits are."""
        token_ids, *parts = [part.get() for part in self._parts]
        chosen, ids, values = ([row for part in parts for row in part[place].tolist()] for place in range(3))
        rows = zip(token_ids[0].tolist(), chosen, ids, values, self._counts, strict=True)
        return [
            TokenLogprobs(token, logprob, list(zip(ids[:count], values[:count], strict=True)))
            for token, logprob, ids, values, count in rows
        ]


def _score(logits: Tensor, token_ids: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each token [N], and the ids and log-probabilities of the likeliest tokens [N, most].

    logits: [N, V]
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    logprobs.clamp_(min=MIN_LOGPROB)
    top = logprobs.topk(most, dim=-1)
    return logprobs.gather(1, token_ids[:, None]).squeeze(1), top.indices, top.values
