"""Conversions between bytes and numbers, to 16 bits by instructions of NVIDIA's PTX.

These take two numbers of 16 bits or four bytes at once, as nothing in Triton's language does. Triton's interpreter has
no PTX and converts by float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

_FOUR = tl.constexpr("=r,=r,r")
"""Registers: four numbers of 16 bits, of four bytes."""

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


def _e4m3_by_integers(kind: str, shift: int, factor: str) -> tl.constexpr:
    """Moves the bits of four numbers to those of a type, whose exponents begin elsewhere: so they are multiplied.

    A byte of NaN, 0x7F without its sign, has all bits of an exponent set, those that it lacks too.

    factor: in the type, twice
    """
    pairs = ((0, 0x9180, 0x1404), (1, 0xB3A2, 0x3424))  # bytes 0 and 1, with their highest bits spread; and 2 and 3
    return tl.constexpr(
        f"""{{.reg .b32 size, nan, bits, sign, factor, zero;
        and.b32 size, $2, 0x7f7f7f7f;
        add.u32 nan, size, 0x01010101;
        and.b32 nan, nan, 0x80808080;
        or.b32 size, size, nan;
        mov.b32 factor, {factor};
        mov.b32 zero, 0x80008000;"""
        + "".join(
            f"""
        prmt.b32 bits, size, 0, {spread:#x};
        shl.b32 bits, bits, {shift};
        and.b32 bits, bits, 0x7fff7fff;
        prmt.b32 sign, $2, 0, {high:#x};
        and.b32 sign, sign, 0x80008000;
        or.b32 bits, bits, sign;
        fma.rn.{kind}x2 ${number}, bits, factor, zero;"""
            for number, spread, high in pairs
        )
        + "}"
    )


_E4M3_TO_FLOAT16 = _e4m3_by_integers("f16", 7, "0x5c005c00")  # 2**8
_E4M3_TO_BFLOAT16 = _e4m3_by_integers("bf16", 4, "0x7b807b80")  # 2**120
_E4M3_TO_FLOAT16_BY_HARDWARE = tl.constexpr(
    """{.reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;}"""
)
_E4M3_TO_BFLOAT16_BY_HARDWARE = tl.constexpr(
    """{.reg .b16 half<2>, first, second;
    .reg .b32 pair;
    .reg .f32 wide<2>;
    mov.b32 {half0, half1}, $2;"""
    + "".join(
        f"""
    cvt.rn.f16x2.e4m3x2 pair, half{number};
    mov.b32 {{first, second}}, pair;
    cvt.f32.f16 wide0, first;
    cvt.f32.f16 wide1, second;
    cvt.rn.bf16x2.f32 ${number}, wide1, wide0;"""
        for number in (0, 1)
    )
    + "}"
)


@triton.jit
def from_fp8(code, dtype, IS_PURE=True):
    """The numbers of bytes of FP8 (e4m3), exact in any type; by integers below 8.9, which has no such type.

    With its bits moved to those of float16, a number is 2**-8 of what it should be: the exponents begin 8 apart.

    IS_PURE: False if Triton may move nothing past the conversion
    """
    if COMPILED and dtype == tl.bfloat16:
        if cuda_capability_geq(8, 9):
            number = tl.inline_asm_elementwise(_E4M3_TO_BFLOAT16_BY_HARDWARE, _FOUR, [code], tl.bfloat16, IS_PURE, 4)
        else:
            number = tl.inline_asm_elementwise(_E4M3_TO_BFLOAT16, _FOUR, [code], tl.bfloat16, IS_PURE, 4)
    elif COMPILED:
        if cuda_capability_geq(8, 9):
            number = tl.inline_asm_elementwise(_E4M3_TO_FLOAT16_BY_HARDWARE, _FOUR, [code], tl.float16, IS_PURE, 4)
        else:
            number = tl.inline_asm_elementwise(_E4M3_TO_FLOAT16, _FOUR, [code], tl.float16, IS_PURE, 4)
        number = number.to(dtype)
    else:
        magnitude = (code & 0x7F).to(tl.int16)
        bits = (magnitude << 7) | ((code & 0x80).to(tl.int16) << 8)
        exact = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        number = tl.where(magnitude == 0x7F, float("nan"), exact).to(dtype)
    return number


@triton.jit
def to_fp8(number):
    """Bytes of FP8 (e4m3) of numbers: the nearest, ties to even; the largest, 448, of larger ones; NaN stays NaN."""
    exact = number.to(tl.float32)
    size = tl.minimum(tl.abs(exact), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Beside 2**14, a float32 is rounded to multiples of 2**-9, as the smallest numbers of FP8 are.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal) | ((exact.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return tl.where(exact != exact, 0x7F, code).to(tl.uint8)
