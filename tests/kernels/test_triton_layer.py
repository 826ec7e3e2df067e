"""Guards what Triton's kernels compute between the products of a layer: what torch's operations compute.

`tests/model/test_device_programs.py` compares those with transformers. What no model there has, is written out here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cbatch.model.ops.device_kernel import by_torch, by_triton
from cbatch.model.weight import Activation
from scripts.gpu.bound_kernels import BoundKernels, Heads, router
from tests.support.device import DEVICE
from tests.support.kernels import draw

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from cbatch.kernels.operands import Addend, Embedding, ExpertWeights, NormWeights, Positions

pytestmark = pytest.mark.kernels
TRITON, TORCH = BoundKernels(by_triton(DEVICE)), BoundKernels(by_torch(heads_first=True))
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


def check(run: Callable[[BoundKernels], Sequence[Tensor]]) -> None:
    """Compares what both give."""
    for found, expected in zip(run(TRITON), run(TORCH), strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True)


def norm_of(kind: Any, width: int, seed: int = 1) -> NormWeights:
    """With an epsilon that shows."""
    bias = draw(width, seed=seed + 50) if kind == "layer" else None
    return NormWeights(kind, 0.01, 1 + draw(width, seed=seed), bias)


def blank(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


@every_dtype
@pytest.mark.parametrize(("hidden", "kind"), [(64, "rms"), (90, "layer"), (1000, "rms")])
def test_stream(hidden: int, kind: str, dtype: torch.dtype) -> None:
    """Guards the stream: begun from embeddings, added to, and ended with the wanted rows only.

    With learned positions, multipliers, post-norms, two addends at once, and a stream that is added to alone.
    """
    ids, rows = torch.tensor([3, 0, 6, 3], device=DEVICE), torch.tensor([2, 0], device=DEVICE)
    table, places = draw(7, hidden, dtype=dtype), draw(9, hidden, dtype=dtype, seed=1)
    first, second = (draw(4, hidden, dtype=dtype, seed=seed) for seed in (2, 3))
    norm, post = norm_of(kind, hidden), norm_of("layer", hidden, seed=4)

    def run(ops: BoundKernels) -> Sequence[Tensor]:
        stream, outs = blank(4, hidden), [blank(4, hidden, dtype=dtype) for _ in range(5)]
        ops.embed_and_norm(Embedding(table), ids, ids, stream, norm, outs[0])
        states = [stream.clone()]
        for addends, normed in (
            ((Addend(first, 0.25, post), Addend(second, -2.0)), norm),
            ((Addend(second),), None),
            ((), post),
        ):
            ops.add_and_norm(stream, addends, normed, None if normed is None else outs[len(states)])
            states.append(stream.clone())
        ops.select_and_norm(stream, (Addend(first, 0.5),), rows, norm, 3.0, outs[4][:2])
        ops.select_and_norm(stream, (), rows, norm, 1.0, outs[4][2:])
        assert torch.equal(stream, states[-1])
        ops.embed_and_norm(Embedding(table, 4.5, places, 2), ids, ids, stream, None, None)
        return *states, *outs, stream

    check(run)


@every_dtype
def test_norms_of_columns(dtype: torch.dtype) -> None:
    """Guards norms of a part of a row, of several parts by themselves, in place, and added to what is there."""

    def run(ops: BoundKernels) -> Sequence[Tensor]:
        wide, total = draw(3, 40, dtype=dtype), draw(3, 24, seed=3)
        ops.normalize(wide[:, 4:28], norm_of("layer", 8), 3, 0.5, total, add=True)
        ops.normalize(wide[:, 4:28], norm_of("rms", 24), 1, 1.0, wide[:, 4:28])
        return wide, total

    check(run)


HEADS = {
    "plain": Heads(4, 2, 16, 16),
    "odd sizes": Heads(5, 1, 10, 10),
    "norms": Heads(3, 3, 40, 40, norm_of("rms", 40), norm_of("rms", 40, 2)),
    "a part is rotated": Heads(4, 2, 20, 20),
    "norms of parts": Heads(4, 2, 20, 12, norm_of("layer", 80), norm_of("layer", 40, 2), norm_of("rms", 24, 3)),
    "norms afterwards": Heads(6, 2, 24, 8, norm_of("rms", 24), norm_of("rms", 24, 2), norm_last=True),
    "nothing is rotated": Heads(3, 1, 9, 9, clip=0.7),
    "queries only": Heads(4, 2, 16, 16, norm_of("rms", 16), stores=False),
}
ROTATED = {"a part is rotated": 8, "norms of parts": 12, "norms afterwards": 24, "nothing is rotated": 0}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(
    ("block_size", "dtype"), [(1, torch.float32), (5, torch.float32), (5, torch.float16), (5, torch.bfloat16)]
)
def test_prepare_heads(name: str, block_size: int, dtype: torch.dtype) -> None:
    """Guards queries, and the places of keys and values in the cache, of which nothing else may change.

    Padding has no slot; a step of padding only changes nothing, as graphs are captured with it.
    """
    sizes, half = HEADS[name], ROTATED.get(name, HEADS[name].key_dim) // 2
    stored = sizes.kv_heads if sizes.stores else 0
    qkv = draw(4, sizes.heads * sizes.key_dim + stored * (sizes.key_dim + sizes.value_dim), dtype=dtype)
    angles = torch.tensor([[0.0], [1.0], [5.0], [90.0]], device=DEVICE) * draw(max(half, 1))
    cosines, sines = (angles.cos(), angles.sin()) if half else (None, None)
    scales = 1 + draw(4, seed=9).abs() if "norms" in name else None

    def run(ops: BoundKernels, slots: Sequence[int] = (7, -1, 0, 11)) -> Sequence[Tensor]:
        caches = [blank(-(-12 // block_size), sizes.kv_heads, block_size, dim, dtype=dtype)
                  for dim in (sizes.key_dim, sizes.value_dim)]  # fmt: skip
        query = blank(4, sizes.heads, sizes.key_dim, dtype=dtype)
        given = [cache if ops.ops.heads_first else cache.transpose(1, 2) for cache in caches]
        positions = Positions(cosines, sines, torch.tensor(slots, device=DEVICE), scales)
        ops.prepare_heads(qkv.clone(), sizes, positions, query, *(given if sizes.stores else (None, None)))
        return query, *caches

    check(run)
    found, expected = run(BoundKernels(by_torch())), run(TORCH)
    assert all(torch.equal(one.nan_to_num(9), two.nan_to_num(9)) for one, two in zip(found, expected, strict=True))
    block, offset = divmod(7, block_size)
    if sizes.stores and not sizes.clip and sizes.value_norm.kind == "none":
        values = qkv[0, -sizes.kv_heads * sizes.value_dim :].view(-1, sizes.value_dim)
        torch.testing.assert_close(expected[2][block, :, offset], values)
    assert not sizes.stores or int((~expected[1].isnan()).sum()) == 3 * sizes.kv_heads * sizes.key_dim
    for ops in (TRITON, TORCH):
        assert all(bool(cache.isnan().all()) for cache in run(ops, [-1] * 4)[1:])


@every_dtype
@pytest.mark.filterwarnings("ignore:overflow")  # of the interpreter, for a gate that is shut
@pytest.mark.parametrize("name", ["identity", "silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "xielu"])
def test_activations(name: str, dtype: torch.dtype) -> None:
    """Guards activations with a gate and without, also where they are shut or wide open, and with limits (GPT-OSS)."""
    inner = 1100 if name == "silu" else 64
    both = draw(3, 2 * inner, dtype=dtype)
    both[0, 0], both[1, 1], both[2, inner - 1] = (-100, 100, -20) if dtype != torch.float16 else (-15, 15, -9)
    params = (0.8, 0.3, 0.5, -1e-6) if name == "xielu" else ()

    def run(ops: BoundKernels) -> Sequence[Tensor]:
        outs = [blank(3, inner, dtype=dtype) for _ in range(3)]
        ops.activate(both, Activation(name, True, params), outs[0])
        ops.activate(both[:, :inner].contiguous(), Activation(name, False, params), outs[1])
        ops.activate(6 * both, Activation("silu", True, (), 7.0, 1.7, 1.0, 5.0), outs[2])
        return outs

    check(run)


@every_dtype
@pytest.mark.parametrize("function", ["sigmoid", "softplus", "identity"])
def test_gates(function: str, dtype: torch.dtype) -> None:
    """Guards gates for several numbers each, from the middle of a wider buffer."""

    def run(ops: BoundKernels) -> Sequence[Tensor]:
        target = draw(3, 24, dtype=dtype, seed=1)
        ops.gate(draw(3, 12, dtype=dtype)[:, 2:8], 4, function, target)
        return [target]

    check(run)


def test_finished_logits() -> None:
    """Guards biases and the softcap, each alone and both."""
    for bias, softcap in ((None, 30.0), (draw(5000, seed=1), 0.0), (draw(5000, seed=1), 5.0)):
        found, expected = 20 * draw(3, 5000), 20 * draw(3, 5000)
        TRITON.finish_logits(found, bias, softcap)
        TORCH.finish_logits(expected, bias, softcap)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


ROUTERS = {
    "softmax": router(2, "softmax"),
    "normalised, with a factor": router(3, "softmax", normalize=True, factor=2.5),
    "softmax of chosen": router(4, "softmax_of_chosen"),
    "sigmoid of chosen": router(1, "sigmoid_of_chosen"),
    "biases": router(3, "sigmoid", draw(12, seed=4), normalize=True, epsilon=0.1),
    "least sum": router(2, "softmax", normalize=True, least_sum=0.9, expert_scales=draw(12, seed=5)),
    "sparse mixer": router(2, "sparse_mixer", tolerance=0.6),
    "groups": router(2, "softmax", groups=4, top_groups=2),
    "groups by two": router(3, "sigmoid", draw(12, seed=6), 4, 2, "two_highest"),
}


def routed(scores: Tensor, router: Any) -> tuple[Tensor, Tensor]:
    """Experts and weights [T, top_k], written out in float64."""
    x = scores.double()
    x = {"softmax": x.softmax(1), "sigmoid": x.sigmoid()}.get(router.scores, x)
    experts, weights = [], []
    for row in x:
        wanted = row.clone() if router.choice_bias is None else row + router.choice_bias.double()
        if router.groups > 1:
            parts = wanted.view(router.groups, -1).sort(dim=1, descending=True).values
            best = parts[:, : 1 if router.group_score == "highest" else 2].sum(1)
            for group in best.sort().indices[: router.groups - router.top_groups]:
                wanted.view(router.groups, -1)[group] = 0.0 if router.group_score == "highest" else -torch.inf
        chosen = wanted.sort(descending=True).indices[: router.top_k]
        given = row[chosen]
        given = given.softmax(0) if router.scores == "softmax_of_chosen" else given
        given = given.sigmoid() if router.scores == "sigmoid_of_chosen" else given
        if router.scores == "sparse_mixer":
            first, second = chosen
            near = row[row >= row.max() - router.tolerance * row.abs().clamp(min=row.max())]
            rest = row[torch.arange(len(row), device=row.device) != first]
            left = rest[rest >= row[second] - router.tolerance * rest.abs().clamp(min=row[second])]
            given = torch.stack([near.softmax(0).max(), left.softmax(0).max()])
        total = max(float(given.sum()) + router.epsilon, router.least_sum) if router.normalize else 1.0
        given = given * router.factor / total
        experts.append(chosen)
        weights.append(given if router.expert_scales is None else given * router.expert_scales.double()[chosen])
    return torch.stack(experts), torch.stack(weights)


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("ops", [TRITON, TORCH], ids=["triton", "torch"])
def test_routing(ops: BoundKernels, name: str) -> None:
    """Guards which experts are chosen, their weights, that pairs are sorted by expert, and addresses: kernels would be
    compiled once more for those that are no multiples of 16, while requests wait.
    """
    scores, one = draw(9, 12, seed=3), ROUTERS[name]
    routing = ops.route(scores, one)
    assert not any(tensor.data_ptr() % 16 for tensor in routing)
    experts, weights = routed(scores, one)
    torch.testing.assert_close(routing.weights.double(), weights, rtol=1e-5, atol=1e-6)
    assert torch.equal(routing.counts.cpu().long(), experts.flatten().bincount(minlength=12).cpu())
    assert torch.equal(routing.order.long().sort().values.cpu(), torch.arange(experts.numel()))
    places = routing.places.flatten().long()
    assert torch.equal(routing.order[places].long().cpu(), torch.arange(experts.numel()))
    by_place = experts.flatten()[routing.order.long()]
    assert torch.equal(by_place, by_place.sort().values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # Triton's interpreter cannot multiply bfloat16
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 2), (40, 3)])
def test_experts(tokens: int, top_k: int, dtype: torch.dtype) -> None:
    """Guards the products of few rows of an expert and of several tiles, experts without rows, and the weighted sum."""
    scores = draw(tokens, 6, seed=3)
    scores[:, 2], scores[:, 4] = 3.0, -30.0  # everybody's first choice, and nobody's
    source, matrices = draw(tokens, 40, dtype=dtype), draw(6, 50, 40, dtype=dtype, seed=1) / 6
    tolerance = 1e-5 if dtype == torch.float32 else 3e-3
    routing = TORCH.route(scores, router(top_k, "softmax"))
    for bias, weighs, gathers in (
        (True, False, True), (True, True, True), (True, True, False), (False, False, True)
    ):  # fmt: skip
        experts = ExpertWeights(matrices, draw(6, 50, dtype=dtype, seed=2) if bias else None)
        given = source if gathers else source[(routing.order // top_k).long()]
        rows, expected = (blank(tokens * top_k, 50, dtype=dtype) for _ in range(2))
        for ops, out in ((TRITON, rows), (TORCH, expected)):
            ops.expert_linear(given, routing, experts, out, gathers=gathers, weighs=weighs)
        torch.testing.assert_close(rows, expected, rtol=tolerance, atol=tolerance)

    def run(ops: BoundKernels) -> Sequence[Tensor]:
        added, total = draw(tokens, 50, seed=7), draw(tokens, 50, seed=7)
        ops.combine(expected, routing, 0.5, added, weighs=True, add=True)
        ops.combine(expected, routing, 1.0, total, weighs=False, add=False)
        return added, total

    check(run)
