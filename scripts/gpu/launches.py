"""Launches of every kernel as in a step, for `compile_matrix`: by chip, type of weights, and part of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

VOCABULARY, HIDDEN, INNER, KV_HEADS = 151936, 4096, 12288, 8
BLOCK_SIZE = 16
SHAPES, ROUTED = ((4096, 4096), (1000, 2880)), (3, 400, 2000)
"""Columns and depths of quantized matrices, and numbers of tokens that go to experts."""


class Case(NamedTuple):
    """Kernels that are compiled together: for a chip, by compute capability, and a type of weights.

    part:       "attention", which depends on heads; "forms", all that attention can be asked for; "families", what
                only some models need; "recurrence", recurrent layers; "quantized", weights of 8 and 4 bits;
                "quantized_rest", these in other sizes; "deterministic", what `--deterministic` takes instead; "rest";
                or "budgets", see `budgets.py`
    head_size:  0 unless the part is attention, as is
    group:      the number of query heads that share a KV head
    kv_dtype:   type of the KV cache, as `--kv-dtype` has it
    """

    capability: int
    dtype: str
    part: str
    head_size: int = 0
    group: int = 0
    kv_dtype: str = "auto"


def launch_attention(case: Case, dtype: Any) -> None:
    """A mixed step and its rotation, for heads of one size."""
    import torch

    from cbatch.kernels.operands import NormWeights, Positions
    from scripts.gpu.bound_kernels import Heads

    heads, dim = KV_HEADS * case.group, case.head_size
    attend(case, dtype, heads, KV_HEADS, dim)
    keys = torch.empty(4, KV_HEADS, BLOCK_SIZE, dim, dtype=cache_dtype(case, dtype))
    qkv, query = torch.empty(3, (heads + 2 * KV_HEADS) * dim, dtype=dtype), torch.empty(3, heads, dim, dtype=dtype)
    angles, slots = torch.empty(3, dim // 2), torch.zeros(3, dtype=torch.int64)
    for norm in (NormWeights("none"), NormWeights("rms", 1e-6, torch.empty(dim))):
        sizes = Heads(heads, KV_HEADS, dim, dim, norm, norm)
        layer_ops(case).prepare_heads(qkv, sizes, Positions(angles, angles, slots), query, keys, keys)


def launch_forms(case: Case, dtype: Any) -> None:
    """A mixed step with all that attention can be asked for, for heads of an odd size."""
    import torch

    attend(case, dtype, 6, 2, 48, window=100, softcap=30.0, sinks=torch.zeros(6))
    attend(case, dtype, 40, 8, 128, chunk=8192)


def attend(
    case: Case, dtype: Any, heads: int, kv_heads: int, dim: int, *, batch_invariant: bool = False, **options: Any
) -> None:
    """Decodes, and computes a short and a long chunk, behind a short past and a long one."""
    import numpy as np
    import torch

    from cbatch.attention.triton import TritonAttention
    from cbatch.kernels.triton.occupancy import CHIPS as LIMITS
    from cbatch.runtime.batch import RaggedBatch

    cpu = torch.device("cpu")
    limits = LIMITS[case.capability]._replace(multiprocessors=100)
    attention = TritonAttention(cpu, limits=limits, batch_invariant=batch_invariant)
    starts, stops = [5, 3999, 4000, 0], [6, 4000, 4003, 300]
    tokens = np.zeros(sum(stops) - sum(starts), np.int64)
    tables, rows = np.zeros((len(stops), 256), np.int32), np.zeros(0, np.int64)
    batch = RaggedBatch(tokens, tokens, tokens, rows, tables, starts, stops, cpu)
    metadata = attention.prepare(batch, BLOCK_SIZE)
    keys = torch.empty(4, kv_heads, BLOCK_SIZE, dim, dtype=cache_dtype(case, dtype))
    new, query = (torch.empty(len(tokens), count, dim, dtype=dtype) for count in (kv_heads, heads))
    attention.store_kv(keys, keys, new, new, metadata)
    attention.attend(query, keys, keys, metadata, scale=0.1, **options)


def cache_dtype(case: Case, dtype: Any) -> Any:
    from cbatch.runtime.kv_cache import FP8

    return FP8 if case.kv_dtype == "fp8" else dtype


def launch_rest(case: Case, dtype: Any) -> None:
    """Launches what needs no heads: norms, the gate, and sampling, also from the logits of a transformers model."""
    import torch

    from cbatch.kernels.operands import Addend, Embedding, NormWeights
    from cbatch.model.weight import Activation
    from cbatch.sample.sampler import PARAM_WORDS, Sampler

    residual, added, ids = (
        torch.empty(3, HIDDEN),
        torch.empty(3, HIDDEN, dtype=dtype),
        torch.zeros(3, dtype=torch.int64),
    )
    ops, norm, addends = layer_ops(case), NormWeights("rms", 1e-6, residual[0]), (Addend(added),)
    ops.embed_and_norm(Embedding(added), ids, ids, residual, norm, added)
    ops.add_and_norm(residual, addends, norm, added)
    ops.select_and_norm(residual, addends, ids, norm, 1.0, added)
    up, out = torch.empty(3, 2 * INNER, dtype=dtype), torch.empty(3, INNER, dtype=dtype)
    ops.activate(up, Activation("silu"), out)
    add_adapters(case, dtype)
    sampler = Sampler(torch.device("cpu"), kernel=True)
    for kind in (torch.float32, dtype):
        logits = torch.empty(3, VOCABULARY, dtype=kind)
        sampler.sample_on_device(logits, torch.zeros(3, PARAM_WORDS, dtype=torch.int32))


def add_adapters(case: Case, dtype: Any) -> None:
    """Adapters of few ranks and of many, for few rows and for many."""
    import torch

    from cbatch.kernels.operands import AdapterRows
    from cbatch.model.lora.device import adapter_weights
    from cbatch.model.lora.sites import Site
    from cbatch.model.lora_files import LowRank

    ops = layer_ops(case)
    for rank in (16, 64, 256):
        both = LowRank(torch.empty(rank, HIDDEN), torch.empty(INNER, rank))
        weights = adapter_weights([Site(0, INNER, (both,))], dtype, torch.device("cpu"))
        for rows in (3, 300):
            numbers = torch.zeros(rows, dtype=torch.int32)
            source, out = torch.empty(rows, HIDDEN, dtype=dtype), torch.empty(rows, INNER, dtype=dtype)
            ops.add_adapters(source, AdapterRows(numbers, numbers), weights, out)


def launch_families(case: Case, dtype: Any) -> None:
    """Launches what only some models need: norms of every kind, partly rotated heads, gates, mixtures of experts."""
    import torch

    from cbatch.kernels.operands import Addend, Embedding, ExpertWeights, NormWeights, Positions
    from cbatch.model.weight import Activation
    from scripts.gpu.bound_kernels import Heads, router

    ops = layer_ops(case)
    residual, added, ids = torch.empty(3, 4608), torch.empty(3, 4608, dtype=dtype), torch.zeros(3, dtype=torch.int64)
    layer_norm, post_norm = NormWeights("layer", 1e-5, residual[0], residual[0]), NormWeights("rms", 1e-6, residual[0])
    ops.embed_and_norm(Embedding(added, 2.0, added, 2), ids, ids, residual, layer_norm, added)
    ops.add_and_norm(residual, (Addend(added, 0.5, post_norm), Addend(added, 0.5)), layer_norm, added)
    ops.normalize(added[:, :512], post_norm._replace(weight=residual[0, :256]), 2, 0.5, residual[:, :512], add=True)
    ops.gate(added, 128, "sigmoid", 1.0, torch.empty(3, 512, dtype=dtype))
    ops.finish_logits(torch.empty(3, 256000), torch.empty(256000), 30.0)
    for name in ("gelu", "gelu_tanh", "relu2", "xielu"):
        params = (0.8, 0.3, 0.5, -1e-6) if name == "xielu" else ()
        ops.activate(added, Activation(name, gated=False, params=params), added)
    ops.activate(torch.empty(3, 5760, dtype=dtype), Activation("silu", True, (), 7.0, 1.702, 1.0), added[:, :2880])
    for heads, kv_heads, dim, value_dim, rotary in ((32, 32, 80, 80, 32), (16, 16, 192, 128, 64), (8, 4, 256, 256, 0)):
        head_norm = NormWeights("layer", 1e-5, torch.empty(heads * dim))
        sizes = Heads(heads, kv_heads, dim, value_dim, head_norm, norm_last=True, clip=30.0)
        angles = torch.empty(3, rotary // 2) if rotary else None
        keys, values = (torch.empty(4, kv_heads, BLOCK_SIZE, width, dtype=dtype) for width in (dim, value_dim))
        qkv = torch.empty(3, heads * dim + kv_heads * (dim + value_dim), dtype=dtype)
        positions = Positions(angles, angles, ids, torch.empty(3))
        ops.prepare_heads(qkv, sizes, positions, torch.empty(3, heads, dim, dtype=dtype), keys, values)
    for tokens, experts, top_k, hidden, inner in (
        (3, 128, 8, 2048, 768),
        (512, 32, 4, 2880, 2880),
        (4096, 16, 2, 2048, 1024),
    ):
        routing = ops.route(
            torch.empty(tokens, experts),
            router(top_k, "sigmoid", torch.empty(experts), 8, 4, "two_highest", True, 1e-20, 0.0, 2.5),
        )
        up = ExpertWeights(
            torch.empty(experts, 2 * inner, hidden, dtype=dtype), torch.empty(experts, 2 * inner, dtype=dtype)
        )
        down = ExpertWeights(torch.empty(experts, hidden, inner, dtype=dtype), None)
        rows = torch.empty(tokens * top_k, 2 * inner, dtype=dtype)
        source, result = torch.empty(tokens, hidden, dtype=dtype), torch.empty(tokens * top_k, hidden, dtype=dtype)
        ops.expert_linear(source, routing, up, rows, gathers=True, weighs=True)
        ops.expert_linear(rows[:, :inner].contiguous(), routing, down, result, gathers=False, weighs=False)
        ops.combine(result, routing, 1.0, torch.empty(tokens, hidden), weighs=True, add=True)


def launch_recurrence(case: Case, dtype: Any) -> None:
    """Recurrent layers of Qwen3-Next, Mamba 2 and LFM2, and of odd sizes; a step that decodes, and one with chunks."""
    import torch

    from cbatch.kernels.operands import NormWeights, Recurrence
    from scripts.gpu import bound_kernels

    ops, numbers = layer_ops(case), torch.empty(128)
    for longest in (1, 100):
        starts, slots = torch.arange(3, dtype=torch.int32) * longest, torch.zeros(2, dtype=torch.int32)
        recurrence, tokens = Recurrence(starts, slots, slots, slots, longest), 2 * longest
        wide, out = torch.empty(tokens, 16384, dtype=dtype), torch.empty(tokens, 8192, dtype=dtype)
        for kernel, gate, activation in ((4, None, "silu"), (3, out, "none")):
            weight, bias = torch.empty(8192, kernel), None if gate is None else numbers
            one = bound_kernels.convolution(weight, bias, activation)
            states = torch.empty(1, 8192, kernel - 1, dtype=dtype)
            ops.convolve(wide[:, :8192], one, states, recurrence, out, gate, gate)
        exact = torch.float32
        for key_dim, value_dim, kind in ((128, 128, exact), (64, 128, dtype), (256, 256, dtype), (96, 80, dtype)):
            delta, columns = (
                bound_kernels.delta_rule(4, 8, key_dim, value_dim, numbers, numbers),
                8 * (key_dim + value_dim),
            )
            states = torch.empty(1, 8, key_dim, value_dim, dtype=kind)
            ops.gated_delta(wide[:, :columns], wide[:, 8192:8208], delta, states, recurrence, out[:, : 8 * value_dim])
        for head_dim, groups, size, kind in ((64, 1, 128, exact), (64, 1, 256, dtype), (80, 2, 16, dtype)):
            scan = bound_kernels.scan(16, head_dim, groups, size, numbers, numbers, numbers)
            columns = 16 * head_dim + 2 * groups * size
            states = torch.empty(1, 16, head_dim, size, dtype=kind)
            ops.selective_scan(wide[:, :columns], wide, scan, states, recurrence, out[:, : 16 * head_dim])
    for groups, gate_first in ((32, False), (1, True)):
        norm = NormWeights("rms", 1e-6, torch.empty(4096))
        ops.gated_norm(wide[:, :4096], wide[:, 4096:8192], norm, groups, out[:, :4096], gate_first=gate_first)


def launch_quantized(case: Case, dtype: Any) -> None:
    """Products of every format for a depth that parts divide, or another, in turn; rows that are rounded to FP8."""
    import torch

    from cbatch.kernels.formats import ON_GPU
    from cbatch.kernels.triton.linear import round_rows

    for depth in (4096, 14336):
        round_rows(torch.empty(3, depth, dtype=dtype))
    for number, kind in enumerate(ON_GPU):
        multiply(case, dtype, kind, *SHAPES[number % 2])
        multiply_experts(case, dtype, kind, ROUTED[number % 3])


def launch_quantized_rest(case: Case, dtype: Any) -> None:
    """The depths and numbers of tokens that `launch_quantized` leaves out."""
    from cbatch.kernels.formats import ON_GPU

    for number, kind in enumerate(ON_GPU):
        multiply(case, dtype, kind, *SHAPES[(number + 1) % 2])
        for further in (1, 2):
            multiply_experts(case, dtype, kind, ROUTED[(number + further) % 3])


def multiply(
    case: Case, dtype: Any, kind: int, columns: int, depth: int, every_rows: tuple[int, ...] = (3, 12, 40, 300)
) -> None:
    """Products with few rows, some and many, and an embedding."""
    import torch

    from cbatch.kernels.quantized_matrix import QuantizedMatrix
    from cbatch.kernels.triton import linear

    ops, matrix = layer_ops(case), QuantizedMatrix.empty(kind, columns, depth, torch.device("cpu"))
    source = torch.empty(max(every_rows), depth, dtype=dtype)
    out = torch.empty(len(source), columns, dtype=dtype)
    with patch.object(linear, "_multiprocessors", lambda _: 100):  # of so many, some get a split of the depth
        for rows in every_rows:
            ops.quantized_linear(source[:rows], matrix, None, out[:rows])
        ops.quantized_linear(source[:3], matrix, out[0], out[:3])
        ops.logits(source[:3], matrix)
    ops.look_up(matrix, torch.zeros(3, dtype=torch.int64), torch.empty(3, depth))


def multiply_experts(case: Case, dtype: Any, kind: int, tokens: int) -> None:
    import torch

    from cbatch.kernels.operands import ExpertWeights
    from cbatch.kernels.quantized_matrix import QuantizedMatrix
    from scripts.gpu.bound_kernels import router

    ops, matrix = layer_ops(case), QuantizedMatrix.empty(kind, 1440, 720, torch.device("cpu"), 32)
    weights = ExpertWeights(matrix, torch.empty(32, 1440, dtype=dtype))
    routing = ops.route(torch.empty(tokens, 32), router(4, "softmax"))
    source, out = torch.empty(tokens, 720, dtype=dtype), torch.empty(tokens * 4, 1440, dtype=dtype)
    ops.expert_linear(source, routing, weights, out, gathers=True, weighs=False)


def launch_deterministic(case: Case, dtype: Any) -> None:
    """Products in tiles of one size, also with float32, and the one kernel that attention has then."""
    import torch

    from cbatch.model.ops.device_kernel import DeviceOps
    from scripts.gpu.bound_kernels import BoundKernels

    ops = BoundKernels(DeviceOps(True, True, True, case.capability))
    for columns, depth in ((HIDDEN, HIDDEN), (1000, 2880)):
        source, matrix = torch.empty(3, depth, dtype=dtype), torch.empty(columns, depth, dtype=dtype)
        ops.linear(source, matrix, matrix[:, 0].contiguous(), torch.empty(3, columns, dtype=dtype))
        ops.logits(source, matrix)
        ops.linear(source.float(), matrix.float(), None, torch.empty(3, columns))
    for dim in (64, 128, 256):
        attend(case, dtype, 4 * KV_HEADS, KV_HEADS, dim, batch_invariant=True)
    attend(case, dtype, 6, 2, 48, batch_invariant=True, window=100, softcap=30.0, sinks=torch.zeros(6))


def layer_ops(case: Case) -> Any:
    from cbatch.model.ops.device_kernel import DeviceOps
    from scripts.gpu.bound_kernels import BoundKernels

    return BoundKernels(DeviceOps(True, True, capability=case.capability))


LAUNCHES: dict[str, Callable[[Case, Any], None]] = {
    "attention": launch_attention,
    "forms": launch_forms,
    "rest": launch_rest,
    "families": launch_families,
    "recurrence": launch_recurrence,
    "quantized": launch_quantized,
    "quantized_rest": launch_quantized_rest,
    "deterministic": launch_deterministic,
}
