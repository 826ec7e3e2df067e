"""Patches Triton's interpreter, so that it runs our kernels in all versions, and quickly."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np


def prepare() -> None:
    """Applies all patches; does nothing if kernels are not interpreted."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        patch_loops()
        patch_language_once()
        patch_types()


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

    def patch_once(function: Any) -> Any:
        own = function.__globals__.values()
        used = [module for module in (interpreter.tl, interpreter.tl.core) if any(value is module for value in own)]
        if missing := {module.__name__: module for module in used if module.__name__ not in patched}:
            patch(SimpleNamespace(__globals__=missing))
            patched.update(missing)
        return scope()

    patch_once.is_once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_once


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
        key = type(element_ty), element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in known:
            make_block(self, element_ty, shape)
            known[key] = vars(self)
        self.__dict__ = known[key]

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
