"""Guards the kernels that draw tokens on a GPU: what they draw is what the definition in torch says.

Without a GPU, Triton's interpreter runs them on the CPU, slowly: few rows, small vocabularies, small tiles.
"""

from __future__ import annotations

import math
import sys
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.sample.row_masks import RowMasks
from cbatch.sample.sampler import PARAM_WORDS, Sampler, gumbel_noise, pack_sampling_params
from cbatch.sample.structured.token_bitmask import bitmask_of
from cbatch.schedule.sequence import TokenSequence
from tests.support.device import DEVICE
from tests.support.samples import sampled
from tests.support.sampling_cases import (
    LOGIT_SHAPES,
    draw_in_torch,
    is_on_edge,
    make_logits,
    make_requests,
    noise_key,
    positions_of,
    sample,
    score,
)

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from cbatch.kernels.triton.sampling import Tiling, noise, noise_bound, sample_rows, uniform_of

ROWS = 400 if DEVICE.type == "cuda" else 8
SMALL = Tiling(block=16, chunk=16, part=16, group=16, warps=(4, 4))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # infinities are meant
]


def draw(
    logits: Tensor, sequences: list[TokenSequence], tiling: Tiling = SMALL, masks: RowMasks | None = None
) -> tuple[list[int], Tensor]:
    packed, sets = pack_sampling_params(sequences, positions_of(sequences)), None
    if masks is not None:
        packed[:, 6], sets = masks.index + 1, masks.bitmasks.to(DEVICE)
    words = torch.from_numpy(packed).to(DEVICE)
    tokens, largest = torch.full((len(sequences),), -1, device=DEVICE), torch.zeros(len(sequences), device=DEVICE)
    sample_rows(logits.to(DEVICE), words, tokens, largest, sets, tiling)
    return tokens.tolist(), largest.cpu()


def check(logits: Tensor, sequences: list[TokenSequence], tokens: list[int]) -> None:
    """At most one token is not the definition's, and only if rounding decides."""
    expected = draw_in_torch(logits.float(), sequences)
    different = [row for row in range(len(sequences)) if tokens[row] != expected[row]]
    assert len(different) <= 1
    for row in different:
        values, sequence, pair = logits[row].float(), sequences[row], (tokens[row], expected[row])
        gap = score(values, sequence, pair[0]) - score(values, sequence, pair[1])
        assert abs(gap) < 1e-4 or any(is_on_edge(values, sequence.params, token) for token in pair)


@pytest.mark.parametrize("way", sampled(product(LOGIT_SHAPES, [7, 701]), 5, keep=[("peaked", 701)]), ids=str)
def test_tokens_are_those_of_the_definition(way: tuple[str, int]) -> None:
    """Guards temperature and all filters, on rows of one tile and of many, of which the last is not full."""
    shape, vocabulary = way
    logits, sequences = make_logits(shape, ROWS, vocabulary, vocabulary), make_requests(ROWS, vocabulary)
    tokens, largest = draw(logits, sequences)
    check(logits, sequences, tokens)
    assert torch.equal(largest, logits.max(dim=-1).values)


def make_masks(rows: int, vocabulary: int) -> RowMasks:
    """Few tokens, many, one, only the first, only the last; every third row has none, others have each other's."""
    rng = np.random.default_rng(0)
    sets = [np.flatnonzero(rng.random(vocabulary) < share) for share in (0.1, 0.9)]
    sets += [np.array([token]) for token in (vocabulary // 2, 0, vocabulary - 1)]
    bitmasks = np.stack([bitmask_of([*tokens.tolist(), vocabulary - 2], vocabulary) for tokens in sets])
    index = rng.integers(0, len(sets), rows).astype(np.int32)
    index[::3] = -1
    return RowMasks(torch.from_numpy(bitmasks), index)


@pytest.mark.parametrize(
    ("vocabulary", "filters"), [(7, {}), (701, {}), (288, {"top_k": 0, "top_p": 1.0, "min_p": 0.0})], ids=str
)
def test_only_allowed_tokens_are_drawn(vocabulary: int, filters: dict[str, Any]) -> None:
    """Guards masks in both kernels, wherever they read logits: as if the logits of other tokens were minus infinity."""
    logits, sequences = make_logits("normal", 2 * ROWS, vocabulary, 4), make_requests(2 * ROWS, 2, **filters)
    masks = make_masks(2 * ROWS, vocabulary)
    masked = masks.apply(logits)
    tokens, largest = draw(logits, sequences, masks=masks)
    check(masked, sequences, tokens)
    assert torch.equal(largest, masked.max(dim=-1).values)
    greedy = [TokenSequence(0, [1], Request(max_new_tokens=9)) for _ in sequences]
    assert draw(logits, greedy, masks=masks)[0] == masked.argmax(dim=-1).tolist()
    for tiling in (Tiling(), Tiling(block=32, chunk=4, part=2, group=4)):
        assert draw(logits, sequences, tiling, masks)[0] == tokens


def test_what_is_not_allowed_may_be_any_number() -> None:
    """Guards padding of the vocabulary and rows with nothing left: only allowed logits say that a row is not finite."""
    logits, sequences = make_logits("normal", 4, 300), make_requests(4, temperature=1.0, top_p=0.9, min_p=0.0)
    sets = [bitmask_of(tokens, 300) for tokens in ([5, 40, 290], [], range(100), range(299))]
    masks = RowMasks(torch.from_numpy(np.stack(sets)), np.array([2, 1, 0, 3], np.int32))
    logits[:, 100:280], logits[0, 299] = math.nan, math.inf
    tokens, largest = draw(logits, sequences, masks=masks)
    assert largest[0] == logits[0, :100].max() and tokens[0] < 100
    assert largest[1] == -math.inf and largest[3].isnan()
    assert largest[2] == logits[2, [5, 40, 290]].max() and tokens[2] in (5, 40, 290)


def test_the_first_of_equal_tokens_counts() -> None:
    """Guards the order among equal logits, across blocks and tiles: top-p keeps exactly the first 150 of 300, and
    top-k of logits in half precision those with the lower ids.
    """
    logits = torch.zeros(ROWS, 300)
    sequences = make_requests(ROWS, temperature=1.0, top_k=0, top_p=0.5 - 1e-4, min_p=0.0)
    tokens, _ = draw(logits, sequences)
    check(logits, sequences, tokens)
    assert max(tokens) in range(100, 150)
    for dtype in (torch.bfloat16, torch.float16):
        logits, sequences = make_logits("normal", ROWS, 500).to(dtype), make_requests(ROWS, top_k=9)
        tokens, largest = draw(logits, sequences)
        check(logits, sequences, tokens)
        assert torch.equal(largest, logits.max(dim=-1).values.float())


def test_greedy_rows_beside_drawn_ones() -> None:
    """Guards the argmax, the first of equal ones, and that a greedy row's temperature is no divisor."""
    logits = make_logits("equal", 8, 333)
    sequences = make_requests(8)
    for row in range(0, 8, 2):
        sequences[row].request.params = SamplingParams(temperature=1e-7 * row, top_k=5, top_p=0.5)
    tokens, largest = draw(logits, sequences)
    assert tokens[::2] == np.argmax(logits.numpy(), axis=-1)[::2].tolist()
    assert torch.equal(largest, logits.max(dim=-1).values)
    check(logits[1::2], sequences[1::2], tokens[1::2])


def test_tokens_are_the_same_in_every_batch_and_layout() -> None:
    """Guards the promise that neighbours never change a token; rows of a wider buffer, and columns, likewise."""
    wide = make_logits("normal", 6, 420)
    logits, sequences = wide[:, 7:307], make_requests(6)
    batched, _ = draw(logits, sequences)
    assert batched == draw(logits.contiguous(), sequences)[0]
    assert batched == draw(logits.T.contiguous().T, sequences)[0]
    assert batched[::-1] == draw(logits.flip(0), sequences[::-1])[0]
    assert batched == [draw(logits[row : row + 1], sequences[row : row + 1])[0][0] for row in range(6)]


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_change_no_others(bad: float) -> None:
    """Guards against a crash, an endless loop or an invalid token; such rows report a logit that is not finite."""
    logits, sequences = make_logits("normal", 6, 290), make_requests(6)
    whole, _ = draw(logits, sequences)
    logits[0:2], logits[2:4, 70:200:2], logits[4, 0] = bad, bad, bad
    tokens, largest = draw(logits, sequences)
    assert all(0 <= token < 290 for token in tokens) and tokens[5] == whole[5]
    assert torch.equal(largest, logits.max(dim=-1).values) or math.isnan(bad)
    assert torch.equal(largest.isfinite(), logits.max(dim=-1).values.isfinite())


@triton.jit  # type: ignore[untyped-decorator]
def _noise_kernel(ids: tl.tensor, keys: tl.tensor, drawn: tl.tensor, bounds: tl.tensor) -> None:
    i = tl.arange(0, 64)
    uniform = uniform_of(tl.load(ids + i), (tl.load(keys).to(tl.uint32), tl.load(keys + 1).to(tl.uint32)))
    tl.store(drawn + i, noise(uniform))
    tl.store(bounds + i, noise_bound(uniform))


def test_noise_is_that_of_torch() -> None:
    """Guards the hash to the bit, its logarithms near 0, and the bound that makes most of them unnecessary."""
    ids = torch.cat([torch.arange(59), torch.tensor([65_535, 65_536, 88_373, 151_935, 2**31 - 1])]).to(DEVICE)
    for key in [(0, 0), (1, 2), (0xFFFFFFFF, 0x80000000), noise_key(452, 0, 10)]:
        keys, (drawn, bounds) = torch.tensor([key], device=DEVICE), torch.empty(2, 64, device=DEVICE)
        _noise_kernel[(1,)](ids, keys, drawn, bounds)
        torch.testing.assert_close(drawn, gumbel_noise(keys, ids[None])[0], rtol=1e-6, atol=1e-6)
        assert bool((bounds > drawn).all())


def test_noise_keys_are_those_of_whole_numbers() -> None:
    """Guards outputs of a seed for all time: splitmix64 as one writes it with Python's integers."""

    def by_hand(seed: int, sample_index: int, position: int) -> tuple[int, int]:
        state = seed % 2**64
        for word in (sample_index, position):
            state = (state + 0x9E3779B97F4A7C15 * (word + 1)) % 2**64
            state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
            state ^= state >> 31
        return divmod(state, 2**32)

    for seed in (0, 1, -1, 2**63, 2**64 - 1, -(2**63)):
        for sample_index, position in [(0, 0), (3, 1), (127, 10**6)]:
            assert noise_key(seed, sample_index, position) == by_hand(seed, sample_index, position)


def test_the_sampler_uses_the_kernel_until_it_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the choice of an engine: the kernel only on a GPU, for each engine by itself, and torch afterwards."""
    assert Sampler(torch.device("cuda")).uses_kernel and not Sampler(torch.device("cpu")).uses_kernel
    assert not Sampler(torch.device("cuda"), kernel=False).uses_kernel
    logits, sequences = make_logits("normal", 3, 200).to(DEVICE), make_requests(2)
    sequences.append(TokenSequence(0, [1] * 5, Request(max_new_tokens=9)))
    sampler, other = Sampler(DEVICE, kernel=True), Sampler(DEVICE, kernel=True)
    calls = []
    for one in (sampler, other):
        kernel = one._kernel
        assert kernel is not None
        monkeypatch.setattr(
            one, "_kernel", lambda *given, kernel=kernel: calls.append(given[0].dtype) or kernel(*given)
        )
    expected = sampler.sample(logits, sequences, [5, 5, 5]).get()
    check(logits[:2].cpu(), sequences[:2], expected[0][:2])
    masks = make_masks(4, 200)
    masks = RowMasks(masks.bitmasks, masks.index[1:])
    masked = sampler.sample(logits, sequences, [5, 5, 5], None, masks).get()
    assert masked != expected and len(calls) == 2
    sampler.sample(logits.bfloat16(), sequences, [5, 5, 5])
    assert calls.pop() == torch.float32, "a kernel for other logits is compiled when the first ones come"
    sampler.disable_kernel()
    assert sampler.sample(logits, sequences, [5, 5, 5]).get() == expected
    assert sampler.sample(logits, sequences, [5, 5, 5], None, masks).get() == masked and len(calls) == 2
    assert other.uses_kernel and not sampler.uses_kernel
    monkeypatch.setitem(sys.modules, "cbatch.kernels.triton.sampling", None)
    assert not Sampler(torch.device("cuda")).uses_kernel
    with pytest.raises(ImportError):
        Sampler(DEVICE, kernel=True)


def test_results_are_written_where_a_recorded_step_expects_them() -> None:
    """Guards fixed addresses: rows of wider buffers, whose padding rows are zeros, and nothing beyond them."""
    logits, sequences = make_logits("normal", 5, 200).to(DEVICE), make_requests(3)
    words = torch.zeros(5, PARAM_WORDS, dtype=torch.int32, device=DEVICE)
    words[:3] = torch.from_numpy(pack_sampling_params(sequences, positions_of(sequences)))
    tokens = torch.full((6,), -7, device=DEVICE)
    largest = torch.full((6,), -7.0, device=DEVICE)
    logits[4] = math.nan
    found = Sampler(DEVICE, kernel=True).sample_on_device(logits, words, tokens[:5], largest[:5])
    assert found.tokens.data_ptr() == tokens.data_ptr() and found.largest.data_ptr() == largest.data_ptr()
    check(logits[:3].cpu(), sequences, tokens[:3].tolist())
    assert tokens[3] == logits[3].argmax() and tokens[5] == -7 and largest[5] == -7
    assert torch.equal(largest[:4], logits[:4].max(dim=-1).values) and largest[4].isnan()


@pytest.mark.gpu
def test_sampling_does_not_wait_for_the_device() -> None:
    """Guards the queue of the GPU: no copy or result is waited for while a step's tokens are chosen."""
    logits, sequences = make_logits("normal", 40, 5000), make_requests(40)
    on_device = logits.to(DEVICE)
    tokens, largest = sample(on_device, sequences).get()
    check(logits, sequences, tokens)
    assert largest == logits.max(dim=-1).values.tolist()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = sample(on_device, sequences)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert again.get() == (tokens, largest)
