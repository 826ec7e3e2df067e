"""Compiles every kernel that steps launch for many GPUs, on any machine: `python -m scripts.gpu.compile_matrix`.

Each kernel is launched as in a step, on a driver that compiles and does not launch, with the tuning that the chip would
get. The table says what a kernel takes of each chip. The exit status is 1 if something is wrong: a kernel takes more
than there is, or than its budget allows, registers are spilled, keys and values are not read 16 bytes at once, or
attention waits for everything that it has asked for. It takes minutes the first time; Triton keeps what it compiled.
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
from scripts.gpu.budgets import BUDGET_CHIPS, BUDGETS, Budget
from scripts.gpu.launches import LAUNCHES, Case

CHIPS = {75: "T4", 80: "A100", 86: "RTX 3090", 89: "RTX 4090", 90: "H100", 100: "B200", 120: "RTX 5090"}
HEAD_SIZES, GROUPS = (64, 80, 96, 128, 256, 512), (1, 2, 4, 8)
PARTS = (*LAUNCHES, "budgets")
KV_DTYPES = ("auto", "fp8")
SPILLS = {
    ("_prefill_kernel", 100, 256): 24, ("_gated_delta_tile_kernel", 120, 0): 48,
    ("_selective_scan_tile_kernel", 120, 0): 24, ("_expert_linear_kernel", 120, 0): 8,
    ("_prefill_kernel", 120, 0): 32, ("_expand_kernel", 100, 0): 8,
    **{("_combine_kernel", 80, head): 8 for head in (0, 128)},
    ("_linear_kernel", 100, 0): 16, **{("_linear_kernel", chip, 0): 8 for chip in (80, 90)},
    **{("_expert_linear_kernel", chip, 0): 8 for chip in (80, 86, 89, 90)},
    **{("_decode_kernel", chip, head): spilled for chip in (90, 100) for head, spilled in ((64, 8), (128, 16))},
}  # fmt: skip
"""Bytes that a kernel may spill, by its chip and head size. The 24 of attention, 8 without FP8, are 6 KiB for all
threads of a program, if each tile of keys and values costs them, beside the 32 KiB of the tile; smaller ones cost more.
Recurrent layers have the smallest tiles that matrix units take. Products and experts with packed weights spill 8 or 16
in some sizes, because the assembler stops at 80 or 96 of 255 registers. The 32 of attention are of `--deterministic`,
which masks every tile of keys. The 8 of adapters are of prompts, and so are those of merging. Decode attention spills
outside its inner loop, of heads of 128 only with Triton 3.6: a fourth or third program is worth more."""


class Kernel(NamedTuple):
    """A compiled kernel's use of its chip.

    shared:     bytes of shared memory
    registers, spilled: of a thread; spilled ones in bytes
    programs:   how many a multiprocessor runs at once
    reads:      bytes of keys and values that a thread reads at once
    faults:     sentences
    budget, inner: the budget that it was compiled for, and what it takes of that; see `budgets.py`
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
    budget: str = ""
    inner: Any = None


def all_cases(options: argparse.Namespace) -> list[Case]:
    """Those of the matrix that are wanted; slow ones first."""
    from cbatch.attention.triton import LARGEST_HEAD_BELOW_80

    dtypes = {capability: "float16" if capability < 80 else "bfloat16" for capability in options.arch}
    parts = "budgets", "rest", "families", "recurrence", "quantized", "quantized_rest", "deterministic", "forms"
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

    if case.part == "budgets":
        return [budgeted(case, budget) for budget in BUDGETS if case.capability in BUDGET_CHIPS]
    with stub_driver(case.capability, compiles=True) as stub, torch.inference_mode():
        LAUNCHES[case.part](case, getattr(torch, case.dtype))
        return [describe(case, one.kernel, one.compiled) for one in stub.compilations]


def budgeted(case: Case, budget: Budget) -> Kernel:
    """A kernel with a budget, and what it takes of it."""
    import torch

    from scripts.gpu.compiled_code import inner_loop
    from tests.support.triton_driver import stub_driver

    def is_first(kernel: str, arguments: dict[str, str]) -> bool:
        return budget.is_for(kernel, arguments) and not any(one.compiled for one in stub.compilations)

    with stub_driver(case.capability, compiles=is_first) as stub, torch.inference_mode():
        budget.launch(case, getattr(torch, case.dtype))
    one = next(one for one in stub.compilations if one.compiled)
    kernel = describe(case, one.kernel, one.compiled)
    inner = budget.measured(inner_loop(one.compiled, any_loop=budget.any_loop), one.arguments, kernel.warps)
    faults = kernel.faults + budget.faults(case.capability, inner)
    return kernel._replace(faults=faults, budget=budget.name, inner=inner)


def describe(case: Case, name: str, compiled: Any) -> Kernel:
    """A compiled kernel's use of its chip, and its faults."""
    from cbatch.kernels.triton.attention_tile import load_kv
    from cbatch.kernels.triton.occupancy import CHIPS as LIMITS
    from cbatch.kernels.triton.occupancy import resident_programs
    from scripts.gpu.compiled_code import copies_in_flight, read_sizes, resources_of, waits_first

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
    if compiled.metadata.launch_pdl and not waits_first(compiled.asm["ptx"]):
        faults.append("is launched early and does not begin with a wait for the kernel before")
    sizes = read_sizes(compiled.asm["ptx"], load_kv)
    if sizes - {16}:
        faults.append(f"reads keys or values {sorted(sizes)} bytes at once")
    if 16 in sizes and case.capability >= 80 and case.dtype != "float32" and copies_in_flight(compiled.asm["ptx"]) < 2:
        faults.append("waits for all keys and values that it has asked for")
    return Kernel(case, name, warps, shared, registers, spilled, programs, sorted(sizes), faults)


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
        if case.part not in ("forms", "budgets"):
            line = cells.setdefault((kernel.name.strip("_").removesuffix("_kernel"), head), {})
            line[case.capability] = max(line.get(case.capability, kernel), kernel, key=_need)
    rows = [["kernel", "heads", *(f"{CHIPS[chip]} ({chip / 10})" for chip in chips)]]
    for (name, head), line in sorted(cells.items(), key=lambda item: (item[0][0], item[0][1].rjust(12))):
        rows.append([name, head, *(_cell(line[chip]) if chip in line else "" for chip in chips)])
    return rows


def budget_table(kernels: Sequence[Kernel]) -> list[list[str]]:
    """A line for each budget: instructions and bytes for each number, the matrix unit, registers and shared memory."""
    cells = {(kernel.budget, kernel.case.capability): kernel for kernel in kernels if kernel.budget}
    chips = sorted({chip for _, chip in cells})
    rows = [["budget", *(f"{CHIPS[chip]} ({chip / 10})" for chip in chips)]]
    for budget in dict.fromkeys(name for name, _ in cells):
        found = [cells[budget, chip] for chip in chips]
        rows.append([budget, *(f"{one.inner}, {one.registers}, {one.shared / 1024:.0f} KiB" for one in found)])
    return rows


def _need(kernel: Kernel) -> tuple[int, int, int]:
    return -kernel.programs, kernel.shared, kernel.registers


def _cell(kernel: Kernel) -> str:
    return f"{kernel.shared / 1024:.0f} KiB, {kernel.registers}, {kernel.programs}"


def sentences(kernels: Sequence[Kernel]) -> list[str]:
    """The faults, a sentence each."""

    def where(kernel: Kernel) -> str:
        return f"{CHIPS[kernel.case.capability]} ({kernel.budget or ', '.join(map(str, kernel.case))})"

    return [f"{kernel.name} for {where(kernel)} {fault}" for kernel in kernels for fault in kernel.faults]


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
        if any(kernel.budget for kernel in kernels):
            print("\nInstructions and bytes read for each number, matrix unit, registers, shared memory\n")
            print(*in_columns(budget_table(kernels), markdown=options.markdown, notes=False), sep="\n")
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
