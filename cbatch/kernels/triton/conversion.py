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
_TO_E4M3_BY_HARDWARE = tl.constexpr(
    """{.reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};}"""
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


def _nibbles(kind: str, setup: str, low: str, high: str) -> tl.constexpr:
    """Makes numbers of four bits in four bytes: those in the low bits of all bytes, then those in their high bits.

    low, high: from two bytes in `pair`, in the low halves of 16 bits, to two numbers in a register that they name TO
    """
    return tl.constexpr(
        f"{{.reg .b32 pair, bits, sign, factor, offset, high_factor, high_offset, magic; {setup}"
        + "".join(
            f"""
        prmt.b32 pair, $4, 0, {selector:#x};
        {low.replace("TO", f"${number}")}
        {high.replace("TO", f"${number + 2}")}"""
            for number, selector in ((0, 0x4140), (1, 0x4342))
        ).replace("TYPE", kind)
        + "}"
    )


# The bits of an integer go to the mantissa of a number so large that they count in ones there, or in sixteens.
_INT4 = """lop3.b32 bits, pair, 0x000f000f, magic, 0xea;
        fma.rn.TYPEx2 TO, bits, factor, offset;"""
_INT4_TO_BFLOAT16 = _nibbles(
    "bf16", "mov.b32 magic, 0x43004300; mov.b32 factor, 0x3f803f80; mov.b32 offset, 0xc308c308;",  # 128; 1; -136
    _INT4, f"shr.b32 pair, pair, 4; {_INT4}",
)  # fmt: skip
_INT4_TO_FLOAT16 = _nibbles(
    "f16", """mov.b32 magic, 0x64006400; mov.b32 factor, 0x3c003c00; mov.b32 offset, 0xe408e408;
        mov.b32 high_factor, 0x2c002c00; mov.b32 high_offset, 0xd480d480;""",  # 1024; 1; -1032; 1 / 16; -72
    _INT4, """lop3.b32 bits, pair, 0x00f000f0, magic, 0xea;
        fma.rn.f16x2 TO, bits, high_factor, high_offset;""",
)  # fmt: skip


def _e2m1(shift: int, mask: str) -> tuple[str, str]:
    """Moves a sign to the highest bit, and three others to where an exponent ends and a mantissa begins."""
    text = "shl.b32 bits, pair, {}; and.b32 bits, bits, {}; {} lop3.b32 bits, sign, 0x80008000, bits, 0xea;"
    text += "fma.rn.TYPEx2 TO, bits, factor, offset;"
    return (
        text.format(shift, mask, "shl.b32 sign, pair, 12;"),
        text.format(shift - 4, mask, "shl.b32 sign, pair, 8;"),
    )


_E2M1_TO_BFLOAT16 = _nibbles(
    "bf16",
    "mov.b32 factor, 0x7f007f00; mov.b32 offset, 0x80008000;",
    *_e2m1(6, "0x01c001c0"),  # 2**127; -0
)
_E2M1_TO_FLOAT16 = _nibbles(
    "f16",
    "mov.b32 factor, 0x78007800; mov.b32 offset, 0x80008000;",
    *_e2m1(9, "0x0e000e00"),  # 2**15; -0
)
_EIGHT = tl.constexpr("=r,=r,=r,=r,r")
"""Registers: four numbers of 16 bits twice, of four bytes."""


def _int8(setup: str, instructions: str) -> tl.constexpr:
    return tl.constexpr(
        f"{{.reg .b32 bits, sign, magic, factor, offset; {setup}"
        + "".join(
            instructions.format(selector=f"{selector:#x}", target=f"${number}")
            for number, selector in ((0, 0x4140), (1, 0x4342))
        )
        + "}"
    )


# A bfloat16 has no room for 8 bits, so the highest, which counts -128, goes to what is subtracted: 128, or 256.
_INT8_TO_BFLOAT16 = _int8(
    "mov.b32 magic, 0x43004300; mov.b32 offset, 0xc300c300; mov.b32 factor, 0x3f803f80;",
    """
    prmt.b32 bits, $2, 0, {selector};
    lop3.b32 sign, bits, 0x00800080, offset, 0xea;
    lop3.b32 bits, bits, 0x007f007f, magic, 0xea;
    fma.rn.bf16x2 {target}, bits, factor, sign;""",
)
_INT8_TO_FLOAT16 = _int8(
    """mov.b32 magic, 0x64646464; mov.b32 offset, 0xe480e480; mov.b32 factor, 0x3c003c00;
    xor.b32 sign, $2, 0x80808080;""",  # 1024 in the high bytes; -1152; 1
    """
    prmt.b32 bits, sign, magic, {selector};
    fma.rn.f16x2 {target}, bits, factor, offset;""",
)


@triton.jit
def from_four_bits(code, dtype, IS_E2M1):
    """Numbers in the low and in the high bits of bytes, exact in any type: twice those of e2m1, or integers less 8."""
    if COMPILED and dtype == tl.bfloat16:
        to_bfloat16: tl.constexpr = _E2M1_TO_BFLOAT16 if IS_E2M1 else _INT4_TO_BFLOAT16
        low, high = tl.inline_asm_elementwise(to_bfloat16, _EIGHT, [code], (tl.bfloat16, tl.bfloat16), True, 4)
    elif COMPILED:
        to_float16: tl.constexpr = _E2M1_TO_FLOAT16 if IS_E2M1 else _INT4_TO_FLOAT16
        low, high = tl.inline_asm_elementwise(to_float16, _EIGHT, [code], (tl.float16, tl.float16), True, 4)
    elif IS_E2M1:
        low, high = _one_e2m1(code), _one_e2m1(code >> 4)
    else:
        low, high = (code & 15).to(tl.float32) - 8.0, (code >> 4).to(tl.float32) - 8.0
    return low.to(dtype), high.to(dtype)


@triton.jit
def _one_e2m1(code):
    bits = ((code & 7).to(tl.int16) << 9) | ((code & 8).to(tl.int16) << 12)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 32768.0


@triton.jit
def _by_ptx(code, dtype, TO_BFLOAT16, TO_FLOAT16, IS_PURE):
    """The numbers of bytes by instructions for either type of 16 bits; other types get them from float16."""
    if dtype == tl.bfloat16:
        number = tl.inline_asm_elementwise(TO_BFLOAT16, _FOUR, [code], tl.bfloat16, IS_PURE, 4)
    else:
        number = tl.inline_asm_elementwise(TO_FLOAT16, _FOUR, [code], tl.float16, IS_PURE, 4).to(dtype)
    return number


@triton.jit
def from_int8(code, dtype):
    """Signed integers, exact in any type."""
    return _by_ptx(code, dtype, _INT8_TO_BFLOAT16, _INT8_TO_FLOAT16, True) if COMPILED else code.to(dtype)


@triton.jit
def in_order(number):
    """The same numbers. Triton moves nothing past it: warps convert their shares before they exchange numbers.

    Not for 10.0, whose matrix units take them from shared memory: below 3.9, Triton cannot compile it there.
    """
    if (COMPILED and number.dtype.primitive_bitwidth == 16) and (
        not cuda_capability_geq(10, 0) or cuda_capability_geq(12, 0)
    ):
        number = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], number.dtype, False, 2)
    return number


@triton.jit
def ones_like(number):
    """Ones that Triton takes for made of the numbers, so that both are multiplied with one tile in one layout."""
    if COMPILED and number.dtype == tl.bfloat16:
        ones = tl.inline_asm_elementwise("mov.b32 $0, 0x3f803f80;", "=r,r", [number], tl.bfloat16, True, 2)
    elif COMPILED:
        ones = tl.inline_asm_elementwise("mov.b32 $0, 0x3c003c00;", "=r,r", [number], tl.float16, True, 2)
    else:
        ones = tl.full(number.shape, 1.0, number.dtype)
    return ones


@triton.jit
def from_fp8(code, dtype, IS_PURE=True):
    """The numbers of bytes of FP8 (e4m3), exact in any type; by integers below 8.9, which has no such type.

    With its bits moved to those of float16, a number is 2**-8 of what it should be: the exponents begin 8 apart.

    IS_PURE: False if Triton may move nothing past the conversion
    """
    if COMPILED and cuda_capability_geq(8, 9):
        number = _by_ptx(code, dtype, _E4M3_TO_BFLOAT16_BY_HARDWARE, _E4M3_TO_FLOAT16_BY_HARDWARE, IS_PURE)
    elif COMPILED:
        number = _by_ptx(code, dtype, _E4M3_TO_BFLOAT16, _E4M3_TO_FLOAT16, IS_PURE)
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
    if COMPILED and cuda_capability_geq(8, 9):
        code = tl.inline_asm_elementwise(_TO_E4M3_BY_HARDWARE, "=r,f,f,f,f", [exact], tl.uint8, True, 4)
    else:
        size = tl.minimum(tl.abs(exact), 448.0)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # Beside 2**14, a float32 is rounded to multiples of 2**-9, as the smallest numbers of FP8 are.
        small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0.015625, small, normal) | ((exact.to(tl.int32, bitcast=True) >> 24) & 0x80)
        code = tl.where(exact != exact, 0x7F, code).to(tl.uint8)
    return code


@triton.jit
def quotient(x, divisor):
    """float32 x [...] / a number, to the nearest as by `div_rn`, which takes a reciprocal and a branch for each x.

    A quotient that is off by less than an ulp becomes the nearest one if what is left of x is multiplied by the nearest
    reciprocal and added (P. Markstein, https://doi.org/10.1147/rd.341.0111). That takes normal numbers: of an x below
    2**-100, the result may be off by an ulp.
    """
    reciprocal = tl.div_rn(1.0, divisor)
    first = x * reciprocal
    near = tl.fma(tl.fma(-first, divisor, x), reciprocal, first)
    near = tl.fma(tl.fma(-near, divisor, x), reciprocal, near)
    return tl.where(near == near, near, first)  # of an infinity nothing is left
