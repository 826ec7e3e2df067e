"""Guards the kernel that draws tokens on the CPU: what it draws and keeps is what the definition in torch says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cbatch.base.params import SamplingParams
from cbatch.kernels.cpu.jit import entry
from cbatch.kernels.cpu.sampling import (
    BLOCK,
    argmax,
    block_maxima,
    divide,
    is_kept,
    kth_largest_logit,
    mass_before,
    noise,
    sampling_workspace,
)
from cbatch.kernels.cpu.thread_pool import shared_thread_pool
from cbatch.sample import sampler
from cbatch.sample.sampler import FILTERS, gumbel_noise
from tests.support.kernels import callable_kernel
from tests.support.sampling_cases import (
    LOGIT_SHAPES,
    draw_in_torch,
    is_on_edge,
    make_logits,
    make_requests,
    sample,
    score,
)

pytestmark = pytest.mark.kernels

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", LOGIT_SHAPES)
def test_draws_are_those_of_torch(shape: str) -> None:
    """Guards the definition: 2,000 draws with all filters; two that differ are as good as each other."""
    different = []
    for seed, vocabulary in enumerate([7, 64, 500, 1000, 3333]):
        logits = make_logits(shape, 400, vocabulary, seed)
        requests = make_requests(400, seed)
        mine, theirs = sample(logits, requests).get()[0], draw_in_torch(logits, requests)
        different += [
            score(logits[row], requests[row], mine[row]) - score(logits[row], requests[row], theirs[row])
            for row in range(400)
            if mine[row] != theirs[row]
        ]
    assert len(different) <= 2 and all(abs(difference) < 1e-4 for difference in different)


@entry
def largest_of(rows: Any, places: Any, numbers: Any) -> None:
    """Fills in the place of the largest number of each of R rows [R], and that number [R]."""
    for row in range(len(rows)):
        places[row], numbers[row] = argmax(rows[row])


@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000])
def test_the_largest_is_that_of_numpy(length: int) -> None:
    """Guards greedy rows: the first of equal numbers, zeros of both signs being equal, and NaN seen anywhere."""
    rng = np.random.default_rng(length)
    rows = rng.normal(size=(60, length)).astype(np.float32).round(1)
    rows[10:20] = rng.choice(np.array([0.0, -0.0, -1.0], np.float32), size=(10, length))
    rows[20, :], rows[21, : length // 2] = -np.inf, -np.inf
    rows[22, length // 2], rows[23, -1], rows[24, 0] = np.inf, np.nan, np.copysign(np.float32(np.nan), -1)
    places, numbers = np.zeros(60, np.int64), np.zeros(60, np.float32)
    largest_of(rows, places, numbers)
    is_number = ~np.isnan(rows).any(axis=1)
    assert (places == rows.argmax(axis=1))[is_number].all() and (numbers == rows.max(axis=1))[is_number].all()
    assert np.isnan(numbers[~is_number]).all() and is_number.sum() == 58


@entry
def keep(
    row: Any, temperature: Any, top_k: int, top_p: Any, min_p: Any, block_max: Any, candidates: Any, kept: Any
) -> None:
    """Fills in which tokens of a row are kept [V] bool."""
    first = block_maxima(row, temperature, block_max)
    limit = kth_largest_logit(row, temperature, top_k, block_max, candidates)
    total = mass_before(row, temperature, block_max, divide(row[first], temperature), limit, len(row))
    for i in range(len(row)):
        kept[i] = divide(row[i], temperature) >= limit and is_kept(
            row, temperature, top_p, min_p, block_max, first, total, i
        )


def kept_tokens(row: NDArray[np.float32], params: SamplingParams) -> NDArray[np.bool_]:
    kept = np.zeros(len(row), np.bool_)
    numbers = np.array([params.temperature, params.top_p, params.min_p], np.float32)
    k = min(params.top_k or len(row), len(row))
    block_max, candidates = np.zeros(-(-len(row) // BLOCK), np.float32), np.zeros_like(row)
    keep(row, numbers[0], k, numbers[1], numbers[2], block_max, candidates, kept)
    return kept


@pytest.mark.parametrize("shape", LOGIT_SHAPES)
def test_kept_tokens_are_those_of_torch(shape: str) -> None:
    """Guards the filters at their edges: a token that only one of both keeps is on the edge to 1e-5 of all."""
    for seed, vocabulary in enumerate([5, 130, 700]):
        logits, requests = make_logits(shape, 60, vocabulary, seed), make_requests(60, seed)
        values = {name: torch.tensor([[getattr(one.params, name)] for one in requests]) for name in FILTERS}
        temperature = torch.tensor([[one.params.temperature] for one in requests])
        ordered, ids = (logits / temperature).sort(dim=-1, descending=True, stable=True)
        theirs = torch.zeros(60, vocabulary, dtype=torch.bool).scatter(1, ids, sampler._kept(ordered, values))
        for row in range(60):
            mine = torch.from_numpy(kept_tokens(logits[row].numpy(), requests[row].params))
            different = (mine != theirs[row]) & logits[row].isfinite()
            assert int(different.sum()) <= 1
            if different.any():
                assert is_on_edge(logits[row], requests[row].params, int(different.nonzero()[0]))


def test_noise_is_that_of_torch() -> None:
    """Guards the hash and its logarithms, token ids beyond 16 bits included."""
    keys = torch.tensor([[0, 0], [1, 2], [0xFFFFFFFF, 0x80000000]])
    ids = torch.tensor([0, 1, 77, 65_536, 151_935, 2**31 - 1])
    alone = callable_kernel(noise)
    mine = [[alone(token, np.array(key, np.uint32)) for token in ids.tolist()] for key in keys.tolist()]
    np.testing.assert_allclose(mine, gumbel_noise(keys, ids[None]).numpy(), rtol=1e-6, atol=1e-6)


def test_draws_are_the_same_in_every_batch_and_with_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the promise that neither neighbours nor threads change a token; rows of a wider buffer likewise."""
    wide = make_logits("normal", 40, 1100)
    logits, requests = wide[:, :1000], make_requests(40)
    batched = sample(logits, requests).get()[0]
    assert batched == sample(logits.contiguous(), requests).get()[0]
    assert batched == sample(logits.T.contiguous().T, requests).get()[0]
    assert batched == [sample(logits[row : row + 1], requests[row : row + 1]).get()[0][0] for row in range(40)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert all(sample(logits, requests).get()[0] == batched for _ in range(20))


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_change_no_others(bad: float) -> None:
    """Guards against a crash, an endless loop or an invalid token; such rows are marked."""
    logits, requests = make_logits("normal", 60, 300), make_requests(60)
    whole = sample(logits, requests).get()[0]
    logits[0:20], logits[20:40, 70:200:2], logits[40:60:2, 0] = bad, bad, bad
    tokens, largest = sample(logits, requests).get()
    assert all(0 <= token < 300 for token in tokens) and tokens[41::2] == whole[41::2]
    assert torch.equal(torch.tensor(largest).isfinite(), logits.max(dim=-1).values.isfinite())


def test_memory_and_threads_are_kept() -> None:
    """Guards against megabytes and threads that come and go with every step."""
    assert shared_thread_pool(2) is shared_thread_pool(2) and sampling_workspace(2, 500) is sampling_workspace(2, 500)
