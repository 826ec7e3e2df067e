"""Samples tokens from logits, one row for each request that gets a token in this step.

Randomness needs no generator: every (seed, sample, position, token id) has a uniform number of its own, a hash of the
four (counter-based noise, as in Salmon et al., SC '11). A row gets the token with the largest
`logit / temperature + Gumbel noise` among those that the filters keep, which is a draw from the softmax (the Gumbel
trick). So neither other rows nor the order, chunking or repetition of steps can change it.

This module defines sampling by operations of torch. Float32 on the CPU goes through `kernels/cpu/sampling.py`, a GPU
through `kernels/triton/sampling.py`. They give the same tokens many times faster, and may differ only if two tokens
are equally good to the last bits of a float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.base.params import PARAMS
from cbatch.runtime.batch import SampledTokens
from cbatch.runtime.cpu import num_threads
from cbatch.runtime.device import is_nvidia
from cbatch.runtime.transfer import to_device
from cbatch.sample.row_masks import RowMasks
from cbatch.schedule.sequence import TokenSequence

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF

PARAM_WORDS = 8
"""Words of a row in `pack_sampling_params`; unused ones are 0. A row of 32 bytes keeps all rows aligned."""

_ROW = Struct("=fffiQQ")
"""The first words of a row, then seed and sample number, from which its noise key is made."""

Filter = Callable[[Tensor, Tensor], Tensor]
_Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], None]


def pack_sampling_params(sequences: Sequence[TokenSequence], positions: Sequence[int]) -> NDArray[np.int32]:
    """The sampling parameters of R rows as [R, PARAM_WORDS] int32, so that one copy brings them to a device.

    temperature (0 for greedy rows), top_p and min_p, as the bits of a float32; top_k (0: all); two words of noise key;
    the number of the row's mask from 1 on (0: none), which the sampler fills in

    positions: [R], at which place of its sequence each token will be. That is the `stop` of the chunk that it follows,
               so a step can be packed before the tokens of the previous one are known.

    `_draw_rows`, `_draw_on_host` and the Triton kernels read these by their number; filters that the kernels do not
    have are not among them. Words that are all 0 are a greedy row.
    """
    if all(sequence.params.greedy for sequence in sequences):
        return np.zeros((len(sequences), PARAM_WORDS), np.int32)
    rows = []
    for sequence in sequences:
        p = sequence.params
        temperature = 0.0 if p.greedy else p.temperature
        rows.append(
            _ROW.pack(
                temperature, p.top_p, p.min_p, p.top_k, sequence.request.noise_seed & _MASK64, sequence.sample_index
            )
        )
    words = np.frombuffer(bytearray().join(rows), np.int32).reshape(len(rows), PARAM_WORDS)
    _, _, seeds, samples = words.view(np.uint64).T
    words[:, 4:6] = noise_keys(seeds, samples, np.array(positions, np.uint64)).view(np.int32).T
    words[:, 6:] = 0
    return words


class Sampler:
    """Chooses the tokens of one engine. Does not wait for a GPU.

    Whether the Triton kernel is used is decided when it is made; `disable_kernel` takes that back.
    """

    def __init__(self, device: torch.device, *, kernel: bool | None = None) -> None:
        """kernel: whether the Triton kernel chooses tokens; by default it does on an NVIDIA GPU, if Triton is installed

        Raises ImportError if the kernel is asked for and Triton is not installed.
        """
        self.device = device
        self._kernel: _Kernel | None = None
        if kernel or (kernel is None and is_nvidia(device)):
            try:
                from cbatch.kernels.triton.sampling import sample_rows
            except ImportError:
                if kernel:
                    raise
            else:
                self._kernel = sample_rows

    @property
    def uses_kernel(self) -> bool:
        """Whether the Triton kernel chooses tokens, so that `sample_on_device` may be called."""
        return self._kernel is not None

    def disable_kernel(self) -> None:
        """From now on, operations of torch choose tokens."""
        self._kernel = None

    def sample(
        self,
        logits: Tensor,
        sequences: Sequence[TokenSequence],
        positions: Sequence[int],
        argmax: SampledTokens[NDArray[Any]] | None = None,
        masks: RowMasks | None = None,
    ) -> SampledTokens[Any]:
        """Samples a token for each row of logits [R, V].

        positions: see `pack_sampling_params`
        argmax:    of these logits, if it is known and there are no masks
        masks:     the allowed tokens of rows that do not allow all
        """
        if self._kernel is not None:
            return self._sample_by_kernel(logits, sequences, positions, masks)
        if masks is not None:
            logits = masks.apply(logits)
        drawn = [row for row, sequence in enumerate(sequences) if not sequence.params.greedy]
        if argmax is not None or (logits.dtype == torch.float32 and logits.device.type == "cpu"):
            if argmax is None:
                best = logits.numpy().argmax(axis=-1)  # many times faster than torch's
                argmax = SampledTokens(best, logits.numpy()[np.arange(len(best)), best])
            tokens, largest = argmax
            if drawn:
                tokens = tokens.copy()
                in_torch = rows_for_torch(sequences)
                if fused := [row for row in drawn if row not in in_torch]:
                    tokens[fused] = _draw_on_host(logits, fused, sequences, positions)
                if in_torch:
                    tokens[in_torch] = _draw_rows(logits[in_torch], in_torch, sequences, positions).numpy()
            return SampledTokens(tokens, largest)
        highest, best_tokens = logits.max(dim=-1)
        if drawn:
            _redraw(best_tokens, logits, drawn, sequences, positions)
        return SampledTokens(best_tokens, highest)

    def _sample_by_kernel(
        self, logits: Tensor, sequences: Sequence[TokenSequence], positions: Sequence[int], masks: RowMasks | None
    ) -> SampledTokens[Any]:
        packed, sets = pack_sampling_params(sequences, positions), None
        if masks is not None:
            packed[:, 6], sets = masks.index + 1, masks.bitmasks.to(logits.device, non_blocking=True)
        (words,) = to_device([packed], logits.device)
        logits = logits.float()  # for half precision, a kernel would be compiled while requests wait
        tokens, largest = self.sample_on_device(logits, words, masks=sets)
        if in_torch := rows_for_torch(sequences):
            _redraw(tokens, logits, in_torch, sequences, positions, masks)
        return SampledTokens(tokens, largest)

    def sample_on_device(
        self,
        logits: Tensor,
        words: Tensor,
        tokens: Tensor | None = None,
        largest: Tensor | None = None,
        masks: Tensor | None = None,
    ) -> SampledTokens[Tensor]:
        """The token [R] int64 and the largest logit [R] float32 of each row, by the kernel.

        Everything that changes from step to step is read on the device, so that a CUDA graph may contain the call.

        logits:          [R, V] float32, float16 or bfloat16
        words:           [R, PARAM_WORDS] int32, see `pack_sampling_params`
        tokens, largest: where to write the result; made if not given
        masks:           [M, bitmask_size] int32, see `token_bitmask`; needed if a row has the number of one
        """
        assert self._kernel is not None, "the kernel is not in use"
        if tokens is None:
            tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        if largest is None:
            largest = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        self._kernel(logits, words, tokens, largest, masks)
        return SampledTokens(tokens, largest)


def rows_for_torch(sequences: Sequence[TokenSequence]) -> list[int]:
    """Rows that are sampled at random with a filter that the kernels do not have."""
    return [row for row, one in enumerate(sequences) if not one.params.greedy and one.params.asks_for(TORCH_FILTERS)]


def _redraw(
    tokens: Tensor,
    logits: Tensor,
    rows: list[int],
    sequences: Sequence[TokenSequence],
    positions: Sequence[int],
    masks: RowMasks | None = None,
) -> None:
    (there,) = to_device([np.array(rows, np.int64)], logits.device)
    picked = logits[there].float()
    if masks is not None:
        picked = RowMasks(masks.bitmasks, masks.index[rows]).apply(picked)
    tokens[there] = _draw_rows(picked, rows, sequences, positions)


def _draw_on_host(
    logits: Tensor, rows: list[int], sequences: Sequence[TokenSequence], positions: Sequence[int]
) -> NDArray[np.int64]:
    try:
        from cbatch.kernels.cpu.sampling import draw_tokens
        from cbatch.kernels.cpu.thread_pool import shared_thread_pool
    except ImportError:  # numba does not support every Python
        return _draw_rows(logits[rows], rows, sequences, positions).numpy()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    stride, vocabulary = logits.stride(0), logits.shape[1]
    flat = logits.detach().as_strided(((len(logits) - 1) * stride + vocabulary,), (1,)).numpy()
    words = pack_sampling_params([sequences[row] for row in rows], [positions[row] for row in rows])
    return draw_tokens(shared_thread_pool(num_threads()), flat, vocabulary, np.array(rows, np.int64) * stride, words)


def _draw_rows(
    logits: Tensor, rows: Sequence[int], sequences: Sequence[TokenSequence], positions: Sequence[int]
) -> Tensor:
    """A token for each of D rows of a step.  logits: [D, V], of these rows"""
    drawn = [sequences[row] for row in rows]
    asked = [name for name in FILTERS if any(one.params.asks_for([name]) for one in drawn)]
    values = [np.array([[getattr(one.params, name)] for one in drawn], np.float32) for name in asked]
    packed = pack_sampling_params(drawn, [positions[row] for row in rows])
    words, *columns = to_device([packed, *values], logits.device)
    temperature = words[:, 0].contiguous().view(torch.float32)
    return _draw(logits, temperature, words[:, 4:6].long() & _MASK32, dict(zip(asked, columns, strict=True)))


def _draw(logits: Tensor, temperature: Tensor, keys: Tensor, filters: Mapping[str, Tensor]) -> Tensor:
    """A token for each row of logits [D, V].

    temperature: [D]
    keys:        [D, 2] int64, keys of the noise
    filters:     [D, 1] each, the values of the filters that a row asks for, by name
    """
    logits = logits / temperature[:, None]
    if not filters:
        noise = gumbel_noise(keys, torch.arange(logits.shape[-1], device=logits.device)[None])
        return (logits + noise).argmax(dim=-1)
    logits, ids = logits.sort(dim=-1, descending=True, stable=True)
    kept = _kept(logits, filters)
    if logits.device.type == "cpu":  # the host would have to wait for a GPU
        width = int(kept.sum(dim=-1).max())
        logits, ids, kept = logits[:, :width], ids[:, :width], kept[:, :width]
    noisy = (logits + gumbel_noise(keys, ids)).masked_fill(~kept, float("-inf"))
    return ids.gather(1, noisy.argmax(dim=-1, keepdim=True)).squeeze(1)


def _kept(logits: Tensor, filters: Mapping[str, Tensor]) -> Tensor:
    """Which of the sorted tokens [D, V] pass all filters, one after the other.

    The logits are divided by the temperature already.
    """
    kept = torch.ones_like(logits, dtype=torch.bool)
    for name, keeps in LOGIT_FILTERS.items():
        if name in filters:
            kept &= keeps(logits, filters[name])
    probabilities = torch.softmax(logits.masked_fill(~kept, float("-inf")), dim=-1)
    for name, keeps in SHARE_FILTERS.items():
        if name in filters:
            kept &= keeps(probabilities, filters[name])
    kept[:, 0] = True  # the likeliest token is always kept, even in a row that is NaN and reported as such
    return kept


def _top_n_sigma(logits: Tensor, top_n_sigma: Tensor) -> Tensor:
    """Top-nσ (https://arxiv.org/abs/2411.07641). Tokens that are not allowed count for nothing."""
    allowed = logits.isfinite()
    count = allowed.sum(dim=-1, keepdim=True)
    known = logits.masked_fill(~allowed, 0.0)
    offsets = (known - known.sum(dim=-1, keepdim=True) / count).masked_fill(~allowed, 0.0)
    sigma = (offsets.square().sum(dim=-1, keepdim=True) / count).sqrt()
    return (logits >= logits[:, :1] - top_n_sigma * sigma) | (top_n_sigma == 0)


def _top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Tokens as likely as the k-th are kept too, as in transformers' TopKLogitsWarper."""
    vocabulary = logits.shape[-1]
    top_k = torch.where(top_k > 0, top_k, vocabulary).long()
    kth = logits.gather(1, top_k.clamp(max=vocabulary) - 1)
    return (torch.arange(vocabulary, device=logits.device)[None] < top_k) | (logits >= kth)


LOGIT_FILTERS: dict[str, Filter] = {"top_n_sigma": _top_n_sigma, "top_k": _top_k}
"""Filters of sorted logits [D, V]. Each gives the tokens that it keeps, for values [D, 1], in this order."""

SHARE_FILTERS: dict[str, Filter] = {
    "top_p": lambda shares, top_p: (shares.cumsum(dim=-1) - shares < top_p) | (top_p >= 1),
    "min_p": lambda shares, min_p: shares >= min_p * shares[:, :1],
}
"""Filters of the probabilities [D, V] of what those keep; none renormalizes them for the next."""

FILTERS = (*LOGIT_FILTERS, *SHARE_FILTERS)
TORCH_FILTERS = tuple(name for name in FILTERS if PARAMS[name].filters == "torch")
"""Those that the kernels do not have. Rows with one of them are sampled here."""


def noise_keys(
    seeds: NDArray[np.uint64], samples: NDArray[np.uint64], positions: NDArray[np.uint64]
) -> NDArray[np.uint32]:
    """Two 32-bit words [2, N] for each of N draws: splitmix64 over the row's seed, sample number and position."""
    state = seeds
    for words in (samples, positions):
        state = state + np.uint64(0x9E3779B97F4A7C15) * (words + np.uint64(1))  # all of it modulo 2^64
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return np.stack([state >> np.uint64(32), state]).astype(np.uint32)


def gumbel_noise(keys: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise for keys [D, 2] and token ids [D or 1, N]: float32 [D, N]."""
    words = _mix(_mix(ids ^ keys[:, :1]) ^ keys[:, 1:])
    # The smallest exponentials decide, so they are computed from the end where float32 is precise.
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)  # rounding must not make it 1
    return -torch.log(-torch.log1p(-uniform))


def _mix(words: Tensor) -> Tensor:
    """A 32-bit integer hash on int64 tensors (the finalizer of MurmurHash3, public domain)."""
    words = words ^ (words >> 16)
    words = (words * 0x85EBCA6B) & _MASK32
    words = words ^ (words >> 13)
    words = (words * 0xC2B2AE35) & _MASK32
    return words ^ (words >> 16)
