"""The roofline: bytes and operations counted by hand, and rates measured on a simulated clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cbatch.cli.bench import roofline
from cbatch.cli.bench.roofline import DeviceRates, ModelCost, RooflineBound, measure_rates, roofline_bound
from cbatch.cli.bench.workload import Workload
from tests.support.tiny_models import COMMON, make_engine, make_network

HIDDEN, INNER, LAYERS, VOCABULARY = 48, 64, 2, COMMON["vocab_size"]
ATTENTION = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2  # two heads of keys and values for four of queries
MLP = 3 * HIDDEN * INNER
HEAD = VOCABULARY * HIDDEN
CPU = torch.device("cpu")


def clock_of(durations: list[float]) -> Callable[[], float]:
    """A clock that is read in pairs, at the start and the end of each duration; they end at whole thousands."""
    times = [time for number, seconds in enumerate(durations) for time in (1000.0 * number - seconds, 1000.0 * number)]
    return iter(times).__next__


def test_a_bound_by_hand() -> None:
    """Guards the formula: the slower of reading and multiplying, plus the context, whatever steps a run took."""
    work = Workload([[1] * 10, [1] * 30], [256, 256], "")
    cost = ModelCost(weight_bytes=1000, parameters=100, head_parameters=20, layers=((4, None), (2, 16)))
    floor = roofline_bound(work, cost, DeviceRates(bytes_per_s=500.0, flops_per_s=2000.0))
    context = 256 * 10 + 256 * 30 + 2 * (255 * 256 // 2)
    windowed = sum(range(10, 16)) + 250 * 16 + 256 * 16
    assert floor == RooflineBound(
        weights_s=2 * 1000 / 500,
        compute_s=2 * (100 * (10 + 30 + 255 + 255) + 20 * 512) / 2000,
        cache_s=(4 * context + 2 * windowed) / 500,
    )
    assert floor.seconds == max(floor.weights_s, floor.compute_s) + floor.cache_s
    assert floor.reached(2 * floor.seconds) == 0.5 and floor.reached(0.0) == 0.0


def test_matrices_of_a_model() -> None:
    """Guards what counts as read: all matrices, the tied head once, and no embedding beside it."""
    engine = make_engine(make_network("llama", tie_word_embeddings=True))
    cost = ModelCost.of(engine)
    assert cost.parameters == LAYERS * (ATTENTION + MLP) and cost.head_parameters == HEAD
    assert cost.weight_bytes == 4 * (LAYERS * (ATTENTION + MLP) + HEAD)
    assert sum(layer_bytes for layer_bytes, _ in cost.layers) == engine.limits.kv_bytes_per_token
    assert cost.assumed == ()


def test_matrices_of_other_models() -> None:
    """Guards positions, which are looked up, experts, of which all are read, and windows, which each layer has."""
    attention_and_mlp = 4 * HIDDEN * HIDDEN + 2 * HIDDEN * INNER
    assert ModelCost.of(make_engine(make_network("gpt2"))).parameters == LAYERS * attention_and_mlp
    cost, router = ModelCost.of(make_engine(make_network("mixtral"))), 4 * HIDDEN
    assert cost.weight_bytes == 4 * (LAYERS * (ATTENTION + router + 4 * MLP) + HEAD)
    assert cost.parameters == LAYERS * (ATTENTION + router + 2 * MLP)
    assert [note for note in cost.assumed if "experts" in note] == list(cost.assumed) != []
    assert [window for _, window in ModelCost.of(make_engine(make_network("gemma2"))).layers] == [12, None]


def test_the_best_round_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the rates: the best round counts, the first only warms up; bytes are read and written."""
    seconds = [0.001, 0.04, 0.02, 0.08, 0.05, 0.03, 0.001, 0.02, 0.01, 0.03, 0.02, 0.02]
    monkeypatch.setattr(roofline, "COPY_BYTES", 1000)
    monkeypatch.setattr(roofline, "clock", clock_of(seconds))
    rates = measure_rates(CPU, torch.float32)
    assert rates.bytes_per_s == pytest.approx(2 * 1000 / 0.02)
    assert rates.flops_per_s == pytest.approx(2 * 1024**3 / 0.01)


def test_rates_are_measured_with_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the matrix rate of a GPU, which equal numbers flatter: its limit is power, and few bits change."""
    products, mm = [], torch.mm
    monkeypatch.setattr(roofline, "COPY_BYTES", 2**20)
    monkeypatch.setattr(
        torch, "mm", lambda left, right, out: products.append((left, right)) or mm(left, right, out=out)
    )
    rates = measure_rates(CPU, torch.bfloat16)
    assert 0 < rates.bytes_per_s < float("inf") and 0 < rates.flops_per_s < float("inf")
    of_each = {left.dtype: (left, right) for left, right in products}
    assert of_each.keys() == {torch.bfloat16, torch.float32}
    for left, right in of_each.values():
        assert left.shape == right.shape == (1024, 1024)
        for numbers in (left.float(), right.float()):
            assert abs(numbers.mean()) < 0.01 and abs(numbers.std() - 1) < 0.01
            assert len(numbers.unique()) > 1000 and not numbers[0].equal(numbers[1])
        assert abs((left.float() * right.float()).mean()) < 0.01  # neither is made of the other
        assert right.stride() == (1, 1024)  # as `linear` multiplies with weights
