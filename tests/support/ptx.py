"""PTX that kernels bring, executed by NumPy: its instructions on whole arrays, in Triton's interpreter.

Only what `cbatch/kernels/triton/conversion.py` uses. Source: the PTX ISA.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from cbatch.kernels.triton import conversion
from tests.support.device import DEVICE

needs_interpreter = pytest.mark.skipif(DEVICE.type != "cpu", reason="the interpreter executes the PTX of any chip")

Register = NDArray[Any]
_ARRAYS = {tl.float16: np.float16, tl.bfloat16: np.uint16, tl.uint8: np.uint8}
_TYPES = {"f16x2": torch.float16, "bf16x2": torch.bfloat16}


def _numbers(register: Register, kind: str) -> torch.Tensor:
    """[n, 2] float64"""
    return torch.from_numpy(register.view(np.int16)).view(_TYPES[kind]).view(-1, 2).double()


def _rounded(numbers: torch.Tensor, kind: str) -> Register:
    found: Register = numbers.to(_TYPES[kind]).view(torch.int16).numpy().reshape(-1).view(np.uint32)
    return found


def _prmt(low: Register, high: Register, selector: Register) -> Register:
    choice = np.stack([low, high], -1).astype(np.uint32).view(np.uint8).reshape(-1, 8)
    found = np.zeros((len(low), 4), np.uint8)
    for place in range(4):
        number = selector >> np.uint32(4 * place) & np.uint32(15)
        byte = choice[np.arange(len(low)), number & 7]
        found[:, place] = np.where(number & 8, np.where(byte & 0x80, 0xFF, 0), byte)
    return found.reshape(-1).view(np.uint32)


def _lop3(*operands: Register) -> Register:
    """The last says by its bits for which bits of the others a bit is set."""
    *inputs, table = operands
    found = np.zeros_like(inputs[0])
    for case in range(8):
        one, other, third = (
            each if case >> place & 1 else ~each for each, place in zip(inputs, (2, 1, 0), strict=True)
        )
        found |= np.where(table >> np.uint32(case) & 1, one & other & third, 0)
    return found


def _from_e4m3(pair: Register) -> Register:
    numbers = torch.from_numpy(pair.astype(np.uint16).view(np.uint8)).view(torch.float8_e4m3fn)
    return _rounded(numbers.double().view(-1, 2), "f16x2")


def _to_e4m3(high: Register, low: Register) -> Register:
    numbers = torch.from_numpy(np.stack([low, high], -1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return numbers.view(torch.uint8).numpy().reshape(-1).view(np.uint16).astype(np.uint32)


def _fma(kind: str) -> Callable[..., Register]:
    def fma(*operands: Register) -> Register:
        one, other, added = (_numbers(operand, kind) for operand in operands)
        return _rounded(one * other + added, kind)

    return fma


_INSTRUCTIONS: dict[str, Callable[..., Register]] = {
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "add.u32": np.add,
    "shl.b32": np.left_shift,
    "shr.b32": np.right_shift,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "mov.b32": lambda value: value,
    "fma.rn.f16x2": _fma("f16x2"),
    "fma.rn.bf16x2": _fma("bf16x2"),
    "cvt.rn.f16x2.e4m3x2": _from_e4m3,
    "cvt.rn.satfinite.e4m3x2.f32": _to_e4m3,
    "cvt.f32.f16": lambda half: half.astype(np.uint16).view(np.float16).astype(np.float32),
    "cvt.rn.bf16x2.f32": lambda high, low: _rounded(torch.from_numpy(np.stack([low, high], -1)).double(), "bf16x2"),
}


def execute(asm: str, registers: dict[str, Register]) -> None:
    """Executes instructions on registers, each an array with an element for each execution."""
    count = len(next(iter(registers.values())))

    def value(name: str) -> Register:
        return np.full(count, int(name, 0), np.uint32) if name[0].isdigit() else registers[name]

    for statement in asm.strip().strip("{}").split(";"):
        if not (words := statement.split(None, 1)) or words[0] == ".reg":
            continue
        name, operands = words
        if halves := re.match(r"\{(\w+), (\w+)\}, (\$?\w+)$", operands):  # of a register
            whole = value(halves[3])
            registers[halves[1]], registers[halves[2]] = whole & np.uint32(0xFFFF), whole >> np.uint32(16)
            continue
        if halves := re.match(r"(\$?\w+), \{(\w+), (\w+)\}$", operands):
            registers[halves[1]] = value(halves[2]) | value(halves[3]) << np.uint32(16)
            continue
        target, *sources = (operand.strip() for operand in operands.split(","))
        registers[target] = _INSTRUCTIONS[name](*map(value, sources))


class _Results(list[TensorHandle]):
    def get_result(self, number: int) -> TensorHandle:
        return self[number]


def _execute_inline(
    _builder: Any, asm: str, constraints: str, values: list[TensorHandle], types: list[Any], _pure: bool, pack: int
) -> _Results:
    """As `InterpreterBuilder.create_inline_asm`, for one tensor and results of 8 or 16 bits."""
    (source,) = values
    numbers = np.ascontiguousarray(source.data).reshape(-1)
    each = pack * types[0].scalar.primitive_bitwidth // 32
    first, inputs = each * len(types), pack * source.data.itemsize // 4
    assert constraints == ",".join(["=r"] * first + ["f" if numbers.dtype == np.float32 else "r"] * inputs)
    kept = numbers.reshape(-1, inputs) if numbers.dtype == np.float32 else numbers.view(np.uint32).reshape(-1, inputs)
    registers = {f"${first + place}": kept[:, place] for place in range(inputs)}
    with np.errstate(over="ignore"):
        execute(asm, registers)
    found = _Results()
    for number, kind in enumerate(types):
        words = np.stack([registers[f"${each * number + place}"] for place in range(each)], -1)
        dtype = kind.scalar
        data = words.view(_ARRAYS[dtype]).reshape(source.data.shape)
        found.append(TensorHandle(data, dtype))
    return found


@contextmanager
def emulated_ptx(capability: int) -> Iterator[None]:
    """Within the block, interpreted kernels convert by the PTX that they have for a chip."""

    def is_since(major: int, minor: int = 0) -> bool:
        return capability >= major * 10 + minor

    with (
        patch.object(InterpreterBuilder, "create_inline_asm", _execute_inline),
        patch.object(conversion, "COMPILED", tl.constexpr(True)),
        patch.object(conversion, "cuda_capability_geq", is_since),
    ):
        yield
