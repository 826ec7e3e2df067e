"""From logits to tokens, one row for each request that gets a token in this step.

Randomness needs no generator: every (seed, sample, position, token id) has its own uniform number, made by
hashing the four (counter-based noise, as in Salmon et al., SC '11). A row's draw is the token with the largest
`logit / temperature + Gumbel noise` among those the filters keep, which is a draw from the softmax (the Gumbel
trick). So neither the neighbours of a row nor the order, chunking or repetition of steps can change it.

Here the definition stands in operations of torch. Float32 on the CPU goes through `cpu/sampling.py`, which draws the
same tokens many times faster; the two may differ only where two tokens are as good to the last places of a float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cbatch.engine.request import Request
from cbatch.engine.threads import num_threads

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True)
class Draw:
    """The D rows of a step that are drawn at random.

    restricted  whether any of them filters its tokens
    In their order: temperature, top_k (0: all), top_p, min_p [D] and noise keys [D, 2] int64.
    """

    restricted: bool
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    keys: Tensor

    @classmethod
    def build(cls, rows: list[int], requests: list[Request], device: torch.device) -> Draw:
        params = [requests[row].params for row in rows]
        keys = [noise_key(requests[row].seed, requests[row].sample_index, requests[row].num_tokens) for row in rows]
        return cls(
            restricted=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params),
            temperature=torch.tensor([p.temperature for p in params], device=device),
            top_k=torch.tensor([max(p.top_k, 0) for p in params], dtype=torch.int64, device=device),
            top_p=torch.tensor([p.top_p for p in params], device=device),
            min_p=torch.tensor([p.min_p for p in params], device=device),
            keys=torch.tensor(keys, dtype=torch.int64, device=device).view(-1, 2),
        )


def sample(logits: Tensor, requests: list[Request]) -> tuple[Tensor, Tensor]:
    """Chooses a token for each row of logits [R, V]; returns tokens [R] int64 and the largest logit of each row [R].

    A row whose largest logit is not finite has no meaningful token: its logits are no numbers, or nothing is allowed.
    """
    largest, tokens = _largest(logits)
    drawn = [row for row, request in enumerate(requests) if not request.params.greedy]
    if drawn:
        tokens[drawn] = _draw_rows(logits, drawn, Draw.build(drawn, requests, logits.device))
    return tokens, largest


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, and its token."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        return logits.max(dim=-1)
    rows = logits.numpy()
    tokens = rows.argmax(axis=-1)  # many times faster than torch's
    return torch.from_numpy(rows[np.arange(len(rows)), tokens]), torch.from_numpy(tokens)


def _draw_rows(logits: Tensor, rows: list[int], draw: Draw) -> Tensor:
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        return _draw(logits[rows].float(), draw)
    try:
        from cbatch.engine.cpu.sampling import Rules, draw_tokens
        from cbatch.engine.cpu.team import shared_team
    except ImportError:  # numba is not made for every Python
        return _draw(logits[rows], draw)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    stride, vocabulary = logits.stride(0), logits.shape[1]
    flat = logits.detach().as_strided(((len(logits) - 1) * stride + vocabulary,), (1,)).numpy()
    rules = Rules(
        np.array(rows, np.int64) * stride,
        draw.temperature.numpy(),
        draw.top_k.numpy(),
        draw.top_p.numpy(),
        draw.min_p.numpy(),
        draw.keys.numpy().astype(np.uint32),
    )
    return torch.from_numpy(draw_tokens(shared_team(num_threads()), flat, vocabulary, rules))


def _draw(logits: Tensor, draw: Draw) -> Tensor:
    logits = logits / draw.temperature[:, None]
    if not draw.restricted:
        noise = gumbel_noise(draw.keys, torch.arange(logits.shape[-1], device=logits.device)[None])
        return (logits + noise).argmax(dim=-1)
    logits, ids = logits.sort(dim=-1, descending=True, stable=True)
    kept = _kept(logits, draw)
    width = int(kept.sum(dim=-1).max())
    logits, ids, kept = logits[:, :width], ids[:, :width], kept[:, :width]
    noisy = (logits + gumbel_noise(draw.keys, ids)).masked_fill(~kept, float("-inf"))
    return ids.gather(1, noisy.argmax(dim=-1, keepdim=True)).squeeze(1)


def _kept(logits: Tensor, draw: Draw) -> Tensor:
    """Which of the sorted tokens [D, V] pass top-k, then top-p, then min-p, each on what the one before left."""
    vocabulary = logits.shape[-1]
    top_k = torch.where(draw.top_k > 0, draw.top_k, vocabulary)
    kept = torch.arange(vocabulary, device=logits.device)[None] < top_k[:, None]
    # Tokens as likely as the k-th stay too, as in transformers' TopKLogitsWarper.
    kth = logits.gather(1, (top_k.clamp(max=vocabulary) - 1)[:, None])
    kept |= logits >= kth
    probabilities = torch.softmax(logits.masked_fill(~kept, float("-inf")), dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept &= (before < draw.top_p[:, None]) | (draw.top_p[:, None] >= 1)
    kept &= probabilities >= draw.min_p[:, None] * probabilities[:, :1]
    kept[:, 0] = True  # the likeliest always stays, also in a row that is NaN and marked as such
    return kept


def noise_key(seed: int, sample_index: int, position: int) -> tuple[int, int]:
    """Two 32-bit words that stand for one draw: splitmix64 over the row's seed, sample number and position."""
    state = seed & _MASK64
    for word in (sample_index, position):
        state = (state + 0x9E3779B97F4A7C15 * (word + 1)) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state >> 32, state & _MASK32


def gumbel_noise(keys: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise for keys [D, 2] and token ids [D or 1, N]: float32 [D, N]."""
    words = _mix(_mix(ids ^ keys[:, :1]) ^ keys[:, 1:])
    # The exponential's small values decide who wins, so it is built from the end where float32 is fine.
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)  # rounding must not make it 1
    return -torch.log(-torch.log1p(-uniform))


def _mix(words: Tensor) -> Tensor:
    """A 32-bit integer hash on int64 tensors (the finalizer of MurmurHash3, public domain)."""
    words = words ^ (words >> 16)
    words = (words * 0x85EBCA6B) & _MASK32
    words = words ^ (words >> 13)
    words = (words * 0xC2B2AE35) & _MASK32
    return words ^ (words >> 16)
