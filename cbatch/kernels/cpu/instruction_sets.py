"""The instruction sets that kernels are written for: what each offers, and which one this process uses.

Kernels are written for vectors of 16 numbers. Where a register holds fewer, LLVM cuts them into parts; only special
instructions are named here and called part by part (see `matmul/instructions.py`).
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import llvmlite.binding as llvm
from numba.core import config

from cbatch.base.errors import ConfigError
from cbatch.runtime.processors import number_of_macos

VARIABLE = "CBATCH_CPU"
"""The environment variable that names a set, which hides what better sets have."""


@dataclass(frozen=True)
class InstructionSet:
    """A set, with the special instructions that kernels use.

    needs:     features of the processor, in LLVM's names
    lanes:     numbers of 32 bits in a register
    registers: how many there are
    bfloat16:  adds the products of pairs of bfloat16 to float32
    pairs:     the products of pairs of int16, added to each other: added to int32 if it starts with a sum
    quads:     the products of four bytes without a sign and four with one, likewise
    shorts:    the products of pairs of such bytes as int16, which saturate: for small numbers only
    table:     takes bytes from a table of 16
    row_bytes: bytes of a row that are read at once, where products take a lane of a register; else 0
    bfloat16_squares, quads_squares: products of two columns with two rows, of twice as many numbers each
    """

    name: str
    needs: frozenset[str]
    lanes: int = 4
    registers: int = 16
    bfloat16: str = ""
    pairs: str = ""
    quads: str = ""
    shorts: str = ""
    table: str = ""
    bfloat16_squares: str = ""
    quads_squares: str = ""
    row_bytes: int = 0

    @property
    def has_amx(self) -> bool:
        """Whether there is Intel's matrix unit."""
        return "amx-bf16" in self.needs

    @property
    def has_float16(self) -> bool:
        """Whether an instruction makes float32 of float16."""
        return not self.needs.isdisjoint(("f16c", "neon"))

    def rows(self, panels: int) -> int:
        """The most rows whose sums with so many panels of 16 columns stay in registers, beside what is multiplied."""
        columns = panels * 16 // self.lanes
        if self.row_bytes:
            return (self.registers - columns - 1) // (columns + 1) // 2 * 2
        return self.registers * 3 // 4 // columns


def _arm_features() -> Iterator[str]:
    """Those of a 64-bit ARM that the sets need, which LLVM does not ask the system for."""
    yield "neon"
    for name, kind, bit in (("DotProd", 16, 20), ("I8MM", 26, 13), ("BF16", 26, 14)):  # 16: AT_HWCAP, 26: AT_HWCAP2
        if sys.platform == "darwin":
            is_there = number_of_macos(f"hw.optional.arm.FEAT_{name}")
        else:
            is_there = ctypes.CDLL(None).getauxval(ctypes.c_ulong(kind)) >> bit & 1
        if is_there:
            yield name.lower()


IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
IS_ARM = platform.machine().lower() in ("aarch64", "arm64")

HOST_FEATURES = frozenset(name for name, is_there in llvm.get_host_cpu_features().items() if is_there)
if IS_ARM:
    HOST_FEATURES |= set(_arm_features())

_FAMILIES = ("amx", "avx10", "avx512", "avxvnni")
"""How the names of features begin that a set without any of them hides."""

_AVX2 = frozenset(("avx2", "fma", "f16c"))
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}

_VNNI = InstructionSet(
    "avx512vnni", _AVX512 | {"avx512vnni"}, 16, 32,
    pairs="x86.avx512.vpdpwssd.512", quads="x86.avx512.vpdpbusd.512", table="x86.avx512.pshuf.b.512",
)  # fmt: skip
_BF16 = replace(_VNNI, name="avx512bf16", needs=_VNNI.needs | {"avx512bf16"}, bfloat16="x86.avx512bf16.dpbf16ps.512")
_TABLE_NEON = "aarch64.neon.tbl1.v16i8"

INSTRUCTION_SETS = (
    replace(_BF16, name="amx", needs=_BF16.needs | {"amx-tile", "amx-bf16"}),
    _BF16,
    _VNNI,
    InstructionSet(
        "avx512", _AVX512, 16, 32,
        pairs="x86.avx512.pmaddw.d.512", shorts="x86.avx512.pmaddubs.w.512", table=_VNNI.table,
    ),
    InstructionSet(
        "avxvnni", _AVX2 | {"avxvnni"}, 8, 16,
        pairs="x86.avx512.vpdpwssd.256", quads="x86.avx512.vpdpbusd.256", table="x86.avx2.pshuf.b",
    ),
    InstructionSet(
        "avx2", _AVX2, 8, 16, pairs="x86.avx2.pmadd.wd", shorts="x86.avx2.pmadd.ub.sw", table="x86.avx2.pshuf.b"
    ),
    InstructionSet(
        "neon-i8mm", frozenset(("neon", "dotprod", "i8mm", "bf16")), 4, 32,
        bfloat16="aarch64.neon.bfdot.v4f32.v8bf16", bfloat16_squares="aarch64.neon.bfmmla",
        quads="aarch64.neon.usdot.v4i32.v16i8", quads_squares="aarch64.neon.usmmla.v4i32.v16i8",
        table=_TABLE_NEON, row_bytes=16,
    ),
    InstructionSet(
        "neon-dotprod", frozenset(("neon", "dotprod")), 4, 32,
        quads="aarch64.neon.sdot.v4i32.v16i8", table=_TABLE_NEON, row_bytes=16,
    ),
    InstructionSet("neon", frozenset(("neon",)), 4, 32, table=_TABLE_NEON, row_bytes=16),
    InstructionSet("generic", frozenset()),
)  # fmt: skip
"""The best first."""


def _choose() -> tuple[InstructionSet, frozenset[str]]:
    """The best set that the processor has, or the one that CBATCH_CPU names; and the features that may be used.

    Raises ConfigError if there is no such set, or the processor lacks it.
    """
    usable = {each.name: each for each in INSTRUCTION_SETS if each.needs <= HOST_FEATURES}
    name = os.environ.get(VARIABLE, "").lower()
    if name and name not in usable:
        raise ConfigError(f"{VARIABLE} is {name!r}, but this processor has {', '.join(usable)}.")
    chosen = usable[name] if name else next(iter(usable.values()))
    features = HOST_FEATURES - (_hidden_by(chosen) if name else frozenset())
    if name or IS_ARM:  # else numba asks LLVM
        config.CPU_FEATURES = ",".join(f"{'+' if each in features else '-'}{each}" for each in sorted(HOST_FEATURES))
    return chosen, features


def _hidden_by(chosen: InstructionSet) -> frozenset[str]:
    """Features that only better sets need, and families of features of which the set needs none."""
    better = frozenset[str]().union(*(each.needs for each in INSTRUCTION_SETS[: INSTRUCTION_SETS.index(chosen)]))
    families = tuple(family for family in _FAMILIES if not any(each.startswith(family) for each in chosen.needs))
    return (better - chosen.needs).union(each for each in HOST_FEATURES if each.startswith(families))


CHOSEN, FEATURES = _choose()
