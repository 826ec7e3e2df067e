"""Patches Triton's interpreter, so that it runs our kernels in all versions, and quickly."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np


def prepare() -> None:
    """Applies all patches; does nothing if kernels are not interpreted."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        patch_loops()
        patch_fma()
        patch_language_once()
        patch_types()
        patch_operations()


def patch_loops() -> None:
    """Lets kernels loop between bounds that they have loaded; does nothing if they can.

    Before 3.9 the interpreter made Python numbers of one-element arrays, as numpy no longer can.
    """
    try:
        int(np.zeros(1))
    except TypeError:
        from triton.runtime import interpreter
    else:
        return
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def patch_fma() -> None:
    """Rounds the results of `tl.fma` in float32 once, as a GPU does; does nothing if the interpreter does.

    Before 3.9 it rounds the product, too.
    """
    from triton.runtime import interpreter

    if hasattr(interpreter._interpreter, "fma_fp32"):
        return

    def fma(_builder: Any, x: Any, y: Any, z: Any) -> Any:
        exact = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = fma


def patch_language_once() -> None:
    """Leaves the functions of `triton.language` interpreted after the first launch.

    The interpreter replaces some two hundred of them before each launch and each call of a function within a kernel,
    which takes it a third of its time. A process that interprets kernels compiles none.
    """
    from triton.runtime import interpreter

    patch, scope = interpreter._patch_lang, interpreter._LangPatchScope
    if getattr(patch, "is_once", False):
        return
    patched: set[str] = set()
    seen: set[int] = set()

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) in seen:
            return scope()
        seen.add(id(function.__globals__))
        own = function.__globals__.values()
        used = [module for module in (interpreter.tl, interpreter.tl.core) if any(value is module for value in own)]
        if missing := {module.__name__: module for module in used if module.__name__ not in patched}:
            patch(SimpleNamespace(__globals__=missing))
            patched.update(missing)
        return scope()

    patch_once.is_once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_once


def patch_operations() -> None:
    """Decides once for each pair of types how an operation converts and broadcasts its operands.

    Numpy broadcasts the operands itself, so only their types say that it was done. And the interpreter adds and
    multiplies integers twice, to find overflows of which nobody hears unless kernels are debugged.
    """
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if hasattr(TritonSemantic, "known"):
        return
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    make_tensor = interpreter.tl.core.tensor
    check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    known: dict[object, tuple[Convert, Convert]] = {}

    def convert_operands(self: Any, left: Any, right: Any, *rules: Any, **named: Any) -> Any:
        key = _kind_of(left), _kind_of(right), rules, *named.items()
        found = known.get(key)
        if found is None:
            checked = check(self, left, right, *rules, **named)
            found = known[key] = _conversion(make_tensor, left, checked[0]), _conversion(make_tensor, right, checked[1])
        return found[0](self, left), found[1](self, right)

    def broadcast_unlike(self: Any, left: Any, right: Any) -> Any:
        dims = vars(left.type).get("dims")
        if dims is not None and dims == vars(right.type).get("dims"):
            return left, right
        return broadcast(self, left, right)

    TritonSemantic.known = known
    TritonSemantic.binary_op_type_checking_impl = convert_operands
    TritonSemantic.broadcast_impl_value = broadcast_unlike
    interpreter.TensorHandle.__post_init__ = lambda self: None


Convert = Callable[[Any, Any], Any]
"""Gives what an operand becomes, of a TritonSemantic and the operand."""


def _kind_of(operand: Any) -> object:
    """The key of an operand's conversion: the type of a tensor, or a number."""
    if isinstance(operand, float):
        return operand, math.copysign(1, operand)
    kind = getattr(operand, "type", None)
    if kind is None:
        return type(operand), operand
    fields = vars(kind)
    return fields["name"], fields.get("dims")


def _conversion(make_tensor: Any, operand: Any, converted: Any) -> Convert:
    """Repeats what made one tensor of another, or of a number."""
    kind, data = converted.type, converted.handle.data
    if not hasattr(operand, "type"):
        converted.handle.data = data.reshape(-1)[:1]
        return lambda semantic, operand: converted
    scalar = kind.scalar
    if scalar != operand.type.scalar:
        return lambda semantic, operand: make_tensor(semantic.cast(operand, scalar).handle, kind)
    if kind == operand.type:
        return lambda semantic, operand: operand
    return lambda semantic, operand: make_tensor(operand.handle, kind)


def patch_types() -> None:
    """Makes the type of a block once for each shape, and what a value takes from its type once for each type.

    The interpreter makes them anew for each result of each operation, which takes it half of its time.
    """
    from triton.runtime import interpreter

    core = interpreter.tl.core
    if hasattr(core.block_type, "known"):
        return
    make_block, make_tensor, numpy_type = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    compare, unwrap = core.tuple.__eq__, core._unwrap_if_constexpr
    known: dict[object, dict[str, Any]] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        dims = tuple([size if type(size) is int else getattr(size, "value", size) for size in shape])
        key = type(element_ty), element_ty.name, dims
        found = known.get(key)
        if found is None:
            make_block(self, element_ty, shape)
            found = known[key] = vars(self)
            found["dims"] = dims
        self.__dict__ = found

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        taken = vars(type).get("taken")
        if taken is None:
            make_tensor(self, handle, type)
            type.taken = {name: value for name, value in vars(self).items() if name != "handle"}
        else:
            vars(self).update(taken, handle=handle)

    def get_numpy_type(type: Any) -> Any:
        found = vars(type).get("numpy_type")
        if found is None:
            found = type.numpy_type = numpy_type(type)
        return found

    def are_equal(self: Any, other: Any) -> Any:
        return core.constexpr(True) if self is other else compare(self, other)

    def unwrapped(value: Any) -> Any:
        if type(value) is core.constexpr:
            return value.value
        return value if type(value) in (core.tensor, int, core.dtype) else unwrap(value)

    core.block_type.known = known
    core.tuple.__eq__, core._unwrap_if_constexpr = are_equal, unwrapped
    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor
    interpreter._get_np_dtype = get_numpy_type


@contextmanager
def placeless_products() -> Iterator[None]:
    """Products of tiles as matrix units give them: a row does not depend on its place in a tile.

    Those of numpy's library do. These take much longer. Does nothing if kernels are not interpreted.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, *settings: Any) -> Any:
        left, right = (part.data.astype(d.data.dtype) for part in (a, b))
        total = np.zeros_like(d.data)
        for depth in range(left.shape[1]):
            total += left[:, depth, None] * right[depth]
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    with patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot):
        yield
