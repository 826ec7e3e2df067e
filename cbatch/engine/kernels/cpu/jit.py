"""How the kernels are compiled: for this very processor, once, and kept in a cache beside the package."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding as llvm
from numba import njit, typeof
from numba.core import sigutils
from numba.core.caching import FunctionCache, NullCache
from numba.core.ccallback import CFunc

_log = logging.getLogger("cbatch")

Function = TypeVar("Function", bound=Callable[..., Any])

FEATURES = frozenset(name for name, there in llvm.get_host_cpu_features().items() if there)
HAS_AVX512 = "avx512f" in FEATURES
HAS_BFLOAT16 = "avx512bf16" in FEATURES
"""Whether the processor multiplies pairs of bfloat16 into float32."""
HAS_INT16 = "avx512vnni" in FEATURES
"""Whether it multiplies pairs of int16 and adds them to an int32, in one instruction."""

IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


class _Cache(FunctionCache):  # type: ignore[misc]
    """Numba's cache asks whether a function's own file has changed; a kernel consists of all of these files."""

    def _index_key(self, *args: Any) -> tuple[Any, ...]:
        return (*super()._index_key(*args), _sources())

    def load_overload(self, signature: Any, *args: Any) -> Any:
        found = None
        try:
            found = super().load_overload(signature, *args)
        except Exception:  # a file that was cut off: nothing could be saved beside it either
            with suppress(OSError):
                self.flush()
        # Two processes that save at the same moment may write code under each other's names.
        if found is not None and tuple(found.signature.args) != tuple(getattr(signature, "args", signature)):
            found = None
        if found is None:
            _say_so()
        return found

    def save_overload(self, *args: Any) -> None:
        try:
            super().save_overload(*args)
        except Exception as error:
            _log.warning("The compiled kernels cannot be kept, and will be compiled again next time: %s", error)


def _cache_of(function: Callable[..., Any]) -> Any:
    """The function's cache; none where no folder can be written."""
    try:
        return _Cache(function)
    except RuntimeError:
        return NullCache()


@cache
def _say_so() -> None:
    _log.warning("Compiling kernels for this processor. This takes some ten seconds, the first time only.")


@cache
def _sources() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.blake2b(b"".join(path.read_bytes() for path in files), digest_size=16).hexdigest()


_OPTIONS = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"contract", "reassoc", "nsz", "arcp"},
    "_nrt": False,
}
"""Sums may be taken in the order that suits the vector unit, always the same one; numbers that are none stay so.

Without `_nrt` nobody counts who uses an array: threads would fight over the counters.
"""


def kernel(function: Function) -> Function:
    """Compiles a function that other kernels call. It holds no Python objects and makes no arrays."""
    return cast(Function, njit(**_OPTIONS)(function))


def entry(function: Function) -> Function:
    """A kernel that Python calls. It is compiled when it is first called with arguments of its kinds, and kept."""
    compiled: Any = kernel(function)
    compiled._cache = _cache_of(function)
    return cast(Function, compiled)


def compile_for(function: Callable[..., Any], *arguments: Any) -> None:
    """Makes an entry ready to be called with arguments of these kinds, without calling it."""
    compiled: Any = function
    compiled.compile(tuple(typeof(argument) for argument in arguments))


def address_of(function: Callable[..., None], signature: Any) -> int:
    """Compiles a function for a signature, by itself, to be called by its address; kept like an entry."""
    arguments, result = sigutils.normalize_signature(signature)
    compiled: Any = CFunc(function, (arguments, result), locals={}, options={"nopython": True, "_nrt": False})
    compiled._cache = _cache_of(function)
    compiled.compile()
    _kept.append(compiled)
    return int(compiled.address)


_kept: list[CFunc] = []
"""Code lives as long as the object that compiled it."""
