"""Guards the loops of ARM's instruction sets, which are compiled here for that processor, and read."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import llvmlite.binding as llvm
import pytest
from llvmlite import ir
from numba import types

from cbatch.kernels.cpu import softmax, work_queue
from cbatch.kernels.cpu.emit import INT64, Value
from cbatch.kernels.cpu.instruction_sets import INSTRUCTION_SETS, InstructionSet
from cbatch.kernels.cpu.matmul import byte_tile, instructions, microkernel, quantized
from cbatch.kernels.formats import INT4, INT8, IQ4_NL, MXFP4

pytestmark = pytest.mark.kernels

TRIPLE = "aarch64-linux-gnu"
SETS = {each.name: each for each in INSTRUCTION_SETS if "neon" in each.needs}
PROCESSORS = {"neon": "cortex-a72", "neon-dotprod": "neoverse-n1", "neon-i8mm": "neoverse-v1"}
OPTIONAL = frozenset[str]().union(*(each.needs for each in SETS.values()))


@pytest.fixture(scope="module")
def target() -> llvm.Target:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        return llvm.Target.from_triple(TRIPLE)
    except RuntimeError:
        pytest.skip("this llvmlite does not write code for ARM")


def assembly(target: llvm.Target, chosen: InstructionSet, kinds: list[Any], emit: Callable[..., Any]) -> str:
    """The code of a function of such arguments, for a processor that has the set."""
    module = ir.Module()
    module.triple = TRIPLE
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), "loop")
    builder = ir.IRBuilder(function.append_basic_block())
    emit(*(Value(builder, argument) for argument in function.args))
    builder.ret_void()
    features = ",".join(("+" if each in chosen.needs else "-") + each for each in sorted(OPTIONAL))
    machine = target.create_target_machine(cpu=PROCESSORS[chosen.name], features=features, opt=3)
    parsed = llvm.parse_assembly(str(module))
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    return str(machine.emit_assembly(parsed))


def inner_loops(code: str) -> list[str]:
    """From labels to jumps back to them, without others between."""
    blocks = re.split(r"(?m)^(?=\.LBB)", code)
    jumps = [re.search(rf"\tt?c?bn?z?\S*\s.*{re.escape(block.split(':')[0])}\b", block) for block in blocks]
    return [block[: jump.end()] for block, jump in zip(blocks, jumps, strict=True) if jump]


FLOAT, BFLOAT = "float32", "bfloat16"
CASES: list[tuple[str, Any, int, int, str, float]] = [
    ("neon", FLOAT, 4, 1, "fmla", 0.4),
    ("neon", FLOAT, 4, 4, "fmla", 0.7),
    ("neon", BFLOAT, 4, 4, "fmla", 0.6),
    ("neon-i8mm", BFLOAT, 2, 1, "bfdot", 0.4),
    ("neon-i8mm", BFLOAT, 2, 4, "bfmmla", 0.4),
    ("neon", INT8, 2, 4, "smlal2?", 0.4),
    ("neon-dotprod", INT8, 1, 1, "sdot", 0.2),
    ("neon-dotprod", INT8, 1, 4, "sdot", 0.3),
    ("neon-dotprod", IQ4_NL, 1, 4, "sdot", 0.25),
    ("neon-i8mm", INT8, 1, 1, "usdot", 0.2),
    ("neon-i8mm", INT8, 1, 2, "usmmla", 0.12),
    ("neon-i8mm", INT4, 1, 3, "usmmla", 0.15),
    ("neon-i8mm", INT4, 1, 4, "usmmla", 0.15),
    ("neon-i8mm", MXFP4, 1, 4, "usmmla", 0.12),
]
"""Sets, weights, bytes of a number of a row, rows, and the share of the loop that this instruction is at least."""


@pytest.mark.parametrize(("name", "weights", "left_bytes", "rows", "instruction", "share"), CASES)
def test_products_stay_in_registers(
    target: llvm.Target, monkeypatch: pytest.MonkeyPatch, name: str, weights: Any, left_bytes: int, rows: int,
    instruction: str, share: float,
) -> None:  # fmt: skip
    """Guards sums that are written to the stack, factors that are copied, and special instructions that go unused."""
    chosen = SETS[name]
    for module in (instructions, microkernel, quantized):
        monkeypatch.setattr(module, "CHOSEN", chosen)
    assert rows <= chosen.rows(panels=1)
    if isinstance(weights, str):
        tile = microkernel._TileEmitter(weights == FLOAT, rows)
        code = assembly(target, chosen, [INT64] * 11, lambda *a: tile.emit(a[:2], a[2:7], a[7:9], a[9], a[10]))
    else:
        product = quantized._QuantizedEmitter(weights, left_bytes, rows)
        code = assembly(target, chosen, [INT64] * 9, lambda *a: product.emit(a[:2], a[2], a[3], a[4:6], a[6:8], a[8]))
    loop = max(inner_loops(code), key=len)
    found = re.findall(r"(?m)^\t([a-z]\w*)", loop)
    assert sum(re.fullmatch(instruction, each) is not None for each in found) >= share * len(found), loop
    on_stack = re.findall(r"(?m)^\t(?:ld|st)[rp]\t[qd]\d.*\[sp", loop)  # one of a few constants may be there
    assert len(on_stack) <= len(found) // 50, loop
    assert "\tbl\t" not in code, "a function of C is called"


@pytest.mark.parametrize("rows", [1, 4])
def test_sums_of_a_cache_of_bytes_stay_in_registers(
    target: llvm.Target, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Guards the same for the keys and values of a cache of bytes."""
    for module in (instructions, microkernel, byte_tile):
        monkeypatch.setattr(module, "CHOSEN", SETS["neon"])
    tile = byte_tile._Emitter(rows)
    code = assembly(
        target, SETS["neon"], [INT64] * 13, lambda *a: tile.emit(a[:2], a[2:4], a[4:9], a[9:11], a[11], a[12])
    )
    loop = max(inner_loops(code), key=len)
    assert len(re.findall("smlal", loop)) == 16 * rows and "ld1r" not in loop and "[sp" not in loop, loop


@pytest.mark.parametrize("element", [types.float32, types.uint16], ids=str)
def test_the_softmax_calls_no_function(target: llvm.Target, monkeypatch: pytest.MonkeyPatch, element: Any) -> None:
    """Guards roundings and fused products that become calls where a processor lacks an instruction."""
    monkeypatch.setattr(softmax, "CHOSEN", SETS["neon-i8mm"])
    emit = partial(softmax.softmax_row._defn.__wrapped__, element)
    kinds = [*[INT64] * 4, ir.FloatType(), *[INT64] * 5]
    whole = assembly(target, SETS["neon-i8mm"], kinds, lambda *a: emit(*a[:5], None, a[8:]))
    rounded = assembly(target, SETS["neon-i8mm"], kinds, lambda *a: emit(*a[:5], a[5:8], a[8:]))
    assert "\tbl\t" not in whole + rounded and ("bfcvt" in whole) == (element == types.uint16)


def test_the_clock_of_yields(target: llvm.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the counter that programs may read, and its frequency; another one would end the process."""
    monkeypatch.setattr(work_queue, "IS_X86", False)
    monkeypatch.setattr(work_queue, "IS_ARM", True)
    code = assembly(target, SETS["neon"], [INT64], work_queue._microseconds._defn.__wrapped__)
    assert re.findall(r"mrs\s+\w+, (\w+)", code) == ["CNTVCT_EL0", "CNTFRQ_EL0"], code
