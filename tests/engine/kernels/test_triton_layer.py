"""Guards what computes between the products of a layer, Triton's kernels and torch, against operations in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.support.cuda_model import DEVICE

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from cbatch.engine.kernels.layer_ops import LayerOps, Positions
from cbatch.engine.kernels.reference.layer import TorchLayerOps
from cbatch.engine.kernels.triton import layer

pytestmark = pytest.mark.kernels
OPS = {"triton": layer, "torch": TorchLayerOps(heads_first=True), "torch, tokens first": TorchLayerOps()}


@pytest.fixture(params=OPS)
def ops(request: pytest.FixtureRequest) -> LayerOps:
    return OPS[request.param]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in float64, with an epsilon that shows."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 0.01).sqrt() * weight.double()


def check(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.to(found.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hidden", [64, 90, 1000])
def test_norms(ops: LayerOps, hidden: int, dtype: torch.dtype) -> None:
    """Guards the stream: begun from embeddings, added to, and ended with the wanted rows only."""
    embedding, weight = draw(7, hidden, dtype=dtype), 1 + draw(hidden, dtype=dtype, seed=1)
    ids, stream = torch.tensor([3, 0, 6, 3], device=DEVICE), draw(4, hidden)
    out = torch.empty(4, hidden, dtype=dtype, device=DEVICE)
    ops.embed_and_norm(embedding, ids, stream, weight, 0.01, out)
    assert torch.equal(stream, embedding[ids].float())
    check(out, normed(stream, weight))
    added = draw(4, hidden, dtype=dtype, seed=2)
    expected = stream + added.float()
    ops.add_and_norm(stream, added, weight, 0.01, out)
    assert torch.equal(stream, expected)
    check(out, normed(expected, weight))
    rows = torch.tensor([2, 0], device=DEVICE)
    ops.select_and_norm(stream, added, rows, weight, 0.01, out[:2])
    check(out[:2], normed((stream + added.float())[rows], weight))
    assert torch.equal(stream, expected)


def turned(heads: Tensor, angles: Tensor) -> Tensor:
    """Heads [T, N, dim] as numbers of the complex plane, each turned by its angle."""
    left, right = heads.double().chunk(2, -1)
    rotated = torch.complex(left, right) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([rotated.real, rotated.imag], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "block_size"), [(2, 2, 16, 4), (1, 5, 10, 5), (3, 1, 40, 1)], ids=str
)
def test_rope_and_store_kv(
    ops: LayerOps, kv_heads: int, group: int, dim: int, block_size: int, has_norms: bool, dtype: torch.dtype
) -> None:
    """Guards queries, and the places of keys and values in the cache, of which nothing else may change."""
    slots, heads = torch.tensor([7, -1, 0, 11], device=DEVICE), group * kv_heads
    qkv = draw(4, (group + 2) * kv_heads * dim, dtype=dtype)
    angles = torch.tensor([[0.0], [1.0], [5.0], [90.0]], device=DEVICE).double() * draw(dim // 2, seed=1).double()
    norms = 1 + draw(2 * dim, dtype=dtype, seed=2) if has_norms else None
    cache = torch.full((2, -(-12 // block_size), kv_heads, block_size, dim), torch.nan, dtype=dtype, device=DEVICE)
    query = torch.empty(4, heads, dim, dtype=dtype, device=DEVICE)
    positions = Positions(angles.cos().float(), angles.sin().float(), slots)
    ops.rope_and_store_kv(qkv, positions, norms, 0.01, query, *(cache if ops.heads_first else cache.transpose(2, 3)))

    queries, keys, values = qkv.view(4, -1, dim).split([heads, kv_heads, kv_heads], 1)
    weights = (None, None) if norms is None else norms.chunk(2)
    queries, keys = (
        turned(heads if weight is None else normed(heads, weight), angles)
        for heads, weight in zip((queries, keys), weights, strict=True)
    )
    check(query, queries)
    expected = torch.full_like(cache, torch.nan)
    for token in (0, 2, 3):
        block, offset = divmod(int(slots[token]), block_size)
        expected[0, block, :, offset] = keys[token].to(dtype)
        expected[1, block, :, offset] = values[token]
    torch.testing.assert_close(cache, expected, equal_nan=True)
    assert torch.equal(cache[1].nan_to_num(), expected[1].nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:overflow")  # of the interpreter, for a gate that is shut
@pytest.mark.parametrize("inner", [64, 1100])
def test_gate(ops: LayerOps, inner: int, dtype: torch.dtype) -> None:
    """Guards the gate, also where it is shut or wide open."""
    both = draw(3, 2 * inner, dtype=dtype)
    both[0, 0], both[1, 1], both[2, inner - 1] = -100, 100, -20
    out = torch.empty(3, inner, dtype=dtype, device=DEVICE)
    ops.silu_and_mul(both, out)
    check(out, silu(both[:, :inner].double()) * both[:, inner:].double())


def test_nothing_is_stored_without_slots(ops: LayerOps) -> None:
    """Guards a step of padding only, as graphs are captured with: not a single slot changes."""
    cache = torch.full((2, 3, 2, 2, 8), torch.nan, device=DEVICE)
    cache[:, 0] = 1.0
    before, angle = cache.clone(), torch.zeros(3, 4, device=DEVICE)
    positions = Positions(angle, angle, torch.full((3,), -1, device=DEVICE))
    ops.rope_and_store_kv(draw(3, 48), positions, None, 0.01, torch.empty(3, 2, 8, device=DEVICE), *cache)
    torch.testing.assert_close(cache, before, equal_nan=True, rtol=0, atol=0)
