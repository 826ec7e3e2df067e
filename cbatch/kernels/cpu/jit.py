"""How the kernels are compiled: for the processor that runs them, once, and kept in a cache beside the package."""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

import cbatch.kernels.cpu.instruction_sets  # noqa: F401  # before numba compiles anything
from cbatch import compat
from cbatch.compat import NO_REFERENCE_COUNTS, inner_compiler, is_compiled, keep_compiled, new_callback
from cbatch.kernels.cpu.emit import INT8, Value, emitted
from cbatch.runtime.numba_setup import why_not_trusted

_log = logging.getLogger("cbatch")

Function = TypeVar("Function", bound=Callable[..., Any])

OPTIONS = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"contract", "reassoc", "nsz", "arcp"},
    **NO_REFERENCE_COUNTS,
}
"""Sums are vectorized in an order of the compiler's choice, always the same; NaN and infinity stay what they are."""


_INNER_COMPILER = inner_compiler()


def kernel(function: Function) -> Function:
    """Compiles a function that only other kernels call. It holds no Python objects and allocates no arrays."""
    return cast(Function, njit(pipeline_class=_INNER_COMPILER, **OPTIONS)(function))


def inlined(function: Function) -> Function:
    """A kernel whose code becomes a part of its callers: others cannot return a part of an array."""
    return cast(Function, njit(inline="always", **OPTIONS)(function))


def shared(function: Function) -> Function:
    """A function that Python and kernels call."""
    return cast(Function, register_jitable(**OPTIONS)(function))


def entry(function: Function) -> Function:
    """A kernel that Python calls. It is compiled at its first call with arguments of new types, and kept on disk."""
    compiled = njit(**OPTIONS)(function)
    _keep(compiled, function)
    return cast(Function, compiled)


class Part(NamedTuple):
    """A function that is compiled by itself, to be called by its address; kept on disk like an entry.

    signature: of numba
    """

    function: Callable[..., Any]
    signature: Any


def is_kept(part: Part) -> bool:
    """Whether its code is on disk; also True if no code can be kept there."""
    return is_compiled(_callback(part))


@cache
def address_of(part: Part) -> int:
    compiled = _callback(part)
    compiled.compile()
    return int(compiled.address)


@cache
def _callback(part: Part) -> Any:
    """Not compiled yet. Its machine code lives as long as it does."""
    compiled = new_callback(part.function, part.signature, OPTIONS)
    _keep(compiled, part.function)
    return compiled


def _caller(result: Any, kind: Any) -> Any:
    """Makes a function that calls another by its address (see `address_of`). result: its type, and that of LLVM"""

    def call(context: Any, address: Any, arguments: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            function = ir.FunctionType(kind, [context.get_value_type(each) for each in arguments])
            found = builder.call(
                builder.inttoptr(args[0], function.as_pointer()), cgutils.unpack_tuple(builder, args[1])
            )
            return context.get_dummy_value() if result == types.void else found

        return result(address, arguments), generate

    return intrinsic(call)


call_address, call_loop = _caller(types.int64, ir.IntType(64)), _caller(types.void, ir.VoidType())
"""Of an address and a tuple of arguments, of exactly the types that it was compiled for: nothing here checks them (see
`ThreadPool.compile`)."""


@emitted(types.voidptr, types.int64)
def as_pointer(address: Value) -> Any:
    """An address as functions take it that were compiled for a record."""
    return address.pointer(INT8)


@intrinsic  # type: ignore[untyped-decorator]
def view_as(context: Any, memory: Any, like: Any) -> Any:
    """Flat bytes as numbers of the type of `like`, a number."""
    kind = types.Array(like, 1, "C")

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from numba.np.arrayobj import populate_array  # with much of numba, for which kernels on disk need not wait

        source = context.make_array(memory)(context, builder, args[0])
        found = context.make_array(kind)(context, builder)
        number = context.get_data_type(like)
        size = ir.Constant(ir.IntType(64), context.get_abi_sizeof(number))
        data = builder.bitcast(source.data, number.as_pointer())
        populate_array(found, data, [builder.sdiv(source.nitems, size)], [size], size, None, None)
        return found._getvalue()

    return kind(memory, like), generate


def _keep(compiled: Any, function: Callable[..., Any]) -> None:
    keep_compiled(
        compiled, function, _sources(Path(inspect.getfile(function))), why_not_trusted=_why_not_trusted,
        on_miss=_warn_of_compilation, on_error=lambda error: _warn_of_cache(str(error)),
    )  # fmt: skip


@cache
def _why_not_trusted(folder: Path) -> str | None:
    return why_not_trusted(folder, Path(__file__))


def _sources(own: Path) -> str:
    """A hash of all kernels, each of which consists of functions from several files, and of what compiles them.

    own: the file of a function, which need not stand among the kernels
    """
    return hashlib.blake2b(_kernels() + own.read_bytes(), digest_size=16).hexdigest()


@cache
def _kernels() -> bytes:
    """A hash of them."""
    folder = Path(__file__).parent
    files = [*sorted(folder.rglob("*.py")), folder.parent / "formats.py", Path(compat.__file__)]
    return hashlib.blake2b(b"".join(path.read_bytes() for path in files)).digest()


@cache
def _warn_of_compilation() -> None:
    _log.warning(
        "Compiling kernels for this processor. This takes up to half a minute, the first time a feature is used."
    )


@cache
def _warn_of_cache(reason: str) -> None:
    _log.warning("The compiled kernels are not kept and will be compiled again next time: %s", reason)
