"""Code of LLVM for what numba cannot say: values that compute by operators, and functions of them for kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import update_wrapper
from inspect import Parameter, Signature, signature
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""Numbers of 32 bits in a vector."""

LINE = 4 * LANES
"""Bytes of a vector, and of a line of the processor's cache."""

INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT = ir.FloatType()
FLOATS, WORDS, SHORTS = (ir.VectorType(kind, LANES) for kind in (FLOAT, INT32, INT16))


def _is_real(kind: Any) -> bool:
    return bool(getattr(kind, "element", kind) == FLOAT)


def _operator(operation: str) -> Callable[[Any, Any], Value]:
    return lambda self, other: self._with(operation, other)


class BFloat16(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no class for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat16)

    def __hash__(self) -> int:
        return hash(BFloat16)


class Value:
    """A number, a vector of numbers, or an address, which is an int64.

    Operators are those of its type; `//`, `%` and `>>` take integers without a sign, comparisons with one. What stands
    on the right may be a number of Python, which is a constant in all lanes then.
    """

    def __init__(self, builder: Any, of: Any) -> None:
        self.builder, self.of, self.type = builder, of, of.type

    def constant(self, number: Any, kind: Any = None) -> Value:
        """A constant of this type, or of another. number: one for all lanes, a list of one for each, or None for 0"""
        kind = self.type if kind is None else kind
        if isinstance(kind, ir.VectorType) and isinstance(number, int | float):
            number = [number] * kind.count
        if _is_real(kind) and number is not None:
            number = np.float32(number).tolist()
        return Value(self.builder, ir.Constant(kind, number))

    def _with(self, operation: str, *others: Any) -> Value:
        raw = [self._like(other).of for other in others]
        is_real = operation in ("add", "sub", "mul") and _is_real(self.type)
        return Value(self.builder, getattr(self.builder, "f" * is_real + operation)(self.of, *raw))

    def _like(self, other: Any) -> Value:
        return other if isinstance(other, Value) else self.constant(other)

    __add__, __sub__, __mul__ = _operator("add"), _operator("sub"), _operator("mul")
    __truediv__, __floordiv__, __mod__ = _operator("fdiv"), _operator("udiv"), _operator("urem")
    __and__, __or__, __xor__ = _operator("and_"), _operator("or_"), _operator("xor")
    __lshift__, __rshift__ = _operator("shl"), _operator("lshr")

    def ashr(self, count: int) -> Value:
        """Shifted right, with the sign."""
        return self._with("ashr", count)

    def __neg__(self) -> Value:
        return self._with("fneg")

    def is_(self, comparison: str, other: Any) -> Value:
        """Such as is_("<", 3), lane by lane; of floats false if one is NaN."""
        compare = self.builder.fcmp_ordered if _is_real(self.type) else self.builder.icmp_signed
        return Value(self.builder, compare(comparison, self.of, self._like(other).of))

    def choose(self, one: Value, other: Any) -> Value:
        """One where this is true, else the other."""
        return Value(self.builder, self.builder.select(self.of, one.of, one._like(other).of))

    def to(self, operation: str, kind: Any) -> Value:
        """In another type, by `zext`, `sext`, `trunc`, `sitofp`, `fptosi`, `fpext` or `fptrunc`."""
        return Value(self.builder, getattr(self.builder, operation)(self.of, kind))

    def bits(self, kind: Any) -> Value:
        """The same bits in another type."""
        return Value(self.builder, self.builder.bitcast(self.of, kind))

    def broadcast(self) -> Value:
        """A number in all lanes."""
        vector = ir.VectorType(self.type, LANES)
        first = self.builder.insert_element(ir.Constant(vector, ir.Undefined), self.of, INT32(0))
        return Value(self.builder, first).shuffle([0] * LANES)

    def lane(self, number: int) -> Value:
        return Value(self.builder, self.builder.extract_element(self.of, INT32(number)))

    def shuffle(self, places: Any, other: Value | None = None) -> Value:
        """The lanes at these places, of this vector and another one behind it."""
        mask = ir.Constant(ir.VectorType(INT32, len(places)), list(places))
        return Value(self.builder, self.builder.shuffle_vector(self.of, (other or self).of, mask))

    def call(self, name: str, *others: Any, result: Any = None) -> Value:
        """Calls an intrinsic of LLVM with this value first; its result has the same type if no other is given."""
        raw = [self.of, *(other.of if isinstance(other, Value) else other for other in others)]
        return call_intrinsic(self.builder, name, result or self.type, *raw)

    def fma(self, other: Value, total: Value) -> Value:
        """This times the other plus the total, rounded once."""
        return self.call("fma.f32" if self.type == FLOAT else f"fma.v{LANES}f32", other, total)

    def hidden(self) -> Value:
        """The same int64, which the compiler takes for another one: what it reads from there twice it reads twice."""
        kind = ir.FunctionType(INT64, [INT64])
        return Value(self.builder, self.builder.asm(kind, "", "=r,0", [self.of], side_effect=False))

    def pointer(self, kind: Any) -> Any:
        """Of LLVM, to what an address holds."""
        return self.builder.inttoptr(self.of, kind.as_pointer())

    def read(self, kind: Any, align: int = 1) -> Value:
        """The value that an address holds."""
        return Value(self.builder, self.builder.load(self.pointer(kind), align=align))

    def write(self, value: Value, align: int = 1) -> None:
        self.builder.store(value.of, self.pointer(value.type), align=align)


def call_intrinsic(builder: Any, name: str, result: Any, *arguments: Any) -> Value:
    """Calls an intrinsic of LLVM, given the type of its result."""
    kind = ir.FunctionType(result, [each.type for each in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}")
    return Value(builder, builder.call(function, arguments))


def load_floats(address: Value, index: int, element: Any) -> Value:
    """Vector number `index` of float32, also of bfloat16."""
    if element != types.uint16:
        return (address + index * LANES * 4).read(FLOATS)
    return ((address + index * LANES * 2).read(SHORTS).to("zext", WORDS) << 16).bits(FLOATS)


def by_parts(lanes: int, operation: Callable[..., Value], *vectors: Value) -> Value:
    """An operation on vectors, called for each part of so many words of 32 bits; the results side by side."""
    count = LANES // lanes
    if count == 1:
        return operation(*vectors)
    found = []
    for number in range(count):
        places = [range(number * each.type.count // count, (number + 1) * each.type.count // count) for each in vectors]
        found.append(operation(*(each.shuffle(part) for each, part in zip(vectors, places, strict=True))))
    while len(found) > 1:
        pairs = zip(found[::2], found[1::2], strict=True)
        found = [one.shuffle(range(2 * one.type.count), other) for one, other in pairs]
    return found[0]


def interleave(one: Value, other: Value) -> list[Value]:
    """The lanes of two vectors by turns, in two vectors."""
    count = one.type.count
    places = [lane // 2 + lane % 2 * count for lane in range(2 * count)]
    return [one.shuffle(part, other) for part in (places[:count], places[count:])]


def deinterleave(one: Value, other: Value) -> list[Value]:
    """The vectors that `interleave` made these two of."""
    return [one.shuffle(range(first, 2 * one.type.count, 2), other) for first in (0, 1)]


class Variable:
    """A place that may change, which becomes a register."""

    _align: int | None = None

    def __init__(self, value: Value) -> None:
        self._builder = value.builder
        self.place = cgutils.alloca_once_value(self._builder, value.of)

    @property
    def value(self) -> Value:
        return Value(self._builder, self._builder.load(self.place, align=self._align))

    @value.setter
    def value(self, value: Value) -> None:
        self._builder.store(value.of, self.place, align=self._align)

    @property
    def address(self) -> Value:
        return Value(self._builder, self._builder.ptrtoint(self.place, INT64))


class Place(Variable):
    """A vector of float32 that stays in memory, at an address."""

    _align = 4

    def __init__(self, address: Value) -> None:
        self._builder, self.place = address.builder, address.pointer(FLOATS)


@contextmanager
def for_range(count: Value) -> Iterator[Value]:
    """A loop over 0 to count - 1."""
    with cgutils.for_range(count.builder, count.of) as loop:
        yield Value(count.builder, loop.index)


def if_then(condition: Value, **options: Any) -> Any:
    return condition.builder.if_then(condition.of, **options)


def switch(number: Value, cases: Mapping[int, Callable[[], None]]) -> None:
    """The code for a number, once for all numbers that have the same; none for others."""
    builder = number.builder
    end = builder.append_basic_block("end")
    blocks = {case: builder.append_basic_block() for case in dict.fromkeys(cases.values())}
    chosen = builder.switch(number.of, end)
    for value, case in cases.items():
        chosen.add_case(INT64(value), blocks[case])
    for case, block in blocks.items():
        with builder.goto_block(block):
            case()
            builder.branch(end)
    builder.position_at_end(end)


LIKE, PARTS, LITERAL = "like", "parts", "literal"
"""Of an argument of `emitted` that may have several types: what its function gets of it in place of a value, which is
the type; the values of a tuple, or None for None; or the number that it is at compile time."""


def emitted(result: Any, *kinds: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function that emits code, given the values of arguments, one that kernels call.

    kinds: the types of the arguments, or LIKE, PARTS or LITERAL
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def definition(context: Any, *given: Any) -> Any:
            pairs = list(zip(kinds, given, strict=True))
            if any(kind == LITERAL and not isinstance(one, types.Literal) for kind, one in pairs):
                return None

            def generate(context: Any, builder: Any, given: Any, values: Any) -> Any:
                passed: list[Any] = []
                for (kind, one), value in zip(pairs, values, strict=True):
                    if kind == PARTS:
                        parts = () if one == types.none else cgutils.unpack_tuple(builder, value)
                        passed.append([Value(builder, part) for part in parts] or None)
                    elif kind in (LIKE, LITERAL):
                        passed.append(one if kind == LIKE else one.literal_value)
                    else:
                        passed.append(Value(builder, value))
                found = emit(*passed)
                return context.get_dummy_value() if found is None else getattr(found, "of", found)

            return result(*(one if kind in (LIKE, PARTS, LITERAL) else kind for kind, one in pairs)), generate

        update_wrapper(definition, emit)
        context, parameters = Parameter("context", Parameter.POSITIONAL_OR_KEYWORD), signature(emit).parameters
        definition.__signature__ = Signature([context, *parameters.values()])  # type: ignore[attr-defined]
        return intrinsic(prefer_literal=LITERAL in kinds)(definition)

    return decorate
