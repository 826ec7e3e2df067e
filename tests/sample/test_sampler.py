"""Filters against transformers' own, draws against probabilities, noise against its promise."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process

from cbatch.base.config import EngineConfig
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.engine.loop import StepLoop
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.runtime.batch import Logits, SampledTokens
from cbatch.sample.output import PendingSample, sampling_params
from cbatch.sample.processors import process_logits
from cbatch.sample.row_masks import RowMasks
from cbatch.sample.sampler import Sampler, gumbel_noise, pack_sampling_params
from cbatch.schedule.output import ScheduledChunk, SchedulerOutput
from cbatch.schedule.sequence import TokenSequence
from tests.support.sampling_cases import noise_key, sample

CPU = torch.device("cpu")


def make_request(seed: int = 0, position: int = 5, sample_number: int = 0, **params: Any) -> TokenSequence:
    return TokenSequence(
        0, [1] * position, Request(params=SamplingParams(**params), max_new_tokens=9, seed=seed), sample_number
    )


def draw(logits: torch.Tensor, sequences: list[TokenSequence]) -> list[int]:
    masks = RowMasks.build(sequences, None, [], logits)
    return sample(process_logits(logits, sequences), sequences, masks).get()[0]


def random_logits(rows: int, vocabulary: int = 50) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(3)) * 3


FILTERS = [
    {"top_k": 7},
    {"top_p": 0.6},
    {"min_p": 0.1},
    {"top_k": 10, "top_p": 0.7, "min_p": 0.05},
    {"top_k": 500, "top_p": 0.999},
    {"top_k": 1},
    {"top_p": 1e-6},
]


WARPERS = {
    "top_k": logits_process.TopKLogitsWarper,
    "top_p": logits_process.TopPLogitsWarper,
    "min_p": logits_process.MinPLogitsWarper,
}


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_keep_what_transformers_keeps(filters: dict[str, Any]) -> None:
    """Guards the order and the edges of top-k, top-p and min-p: 400 draws stay inside, and reach, the kept set."""
    logits = random_logits(1)
    kept = logits / 0.8
    for name, value in filters.items():
        kept = WARPERS[name](value)(None, kept)
    probabilities = kept.softmax(-1)[0]
    sequences = [make_request(seed=seed, temperature=0.8, **filters) for seed in range(400)]
    tokens = Counter(draw(logits.expand(400, -1), sequences))
    assert all(probabilities[token] > 0 for token in tokens)
    assert all(token in tokens for token in range(50) if probabilities[token] > 0.02)


@pytest.mark.parametrize("width", [0.5, 1.0, 2.5])
@pytest.mark.parametrize("temperature", [0.7, 30.0])
def test_top_n_sigma_keeps_what_its_formula_keeps(width: float, temperature: float) -> None:
    """Guards the edge, also among few allowed tokens and at any temperature; rows without the filter stay as they are.

    kept: logits of at least the largest minus `width` standard deviations (https://arxiv.org/abs/2411.07641)
    """
    logits, count = random_logits(1), 400
    for allowed in (None, list(range(0, 50, 3))):
        known = logits[0] if allowed is None else logits[0, allowed]
        least = known.max() - width * known.std(correction=0)
        kept = {token for token in allowed or range(50) if logits[0, token] >= least}
        asked = {"temperature": temperature, "allowed_token_ids": allowed}
        free = [make_request(seed, **asked) for seed in range(count)]
        narrow = [make_request(seed, top_n_sigma=width, **asked) for seed in range(count)]
        drawn = draw(logits.expand(2 * count, -1), free + narrow)
        assert drawn[:count] == draw(logits.expand(count, -1), free)
        assert {*drawn[count:]} <= kept and (temperature < 1 or {*drawn[count:]} == kept < {*drawn[:count]})


def test_draws_follow_the_softmax() -> None:
    """Guards the Gumbel trick and the hash behind it: chi-square of 20,000 draws over 12 tokens."""
    logits = random_logits(1, 12) / 2
    count = 20_000
    sequences = [make_request(seed=seed, temperature=1.0) for seed in range(count)]
    tokens = Counter(draw(logits.expand(count, -1), sequences))
    expected = logits.softmax(-1)[0] * count
    chi_square = sum((tokens[token] - float(expected[token])) ** 2 / float(expected[token]) for token in range(12))
    assert chi_square < 31.3, "less likely than 1 in 1000 for 11 degrees of freedom"


def test_noise_differs_in_every_coordinate() -> None:
    """Guards against coordinates that share their randomness, and noise of minus infinity, which lost even alone."""
    keys = {noise_key(s, n, p) for s in (0, 1, -1, 2**63) for n in range(4) for p in range(50)}
    assert len(keys) == 800
    noise = gumbel_noise(torch.tensor(sorted(keys)), torch.arange(1000)[None])
    assert bool(noise.isfinite().all())
    assert abs(float(noise.mean()) - 0.5772) < 0.01 and abs(float(noise.var()) - math.pi**2 / 6) < 0.02
    assert len(set(noise.flatten().tolist())) > 0.95 * noise.numel()
    assert bool(gumbel_noise(torch.tensor([noise_key(452, 0, 10)]), torch.tensor([[88373]])).isfinite())


def test_min_tokens_forbids_end_tokens() -> None:
    """Guards min_tokens: the end token may not come while too little is generated, then it may."""
    logits = random_logits(2)
    logits[:, 4] = 100.0
    early, late = make_request(min_tokens=2), make_request(min_tokens=0)
    early.request.stop_ids = late.request.stop_ids = frozenset({4})
    first, second = draw(logits, [early, late])
    assert first != 4 and second == 4 and logits[0, 4] == 100.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "min_p": 0.1, "top_p": 0.5}], ids=str
)
def test_rows_that_are_not_finite_are_marked(bad: float, params: dict[str, float]) -> None:
    """Guards against a broken or a hot row harming its neighbours, and against it passing as text."""
    logits = random_logits(3)
    logits[1, 2] = bad
    sequences = [make_request(), make_request(**params), make_request(temperature=1e-7)]
    tokens, largest = sample(logits, sequences).get()
    assert list(map(math.isfinite, largest)) == [True, False, True]
    assert [tokens[0], tokens[2]] == logits[::2].argmax(-1).tolist()


def test_parameters_are_packed_before_the_tokens_in_flight_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards captured steps that sample: a chunk's `stop` is the position that its token has once all are known."""
    launch, choose = StepLoop._launch, Sampler.sample
    early: list[dict[int, list[int]]] = []
    placeholders = compared = 0

    def note_launch(core: StepLoop, scheduled: SchedulerOutput, *others: Any) -> Any:
        nonlocal placeholders
        chunks = scheduled.to_sample
        words = pack_sampling_params([chunk.sequence for chunk in chunks], [chunk.stop for chunk in chunks])
        early.append({chunk.sequence.id: row.tolist() for chunk, row in zip(chunks, words, strict=True)})
        placeholders += sum(chunk.sequence.num_output_placeholders > 1 for chunk in chunks)
        return launch(core, scheduled, *others)

    def compare(sampler: Sampler, logits: Any, sequences: list[TokenSequence], positions: Any, *rest: Any) -> Any:
        nonlocal compared
        known = [sequence for sequence in sequences if not sequence.has_ended]
        words = pack_sampling_params(known, [len(sequence.token_ids) for sequence in known])
        given = dict(zip((sequence.id for sequence in sequences), positions, strict=True))
        assert all(given[sequence.id] == len(sequence.token_ids) for sequence in known)
        assert words.tolist() == [early[-1][sequence.id] for sequence in known]
        compared += len(known)
        return choose(sampler, logits, sequences, positions, *rest)

    monkeypatch.setattr(StepLoop, "_launch", note_launch)
    monkeypatch.setattr(Sampler, "sample", compare)
    with SteppingEngine(EngineConfig(device="cpu", run_ahead=True, max_batch_tokens=16, speculate="off")) as engine:
        for number in range(4):
            params = SamplingParams(max_tokens=4 + number, temperature=0.5 + number / 2, top_k=9, ignore_eos=True)
            engine.add(engine.encode("Tell me a story about a dog. " * (number + 1)), params, seed=number)
        while engine.has_work:
            engine.step()
    assert compared == 4 + 5 + 6 + 7 and placeholders > 10


def test_a_row_is_packed_into_words() -> None:
    """Guards the places that the kernels read, and padding rows of captured steps: zeros are a greedy row."""
    drawn = make_request(-1, sample_number=3, temperature=0.8, top_p=0.5, min_p=0.25, top_k=3)
    sequences = [make_request(), drawn, make_request()]
    words = pack_sampling_params(sequences, [5, 6, 7])
    assert words[1].view(np.float32)[:3].tolist() == [np.float32(0.8), 0.5, 0.25] and words[1, 3] == 3
    assert tuple(words[1].view(np.uint32)[4:6].tolist()) == noise_key(-1, 3, 6) and not words[1, 6:].any()
    assert not pack_sampling_params(sequences[:1], [5]).any() and not words[[0, 2], 0].any()


def pending(sequences: list[TokenSequence], logits: Logits) -> PendingSample:
    chunks = [ScheduledChunk(sequence, 0, len(sequence.token_ids), True, []) for sequence in sequences]
    return PendingSample(SchedulerOutput(chunks), logits, Sampler(CPU))


def test_tokens_of_a_recorded_step_are_taken_unless_logits_are_changed() -> None:
    """Guards both sides of sampling inside a graph: nothing is sampled twice, and no penalty is left out."""
    logits = random_logits(2)
    sampled = SampledTokens(torch.tensor([7, 8]), torch.tensor([1.0, 2.0]))
    plain, biased = make_request(), make_request(logit_bias={30: 100.0})
    step = pending([plain, plain], Logits(logits, sampled=sampled))
    assert [sample.token_id for sample in step.get().samples] == [7, 8]
    assert step.in_flight_tokens.tokens is sampled.tokens
    step = pending([plain, biased], Logits(logits, sampled=sampled))
    assert [sample.token_id for sample in step.get().samples] == [int(logits[0].argmax()), 30]


def test_a_filter_that_no_kernel_has_is_applied_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards rare filters on every device: their rows take the path of torch, and the others stay with the kernel."""
    logits, count = random_logits(1).expand(60, -1).contiguous(), 60
    asked: list[dict[str, Any]] = [{"temperature": 1.5, "min_p": 0.3}, {"temperature": 1.5}, {"min_p": 0.3}]
    sequences = [make_request(seed, **asked[seed % 3]) for seed in range(count)]
    positions = [len(sequence.token_ids) for sequence in sequences]
    expected = Sampler(CPU).sample(logits, sequences, positions).get()[0]
    monkeypatch.setattr("cbatch.sample.sampler.TORCH_FILTERS", ("min_p",))
    assert Sampler(CPU).sample(logits, sequences, positions).get()[0] == expected

    def kernel(logits: Any, words: Any, tokens: torch.Tensor, largest: torch.Tensor, masks: Any) -> None:
        tokens.fill_(7)
        largest.copy_(logits.max(dim=-1).values)

    sampler = Sampler(CPU)
    sampler._kernel = kernel
    found = sampler.sample(logits, sequences, positions).get()[0]
    assert found[::3] == expected[::3] and {*found[1::3], *found[2::3]} == {7}
    chunks = [ScheduledChunk(sequence, 4, 5, True, []) for sequence in sequences]
    assert sampling_params(SchedulerOutput(chunks)) is None
    assert sampling_params(SchedulerOutput(chunks[1::3])) is not None
