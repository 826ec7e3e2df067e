"""Patches Triton's interpreter, so that it runs our kernels in all versions, and quickly."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np


def prepare() -> None:
    """Applies all patches; does nothing if kernels are not interpreted."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        patch_loops()
        patch_language_once()


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
