"""Compiles every kernel that steps launch for many GPUs, on any machine: `python -m scripts.gpu.compile_matrix`.

Each kernel is launched as in a step, on a driver that compiles and does not launch, with the tuning that the chip would
get. The table says what a kernel takes of each chip. The exit status is 1 if something is wrong: a kernel takes more
than there is, registers are spilled, keys and values are not read 16 bytes at once, or attention waits for everything
that it has asked for. It takes minutes the first time; Triton keeps what it has compiled.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from scripts.benchmarks.harness import in_columns

CHIPS = {75: "T4", 80: "A100", 86: "RTX 3090", 89: "RTX 4090", 90: "H100", 100: "B200", 120: "RTX 5090"}
HEAD_SIZES, GROUPS = (64, 80, 96, 128, 256, 512), (1, 2, 4, 8)
VOCABULARY, HIDDEN, INNER, KV_HEADS = 151936, 4096, 12288, 8
BLOCK_SIZE = 16
SHAPES, ROUTED = ((4096, 4096), (1000, 2880)), (3, 400, 2000)
"""Columns and depths of quantized matrices, and numbers of tokens that go to experts."""

PARTS = ("attention", "forms", "rest", "families", "recurrence", "quantized", "quantized_rest", "deterministic")
KV_DTYPES = ("auto", "fp8")
SPILLS = {
    ("_prefill_kernel", 100, 256): 24, ("_gated_delta_tile_kernel", 120, 0): 48,
    ("_selective_scan_tile_kernel", 120, 0): 24, ("_expert_linear_kernel", 120, 0): 8,
    ("_prefill_kernel", 120, 0): 32, ("_expand_kernel", 100, 0): 8,
}  # fmt: skip
"""Bytes that a kernel may spill, by its chip and head size. The 24 of attention, 8 without FP8, are 6 KiB for all
threads of a program, if each tile of keys and values costs them, beside the 32 KiB of the tile; smaller ones cost more.
Recurrent layers have the smallest tiles that matrix units take. Those of experts are of prompts, and with weights of 4
bits. The 32 of attention are of `--deterministic`, which masks every tile of keys. Those of adapters are of prompts."""


class Case(NamedTuple):
    """Kernels that are compiled together: for a chip, by compute capability, and a type of weights.

    part:       "attention", which depends on heads; "forms", all that attention can be asked for; "families", what
                only some models need; "recurrence", recurrent layers; "quantized", weights of 8 and 4 bits;
                "quantized_rest", these in other sizes; "deterministic", what `--deterministic` takes instead; or "rest"
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


class Kernel(NamedTuple):
    """A compiled kernel's use of its chip.

    shared:     bytes of shared memory
    registers, spilled: of a thread; spilled ones in bytes
    programs:   how many a multiprocessor runs at once
    reads:      bytes of keys and values that a thread reads at once
    faults:     sentences
    """

    case: Case
    name: str
    warps: int
    shared: int
    registers: int
    spilled: int
    programs: int
    reads: list[int]
    faults: list[str]


def all_cases(options: argparse.Namespace) -> list[Case]:
    """Those of the matrix that are wanted; slow ones first."""
    from cbatch.attention.triton import LARGEST_HEAD_BELOW_80

    dtypes = {capability: "float16" if capability < 80 else "bfloat16" for capability in options.arch}
    parts = "rest", "families", "recurrence", "quantized", "quantized_rest", "deterministic", "forms"
    cases = [Case(chip, dtype, part) for chip, dtype in dtypes.items() for part in parts]
    cases += [
        Case(chip, dtype, "attention", head, group, kv_dtype)
        for kv_dtype, (chip, dtype), head, group in itertools.product(
            options.kv_dtypes, dtypes.items(), options.heads, options.groups
        )
        if chip >= 80 or head <= LARGEST_HEAD_BELOW_80
    ]
    if 80 in dtypes and "auto" in options.kv_dtypes:
        cases.append(Case(80, "float32", "attention", 128, 4))
    return [case for case in cases if case.part in options.parts]


def compile_case(case: Case) -> list[Kernel]:
    """Compiles a case. In a process that has not imported Triton to interpret kernels."""
    import torch

    from tests.support.triton_driver import stub_driver

    parts: dict[str, Callable[[Case, Any], None]] = {
        "attention": launch_attention,
        "forms": launch_forms,
        "rest": launch_rest,
        "families": launch_families,
        "recurrence": launch_recurrence,
        "quantized": launch_quantized,
        "quantized_rest": launch_quantized_rest,
        "deterministic": launch_deterministic,
    }
    with stub_driver(case.capability, compiles=True) as stub, torch.inference_mode():
        parts[case.part](case, getattr(torch, case.dtype))
        return [describe(case, one.kernel, one.compiled) for one in stub.compilations]


def describe(case: Case, name: str, compiled: Any) -> Kernel:
    """A compiled kernel's use of its chip, and its faults."""
    from cbatch.kernels.triton.attention_tile import load_kv
    from cbatch.kernels.triton.occupancy import CHIPS as LIMITS
    from cbatch.kernels.triton.occupancy import resident_programs
    from scripts.gpu.compiled_code import copies_in_flight, read_sizes, resources_of

    limits, shared, warps = LIMITS[case.capability], compiled.metadata.shared, compiled.metadata.num_warps
    registers, spilled = resources_of(compiled)
    programs = resident_programs(registers, shared, warps, limits)
    faults = []
    if shared > limits.shared_of_block:
        faults.append(f"takes {shared:,} bytes of shared memory, and a program may have {limits.shared_of_block:,}")
    elif not programs:
        faults.append(f"takes {registers} registers in {warps} warps, and none fits")
    if not compiled.metadata.enable_fp_fusion:
        faults.append("does not say that it wants FP fusion")
    if spilled > SPILLS.get((name, case.capability, case.head_size), 0):
        faults.append(f"spills {spilled} bytes of registers")
    sizes = read_sizes(compiled.asm["ptx"], load_kv)
    if sizes - {16}:
        faults.append(f"reads keys or values {sorted(sizes)} bytes at once")
    if 16 in sizes and case.capability >= 80 and case.dtype != "float32" and copies_in_flight(compiled.asm["ptx"]) < 2:
        faults.append("waits for all keys and values that it has asked for")
    return Kernel(case, name, warps, shared, registers, spilled, programs, sorted(sizes), faults)


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


def multiply(case: Case, dtype: Any, kind: int, columns: int, depth: int) -> None:
    """Products with few rows, some and many, and an embedding."""
    import torch

    from cbatch.kernels.quantized_matrix import QuantizedMatrix

    ops, matrix = layer_ops(case), QuantizedMatrix.empty(kind, columns, depth, torch.device("cpu"))
    for rows in (3, 40, 300):
        source, out = torch.empty(rows, depth, dtype=dtype), torch.empty(rows, columns, dtype=dtype)
        ops.quantized_linear(source, matrix, None, out)
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


def compile_all(cases: Sequence[Case], jobs: int) -> Iterator[list[Kernel]]:
    """The kernels of each case, as they are compiled."""
    # Before the processes import Triton, whose default of FP fusion depends on its version: launches must not use it.
    os.environ |= {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "0"}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(compile_case, cases)


def table(kernels: Sequence[Kernel]) -> list[list[str]]:
    """A line for each kernel and head size: shared memory, registers and resident programs for each chip.

    Of several groups or forms, the one of which the fewest programs fit, and of those the one that takes most.
    """
    chips = sorted({kernel.case.capability for kernel in kernels})
    cells: dict[tuple[str, str], dict[int, Kernel]] = {}
    for kernel in kernels:
        case = kernel.case
        head = str(case.head_size or "") + (", float32" if case.dtype == "float32" else "")
        head += ", FP8" if case.kv_dtype == "fp8" else ""
        if case.part != "forms":
            line = cells.setdefault((kernel.name.strip("_").removesuffix("_kernel"), head), {})
            line[case.capability] = max(line.get(case.capability, kernel), kernel, key=_need)
    rows = [["kernel", "heads", *(f"{CHIPS[chip]} ({chip / 10})" for chip in chips)]]
    for (name, head), line in sorted(cells.items(), key=lambda item: (item[0][0], item[0][1].rjust(12))):
        rows.append([name, head, *(_cell(line[chip]) if chip in line else "" for chip in chips)])
    return rows


def _need(kernel: Kernel) -> tuple[int, int, int]:
    return -kernel.programs, kernel.shared, kernel.registers


def _cell(kernel: Kernel) -> str:
    return f"{kernel.shared / 1024:.0f} KiB, {kernel.registers}, {kernel.programs}"


def sentences(kernels: Sequence[Kernel]) -> list[str]:
    """The faults, a sentence each."""
    return [
        f"{kernel.name} for {CHIPS[kernel.case.capability]} ({', '.join(map(str, kernel.case))}) {fault}"
        for kernel in kernels
        for fault in kernel.faults
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="compile_matrix"
    )

    def some(kind: Callable[[str], Any], known: Sequence[Any]) -> Callable[[str], list[Any]]:
        def read(text: str) -> list[Any]:
            found = [kind(part) for part in text.split(",")]
            if set(found) - set(known):
                raise argparse.ArgumentTypeError(f"{text} is not among {', '.join(map(str, known))}")
            return found

        return read

    add = parser.add_argument
    chips = ", ".join(f"{capability} {name}" for capability, name in CHIPS.items())
    add("--arch", type=some(int, list(CHIPS)), default=list(CHIPS), help=f"compute capabilities times ten, of: {chips}")
    add(
        "--heads",
        type=some(int, HEAD_SIZES),
        default=list(HEAD_SIZES),
        help=f"head sizes (all of {str(HEAD_SIZES)[1:-1]})",
    )
    add(
        "--groups",
        type=some(int, GROUPS),
        default=list(GROUPS),
        help=f"query heads of a KV head (all of {str(GROUPS)[1:-1]})",
    )
    add(
        "--kv-dtypes",
        type=some(str, KV_DTYPES),
        default=list(KV_DTYPES),
        help="types of the KV cache (all of auto,fp8)",
    )
    add("--parts", type=some(str, PARTS), default=PARTS, help=f"of {','.join(PARTS)} (all)")
    add("--jobs", type=int, default=os.cpu_count(), help="processes (%(default)s)")
    add("--markdown", action="store_true", help="print the table as Markdown")
    add("--json", action="store_true", help="print all that was found as JSON instead of the table")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    cases = all_cases(options)
    kernels: list[Kernel] = []
    for number, found in enumerate(compile_all(cases, options.jobs), 1):
        kernels += found
        if sys.stderr.isatty():
            print(f"\r{number} of {len(cases)}", end="", file=sys.stderr, flush=True)
    wrong = sentences(kernels)
    if options.json:
        print(json.dumps([kernel._asdict() | {"case": kernel.case._asdict()} for kernel in kernels]))
    else:
        from importlib.metadata import version

        print(f"Triton {version('triton')}: shared memory, registers of a thread, programs on a multiprocessor\n")
        print(*in_columns(table(kernels), markdown=options.markdown, notes=False), sep="\n")
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
