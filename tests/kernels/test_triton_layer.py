"""Guards what computes between the products of a layer, Triton's kernels and torch, against operations in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cbatch.model.ops.device_kernel import by_torch, by_triton
from cbatch.model.weight import Activation
from scripts.gpu.bound_kernels import BoundKernels, Heads, router
from tests.support.cuda_model import DEVICE
from tests.support.kernels import draw

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from cbatch.kernels.operands import Addend, Embedding, ExpertWeights, NormWeights, Positions

pytestmark = pytest.mark.kernels
OPS = {
    "triton": BoundKernels(by_triton(DEVICE)),
    "torch": BoundKernels(by_torch(heads_first=True)),
    "torch, tokens first": BoundKernels(by_torch()),
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=OPS)
def ops(request: pytest.FixtureRequest) -> BoundKernels:
    return OPS[request.param]


def norm_of(kind: Any, width: int, seed: int = 1) -> NormWeights:
    """With an epsilon that shows."""
    bias = draw(width, seed=seed + 50) if kind == "layer" else None
    return NormWeights(kind, 0.01, 1 + draw(width, seed=seed), bias)


def normed(x: Tensor, norm: NormWeights) -> Tensor:
    """In float64."""
    x = x.double()
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    if norm.kind != "none":
        x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    x = x if norm.weight is None else x * norm.weight.double()
    return x if norm.bias is None else x + norm.bias.double()


def check(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.to(found.dtype))


def check_product(found: Tensor, expected: Tensor) -> None:
    """Torch rounds a product before a bias is added."""
    tolerance = 1e-5 if found.dtype == torch.float32 else 3e-3
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "kind"), [(64, "rms"), (90, "layer"), (1000, "rms")])
def test_norms(ops: BoundKernels, hidden: int, kind: str, dtype: torch.dtype) -> None:
    """Guards the stream: begun from embeddings, added to, and ended with the wanted rows only."""
    embedding, norm = draw(7, hidden, dtype=dtype), norm_of(kind, hidden)
    ids, stream = torch.tensor([3, 0, 6, 3], device=DEVICE), draw(4, hidden)
    out = torch.empty(4, hidden, dtype=dtype, device=DEVICE)
    ops.embed_and_norm(Embedding(embedding), ids, ids, stream, norm, out)
    assert torch.equal(stream, embedding[ids].float())
    check(out, normed(stream, norm))
    added = draw(4, hidden, dtype=dtype, seed=2)
    expected = stream + added.float()
    ops.add_and_norm(stream, (Addend(added),), norm, out)
    assert torch.equal(stream, expected)
    check(out, normed(expected, norm))
    rows = torch.tensor([2, 0], device=DEVICE)
    ops.select_and_norm(stream, (Addend(added, 0.5),), rows, norm, 3.0, out[:2])
    check(out[:2], 3 * normed((stream + 0.5 * added.float())[rows], norm))
    ops.select_and_norm(stream, (), rows, norm, 1.0, out[:2])
    check(out[:2], normed(stream[rows], norm))
    assert torch.equal(stream, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_added(ops: BoundKernels, dtype: torch.dtype) -> None:
    """Guards learned positions, multipliers, post-norms, two addends at once, and a stream that is added to alone."""
    table, places = draw(7, 48, dtype=dtype), draw(9, 48, dtype=dtype, seed=1)
    ids, positions = torch.tensor([3, 0, 6], device=DEVICE), torch.tensor([0, 5, 2], device=DEVICE)
    stream = draw(3, 48)
    ops.embed_and_norm(Embedding(table, 4.5, places, 2), ids, positions, stream, None, None)
    torch.testing.assert_close(stream, 4.5 * table[ids].float() + places[positions + 2].float())
    first, second = draw(3, 48, dtype=dtype, seed=2), draw(3, 48, dtype=dtype, seed=3)
    post, norm = norm_of("layer", 48), norm_of("rms", 48, seed=4)
    expected = stream.double() + 0.25 * normed(first, post) - 2 * second.double()
    out = torch.empty(3, 48, dtype=dtype, device=DEVICE)
    ops.add_and_norm(stream, (Addend(first, 0.25, post), Addend(second, -2.0)), norm, out)
    check(stream, expected)
    check(out, normed(expected, norm))
    ops.add_and_norm(stream, (Addend(second),), None, None)
    check(stream, expected + second.double())
    ops.add_and_norm(stream, (), NormWeights("none"), out)
    check(out, stream)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_columns(ops: BoundKernels, dtype: torch.dtype) -> None:
    """Guards norms of a part of a row, of several parts by themselves, in place, and added to what is there."""
    wide, norm = draw(3, 40, dtype=dtype), norm_of("layer", 8)
    before, total = wide.clone(), draw(3, 24, seed=3)
    expected = total.double() + 0.5 * normed(before[:, 4:28].reshape(3, 3, 8), norm).flatten(1)
    ops.normalize(wide[:, 4:28], norm, 3, 0.5, total, add=True)
    check(total, expected)
    norm = norm_of("rms", 24)
    ops.normalize(wide[:, 4:28], norm, 1, 1.0, wide[:, 4:28])
    check(wide[:, 4:28], normed(before[:, 4:28], norm))
    assert torch.equal(wide[:, :4], before[:, :4]) and torch.equal(wide[:, 28:], before[:, 28:])


def turned(heads: Tensor, angles: Tensor) -> Tensor:
    """Heads [T, N, dim], whose first numbers are numbers of the complex plane, each turned by its angle."""
    half = angles.shape[1]
    left, right, rest = heads.double().split([half, half, heads.shape[-1] - 2 * half], -1)
    rotated = torch.complex(left, right) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([rotated.real, rotated.imag, rest], -1)


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


def expected_heads(qkv: Tensor, sizes: Heads, angles: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in float64."""
    qkv = qkv.double().clamp(-sizes.clip, sizes.clip) if sizes.clip else qkv.double()
    stored = sizes.kv_heads if sizes.stores else 0
    widths = [sizes.heads * sizes.key_dim, stored * sizes.key_dim, stored * sizes.value_dim]
    norms = sizes.query_norm, sizes.key_norm, sizes.value_norm
    found = []
    for number, (part, norm) in enumerate(zip(qkv.split(widths, 1), norms, strict=True)):
        heads = part.unflatten(1, (-1, sizes.value_dim if number == 2 else sizes.key_dim))
        shaped = norm._replace(
            weight=None if norm.weight is None else norm.weight.view(-1, heads.shape[-1]),
            bias=None if norm.bias is None else norm.bias.view(-1, heads.shape[-1]),
        )
        is_last = sizes.norm_last and number < 2
        heads = heads if is_last else normed(heads, shaped)
        heads = turned(heads, angles) if angles is not None and number < 2 else heads
        found.append(normed(heads, shaped) if is_last else heads)
    return found[0], found[1], found[2]


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(("block_size", "dtype"), [(1, torch.float32), *((5, dtype) for dtype in DTYPES)])
def test_prepare_heads(ops: BoundKernels, name: str, block_size: int, dtype: torch.dtype) -> None:
    """Guards queries, and the places of keys and values in the cache, of which nothing else may change."""
    sizes, rotated = HEADS[name], ROTATED.get(name, HEADS[name].key_dim)
    slots = torch.tensor([7, -1, 0, 11], device=DEVICE)
    stored = sizes.kv_heads if sizes.stores else 0
    qkv = draw(4, sizes.heads * sizes.key_dim + stored * (sizes.key_dim + sizes.value_dim), dtype=dtype)
    angles = scales = None
    if rotated:
        angles = torch.tensor([[0.0], [1.0], [5.0], [90.0]], device=DEVICE).double() * draw(rotated // 2).double()
    if "norms" in name:
        scales = 1 + draw(4, seed=9).abs()
    keys, values = (
        torch.full((-(-12 // block_size), sizes.kv_heads, block_size, dim), torch.nan, dtype=dtype, device=DEVICE)
        for dim in (sizes.key_dim, sizes.value_dim)
    )
    query = torch.empty(4, sizes.heads, sizes.key_dim, dtype=dtype, device=DEVICE)
    cosines, sines = (None, None) if angles is None else (angles.cos().float(), angles.sin().float())
    places = [cache if ops.ops.heads_first else cache.transpose(1, 2) for cache in (keys, values)]
    given = (places[0], places[1]) if sizes.stores else (None, None)
    ops.prepare_heads(qkv.clone(), sizes, Positions(cosines, sines, slots, scales), query, *given)

    queries, *parts = expected_heads(qkv, sizes, angles)
    check(query, queries if scales is None else queries * scales.double()[:, None, None])
    for cache, new in zip((keys, values), parts, strict=True):
        expected = torch.full_like(cache, torch.nan)
        for token in (0, 2, 3) if sizes.stores else ():
            block, offset = divmod(int(slots[token]), block_size)
            expected[block, :, offset] = new[token].to(dtype)
        torch.testing.assert_close(cache, expected, equal_nan=True)


def test_nothing_is_stored_without_slots(ops: BoundKernels) -> None:
    """Guards a step of padding only, as graphs are captured with: not a single slot changes."""
    cache = torch.full((2, 3, 2, 2, 8), torch.nan, device=DEVICE)
    cache[:, 0] = 1.0
    before, angle = cache.clone(), torch.zeros(3, 4, device=DEVICE)
    positions = Positions(angle, angle, torch.full((3,), -1, device=DEVICE))
    ops.prepare_heads(draw(3, 48), Heads(2, 2, 8, 8), positions, torch.empty(3, 2, 8, device=DEVICE), *cache)
    torch.testing.assert_close(cache, before, equal_nan=True, rtol=0, atol=0)


XIELU = (0.8, 0.3, 0.5, -1e-6)
ACTIVATIONS: dict[str, Any] = {
    "identity": lambda x: x,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "xielu": lambda x: torch.where(x > 0, 0.8 * x * x + 0.5 * x, (torch.expm1(x.clamp(max=-1e-6)) - x) * 0.8 + 0.5 * x),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("ignore:overflow")  # of the interpreter, for a gate that is shut
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(ops: BoundKernels, name: str, dtype: torch.dtype) -> None:
    """Guards activations with a gate and without, also where they are shut or wide open."""
    inner = 1100 if name == "silu" else 64
    both = draw(3, 2 * inner, dtype=dtype)
    both[0, 0], both[1, 1], both[2, inner - 1] = (-100, 100, -20) if dtype != torch.float16 else (-15, 15, -9)
    out = torch.empty(3, inner, dtype=dtype, device=DEVICE)
    params = XIELU if name == "xielu" else ()
    ops.activate(both, Activation(name, True, params), out)
    check(out, ACTIVATIONS[name](both[:, :inner].double()) * both[:, inner:].double())
    ops.activate(both[:, :inner].contiguous(), Activation(name, False, params), out)
    check(out, ACTIVATIONS[name](both[:, :inner].double()))


def test_clipped_activation(ops: BoundKernels) -> None:
    """Guards GPT-OSS: gate and up are clipped, and up is one more."""
    both, out = 6 * draw(3, 40), torch.empty(3, 20, device=DEVICE)
    ops.activate(both, Activation("silu", True, (), 7.0, 1.7, 1.0), out)
    gate, up = both.double().chunk(2, 1)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    check(out, gate * torch.sigmoid(1.7 * gate) * (up + 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", ["sigmoid", "softplus", "identity"])
def test_gates(ops: BoundKernels, function: str, dtype: torch.dtype) -> None:
    """Guards gates for several numbers each, from the middle of a wider buffer."""
    gates, target = draw(3, 12, dtype=dtype), draw(3, 24, dtype=dtype, seed=1)
    given = gates[:, 2:8].double()
    factors = {"sigmoid": given.sigmoid(), "softplus": functional.softplus(given), "identity": given}[function]
    expected = 0.5 * factors.repeat_interleave(4, 1) * target.double()
    ops.gate(gates[:, 2:8], 4, function, 0.5, target)
    check(target, expected)


def test_finished_logits(ops: BoundKernels) -> None:
    """Guards biases and the softcap, each alone and both."""
    logits, bias = 20 * draw(3, 5000), draw(5000, seed=1)
    for given, softcap in ((None, 30.0), (bias, 0.0), (bias, 5.0)):
        found, expected = logits.clone(), logits.double() + (0 if given is None else given.double())
        ops.finish_logits(found, given, softcap)
        torch.testing.assert_close(
            found.double(), softcap * torch.tanh(expected / softcap) if softcap else expected, rtol=1e-5, atol=1e-5
        )


ROUTERS = {
    "softmax": router(2, "softmax"),
    "normalised, with a factor": router(3, "softmax", normalize=True, factor=2.5),
    "softmax of chosen": router(4, "softmax_of_chosen"),
    "sigmoid of chosen": router(1, "sigmoid_of_chosen"),
    "biases": router(3, "sigmoid", draw(12, seed=4), normalize=True, epsilon=0.1),
    "least sum": router(2, "softmax", normalize=True, least_sum=0.9, expert_scales=draw(12, seed=5)),
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
        total = max(float(given.sum()) + router.epsilon, router.least_sum) if router.normalize else 1.0
        given = given * router.factor / total
        experts.append(chosen)
        weights.append(given if router.expert_scales is None else given * router.expert_scales.double()[chosen])
    return torch.stack(experts), torch.stack(weights)


@pytest.mark.parametrize("name", ROUTERS)
def test_routing(ops: BoundKernels, name: str) -> None:
    """Guards which experts are chosen, their weights, and that pairs are sorted by expert."""
    scores, one = draw(9, 12, seed=3), ROUTERS[name]
    routing = ops.route(scores, one)
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
def test_experts(ops: BoundKernels, tokens: int, top_k: int, dtype: torch.dtype) -> None:
    """Guards the products of few rows of an expert and of several tiles, experts without rows, and the weighted sum."""
    scores = draw(tokens, 6, seed=3)
    scores[:, 2], scores[:, 4] = 3.0, -30.0  # everybody's first choice, and nobody's
    routing = ops.route(scores, router(top_k, "softmax"))
    matrices, bias = draw(6, 50, 40, dtype=dtype, seed=1) / 6, draw(6, 50, dtype=dtype, seed=2)
    source, rows = draw(tokens, 40, dtype=dtype), torch.empty(tokens * top_k, 50, dtype=dtype, device=DEVICE)
    chosen, weights = scores.softmax(1).topk(top_k, 1).indices, routing.weights.double()
    expected = torch.einsum("td,tkcd->tkc", source.double(), matrices.double()[chosen])
    for weighs, gathers in ((False, True), (True, True), (True, False)):
        given = source if gathers else source[(routing.order // top_k).long()]
        rows.fill_(torch.nan)
        ops.expert_linear(given, routing, ExpertWeights(matrices, bias), rows, gathers=gathers, weighs=weighs)
        product = expected * weights[..., None] if weighs else expected
        check_product(rows[routing.places.long()], product + bias.double()[chosen])
    ops.expert_linear(source, routing, ExpertWeights(matrices, None), rows, gathers=True, weighs=False)
    check_product(rows[routing.places.long()], expected)
    total = draw(tokens, 50, seed=7)
    summed = total.double() + 0.5 * (rows[routing.places.long()].double() * weights[..., None]).sum(1)
    ops.combine(rows, routing, 0.5, total, weighs=True, add=True)
    check(total, summed)
    ops.combine(rows, routing, 1.0, total, weighs=False, add=False)
    check(total, rows[routing.places.long()].double().sum(1))
