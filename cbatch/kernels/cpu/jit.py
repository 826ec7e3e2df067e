"""How the kernels are compiled: for the processor that runs them, once, and kept in a cache beside the package."""

from __future__ import annotations

import gc
import hashlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from threading import Lock, Timer
from typing import Any, NamedTuple, TypeVar, cast

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel.models import OpaqueModel
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, intrinsic, lower_getattr_generic, overload, register_jitable, register_model

import cbatch.kernels.cpu.instruction_sets  # noqa: F401  # before numba compiles anything
from cbatch import compat
from cbatch.kernels.cpu.emit import INT8, INT64, PARTS, Value, emitted
from cbatch.runtime.numba_setup import why_not_trusted

_log = logging.getLogger("cbatch")

Function = TypeVar("Function", bound=Callable[..., Any])

OPTIONS = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"contract", "reassoc", "nsz", "arcp"},
    **compat.NO_REFERENCE_COUNTS,
}
"""Sums are vectorized in an order of the compiler's choice, always the same; NaN and infinity stay what they are."""

_OUTER, _INNER = ({"pipeline_class": each, **OPTIONS} for each in compat.compilers())

SLOW_SECONDS = 2.0
"""Compiling is told to people if it takes longer."""


def kernel(function: Function) -> Function:
    """Compiles a function that only other kernels call. It holds no Python objects and allocates no arrays."""
    return cast(Function, compat.compiled_once(njit(**_INNER)(function)))


def inlined(function: Function) -> Function:
    """A kernel whose code becomes a part of its callers, whatever its size."""
    return cast(Function, compat.compiled_once(njit(forceinline=True, **_INNER)(function)))


def shared(function: Function) -> Function:
    """A function that Python and kernels call."""
    return cast(Function, register_jitable(**_INNER)(function))


def by_types(choose: Function) -> Function:
    """A kernel that is, for arguments of some types, the function that this one chooses for them."""

    @wraps(choose)
    def stub(*args: Any) -> Any:
        raise TypeError("Only kernels can call this.")

    overload(stub, jit_options=_INNER, strict=False)(choose)
    return cast(Function, stub)


def entry(function: Function) -> Function:
    """A kernel that Python calls. It is compiled at its first call with arguments of new types, and kept on disk."""
    compiled = _kept(function)
    compile = compiled.compile

    def compile_and_say(signature: Any) -> Any:
        with compiling():
            return compile(signature)

    compiled.compile = compile_and_say
    return cast(Function, compiled)


class Part(NamedTuple):
    """A function that is compiled by itself, to be called by its address; or an entry. It is kept on disk.

    signature: of numba; of an entry its arguments
    """

    function: Callable[..., Any]
    signature: Any


def is_kept(part: Part) -> bool:
    """Whether its code is on disk; also True if no code can be kept there."""
    return compat.is_compiled(_dispatcher(part), part.signature)


def is_known(function: Any) -> bool:
    """Whether code of an entry is on disk for any types; also True if none can be kept there."""
    return compat.is_compiled(function, None)


def compile_free(parts: Iterable[Part]) -> None:
    """Compiles those parts that are not kept, and that no other process compiles."""
    for part in parts:
        if not is_kept(part) and not compat.is_being_compiled(_dispatcher(part)):
            _dispatcher(part).compile(part.signature)


@cache
def address_of(part: Part) -> int:
    return compat.compiled_address(_dispatcher(part), part.signature)


def loop_address(loop: Any, count: int) -> int:
    """The address of a function of a tuple of so many int64 that returns nothing.

    It is compiled by itself: as a part of each kernel that calls it, it would be compiled that often.
    """
    return address_of(Part(loop, types.void(types.UniTuple(types.int64, count))))


@contextmanager
def compiling() -> Iterator[None]:
    """Says so if the block takes long. Meanwhile nothing collects garbage, which would take a quarter of the time."""
    timer = Timer(SLOW_SECONDS, _warn_of_compilation)
    timer.daemon = True
    timer.start()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        timer.cancel()
        if collects:
            gc.enable()


@cache
def code_size(function: Callable[..., Any]) -> int:
    """Bytes of the code of a function and of the kernels that it calls, to which the time to compile it is about
    proportional.
    """
    whole: Any = function
    code = whole.__code__
    called = (whole.__globals__.get(name) for name in code.co_names)
    return len(code.co_code) + sum(code_size(each.py_func) for each in called if hasattr(each, "py_func"))


@cache
def _dispatcher(part: Part) -> Any:
    """Its machine code lives as long as it does."""
    function = part.function
    return function if hasattr(function, "py_func") else _kept(function, no_cpython_wrapper=True)


@emitted(types.void, types.int64, PARTS)
def call_loop(address: Value, numbers: Any) -> None:
    """Calls a loop by its address (see `loop_address`). numbers: int64, and tuples of them"""
    builder, flat = address.builder, list[Any]()
    for each in numbers:
        flat += cgutils.unpack_tuple(builder, each.of) if isinstance(each.type, ir.Aggregate) else [each.of]
    function = ir.FunctionType(ir.VoidType(), [ir.ArrayType(INT64, len(flat))])
    builder.call(address.pointer(function), [cgutils.pack_array(builder, flat)])


@intrinsic  # type: ignore[untyped-decorator]
def call_address(context: Any, address: Any, arguments: Any) -> Any:
    """Calls a function that returns int64 by its address (see `address_of`).

    arguments: a tuple, of exactly the types that it was compiled for: nothing here checks them (see
               `ThreadPool.compile`)
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(INT64, [context.get_value_type(each) for each in arguments])
        pointer = builder.inttoptr(args[0], function.as_pointer())
        return builder.call(pointer, cgutils.unpack_tuple(builder, args[1]))

    return types.int64(address, arguments), generate


@emitted(types.voidptr, types.int64)
def as_pointer(address: Value) -> Any:
    """An address as functions take it that were compiled for a record."""
    return address.pointer(INT8)


class Reference(types.Type):  # type: ignore[misc]
    """The address of a named tuple, of which a function reads the fields that it needs.

    A field that consists of named tuples is a reference again. As arguments, all the numbers of a step's arrays take
    longer to compile than many an instruction.
    """

    def __init__(self, target: Any) -> None:
        super().__init__(f"reference({target})")
        self.target = target

    def field(self, name: str) -> tuple[int, Any, bool]:
        """Its place, its type, and whether it is a reference."""
        place = self.target.fields.index(name)
        found = self.target.types[place]
        is_nested = isinstance(found, types.NamedTuple) and all(isinstance(of, types.NamedTuple) for of in found.types)
        return place, Reference(found) if is_nested else found, is_nested


register_model(Reference)(OpaqueModel)


@infer_getattr
class _Fields(AttributeTemplate):  # type: ignore[misc]
    key = Reference

    def generic_resolve(self, reference: Reference, name: str) -> Any:
        return reference.field(name)[1] if name in reference.target.fields else None


@lower_getattr_generic(Reference)  # type: ignore[untyped-decorator]
def _field(context: Any, builder: Any, reference: Reference, address: Any, name: str) -> Any:
    place, kind, is_nested = reference.field(name)
    whole = builder.bitcast(address, context.get_data_type(reference.target).as_pointer())
    found = cgutils.gep_inbounds(builder, whole, 0, place)
    if is_nested:
        return builder.bitcast(found, cgutils.voidptr_t)
    return context.data_model_manager[kind].load_from_data_pointer(builder, found)


@intrinsic  # type: ignore[untyped-decorator]
def reference_to(context: Any, target: Any) -> Any:
    """To a named tuple, for as long as the function runs that asks for it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.data_model_manager[target].as_data(builder, args[0])
        return builder.bitcast(cgutils.alloca_once_value(builder, data), cgutils.voidptr_t)

    return Reference(target)(target), generate


@intrinsic  # type: ignore[untyped-decorator]
def view_as(context: Any, memory: Any, like: Any) -> Any:
    """The bytes of numbers that lie one after the other as numbers of the type of `like`. The last dimension changes.

    `view` does that, too, but its checks take long to compile.
    """
    kind = types.Array(like, memory.ndim, "C")

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = context.make_array(memory)(context, builder, args[0])
        *shape, last = cgutils.unpack_tuple(builder, source.shape)
        before, after = (
            ir.Constant(ir.IntType(64), context.get_abi_sizeof(context.get_data_type(number)))
            for number in (memory.dtype, like)
        )
        return _view(context, builder, kind, source, [*shape, builder.sdiv(builder.mul(last, before), after)])

    return kind(memory, like), generate


@intrinsic  # type: ignore[untyped-decorator]
def as_rows(context: Any, numbers: Any, rows: Any, columns: Any) -> Any:
    """Numbers that lie one after the other as [rows, columns]. For `reshape`, see `view_as`."""
    kind = types.Array(numbers.dtype, 2, "C")

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = context.make_array(numbers)(context, builder, args[0])
        return _view(context, builder, kind, source, args[1:])

    return kind(numbers, types.int64, types.int64), generate


def _view(context: Any, builder: Any, kind: Any, source: Any, shape: Sequence[Any]) -> Any:
    """The memory of one array as another."""
    from numba.np.arrayobj import np_cfarray  # with much of numba, for which kernels on disk need not wait

    signature = kind(types.voidptr, types.UniTuple(types.intp, len(shape)))
    return np_cfarray(context, builder, signature, (source.data, cgutils.pack_array(builder, shape)))


def _kept(function: Callable[..., Any], **options: Any) -> Any:
    """A dispatcher, not compiled yet, whose code is kept on disk."""
    compiled = njit(**_OUTER, **options)(function)
    compat.keep_compiled(
        compiled, function, _sources(Path(inspect.getfile(function))), why_not_trusted=_why_not_trusted,
        on_error=lambda error: _warn_of_cache(str(error)),
    )  # fmt: skip
    return compiled


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
    others = folder.parent / "formats.py", folder.parents[1] / "runtime" / "kv_cache.py", Path(compat.__file__)
    files = [*sorted(folder.rglob("*.py")), *others]
    return hashlib.blake2b(b"".join(path.read_bytes() for path in files)).digest()


_is_told = Lock()
"""Taken for ever by the thread that says that kernels are compiled; several may compile at once."""


def _warn_of_compilation() -> None:
    if _is_told.acquire(blocking=False):
        _log.warning("Compiling kernels for this processor. This takes some seconds, the first time a feature is used.")


@cache
def _warn_of_cache(reason: str) -> None:
    _log.warning("The compiled kernels are not kept and will be compiled again next time: %s", reason)
