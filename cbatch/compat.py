"""Everything that uses private names of other packages, each with a test in tests/engine/test_compat.py.

A library is imported only by the function that needs it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

NO_REFERENCE_COUNTS = {"_nrt": False}
"""An option of numba's compilers, private as of 0.68: kernels do not count references to arrays.

Without it the threads of a step compete for the counters of the arrays that they share.
"""


class Compilers(NamedTuple):
    """Pipelines of numba: for functions that are called by Python or by their address, and for those inside of them."""

    outer: Any
    inner: Any


@cache
def compilers() -> Compilers:
    """Pipelines that optimize a function once, together with all that it calls, and make machine code of the whole.

    numba does so for each function by itself, and again for whoever calls it. It checks itself after each pass, and has
    passes for closures, whole arrays and reference counts, which kernels do not have. Without all that, they compile in
    half the time. What an inner function returns may be a part of an array, because nobody frees it. Python cannot
    call it.

    Private as of numba 0.68: the passes, `_ENFORCING`, `_LowerResult`, the flags, `JITCodeLibrary` with what it
    optimizes, links and finalizes, and that a builtin function is what a caller finds the compiled one by.
    """
    from numba.core.codegen import JITCodeLibrary
    from numba.core.compiler import CompilerBase, DefaultPassBuilder, _LowerResult
    from numba.core.compiler_machinery import register_pass
    from numba.core.typed_passes import InlineOverloads, NativeLowering, NopythonRewrites, NopythonTypeInference
    from numba.core.untyped_passes import (
        InlineClosureLikes,
        InlineInlinables,
        LiteralPropagationSubPipelinePass,
        WithLifting,
    )

    unneeded = {
        InlineClosureLikes, InlineInlinables, InlineOverloads, LiteralPropagationSubPipelinePass, NopythonRewrites,
        WithLifting,
    }  # fmt: skip

    class Library(JITCodeLibrary):  # type: ignore[misc]
        def _optimize_functions(self, module: Any) -> None:
            module.data_layout = self._codegen._data_layout

    class InnerLibrary(Library):
        def finalize(self) -> None:
            self._finalize_dynamic_globals()
            self._finalized = True

    class OuterLibrary(Library):
        def finalize(self) -> None:
            linked = self._linking_libraries
            for library in linked:  # which grows meanwhile
                if isinstance(library, InnerLibrary):
                    linked += [each for each in library._linking_libraries if each not in linked]
            super().finalize()

        def _optimize_final_module(self) -> None:
            passes, builder = self._codegen._module_pass_manager()
            passes.run(self._final_module, builder)

    @register_pass(mutates_CFG=True, analysis_only=False)
    class OuterLowering(NativeLowering):  # type: ignore[misc]
        _name = "outer_lowering"

        def run_pass(self, state: Any) -> bool:
            state.library = OuterLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
            state.library.enable_object_caching()
            return bool(super().run_pass(state))

    @register_pass(mutates_CFG=True, analysis_only=False)
    class InnerLowering(NativeLowering):  # type: ignore[misc]
        _name = "inner_lowering"

        def run_pass(self, state: Any) -> bool:
            flags = state.flags
            flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
            state.library = InnerLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
            super().run_pass(state)
            found, nothing = state["cr"], list[Any]()
            key = nothing.append
            state.targetctx.insert_user_function(key, found.fndesc, [state.library])
            state["cr"] = _LowerResult(found.fndesc, found.call_helper, cfunc=key, env=found.env)
            return True

    @register_pass(mutates_CFG=True, analysis_only=False)
    class InnerTypes(NopythonTypeInference):  # type: ignore[misc]
        _name = "inner_types"

        def run_pass(self, state: Any) -> bool:
            context = state.targetctx
            state.targetctx = context.subtarget(enable_nrt=True)
            try:
                return bool(super().run_pass(state))
            finally:
                state.targetctx = context

    def pipeline(instead: dict[Any, Any]) -> Any:
        class Compiler(CompilerBase):  # type: ignore[misc]
            def define_pipelines(self) -> list[Any]:
                pipeline = DefaultPassBuilder.define_nopython_pipeline(self.state)
                pipeline.passes = [
                    (instead.get(step, step), text) for step, text in pipeline.passes if step not in unneeded
                ]
                pipeline._ENFORCING = False
                pipeline.finalize()
                return [pipeline]

        return Compiler

    inner = {NativeLowering: InnerLowering, NopythonTypeInference: InnerTypes}
    return Compilers(pipeline({NativeLowering: OuterLowering}), pipeline(inner))


def compiled_once(dispatcher: Any) -> Any:
    """Has a numba function compiled once for all integers that its callers write down. numba does it for each of them.

    Private as of numba 0.68: `get_call_template` of dispatchers.
    """
    from numba import types

    found = dispatcher.get_call_template

    def get_call_template(args: Any, kws: Any) -> Any:
        return found(tuple(map(types.unliteral, args)), {name: types.unliteral(kind) for name, kind in kws.items()})

    dispatcher.get_call_template = get_call_template
    return dispatcher


def keep_compiled(
    compiled: Any,
    function: Callable[..., Any],
    version: str,
    *,
    on_error: Callable[[Exception], None],
    why_not_trusted: Callable[[Path], str | None] = lambda folder: None,
) -> None:
    """Keeps the machine code of a numba dispatcher on disk, as `cache=True` does, with some differences.

    Code of another `version` is not used; numba only asks whether the function's own file has changed, but a kernel
    inlines functions of many files. A damaged file, or code that another process saved under the same name, counts as
    missing. While one process compiles a function, others wait for its code. Errors while saving go to `on_error`. Only
    what a call needs is kept, see `_machine_code`. If no folder can be written, nothing is kept. Nothing is read from a
    folder that is not trusted either, as `why_not_trusted` says: numba would run it.

    Private as of numba 0.68: `_index_key`, `_cache_path`, `_py_func`, `_load_overload` and `_impl_class` of
    `FunctionCache`, and the attribute `_cache` of dispatchers.
    """
    from numba.core.caching import NullCache

    compiled._cache = NullCache()
    try:
        kept = _code_cache()(function, version, on_error)
        if (reason := why_not_trusted(Path(kept._cache_path))) is not None:
            on_error(PermissionError(reason))
        else:
            compiled._cache = kept
    except RuntimeError:  # of numba, if no folder can be written
        pass
    except OSError as error:
        on_error(error)


@cache
def _code_cache() -> Any:
    from numba.core.caching import FunctionCache

    class CodeCache(FunctionCache):  # type: ignore[misc]
        _impl_class = _machine_code()

        def __init__(self, function: Callable[..., Any], version: str, on_error: Any) -> None:
            super().__init__(function)
            self.version, self.on_error = version, on_error
            self.lock: int | None = -1
            self.lock_path = f"{self._cache_path}/{self._py_func.__qualname__}.lock"

        def _index_key(self, *args: Any) -> tuple[Any, ...]:
            return (*super()._index_key(*args), self.version)

        def load_overload(self, signature: Any, context: Any) -> Any:
            self.release()  # what was to be compiled before could not be
            found = self.load(signature, context)
            if found is None:
                self.lock = _locked(self.lock_path)
                found = self.load(signature, context)
                if found is not None:
                    self.release()
            return found

        def load(self, signature: Any, context: Any) -> Any:
            """As numba's `load_overload`, which sets up the whole compiler."""
            found = None
            try:
                found = self._load_overload(signature, context)
            except Exception:  # a truncated file: nothing could be saved beside it either
                with suppress(OSError):
                    self.flush()
            # Two processes that save at the same moment may write code under each other's names.
            if found is not None and tuple(found.signature.args) != tuple(getattr(signature, "args", signature)):
                found = None
            return found

        def save_overload(self, *args: Any) -> None:
            try:
                super().save_overload(*args)
            except Exception as error:
                self.on_error(error)
            finally:
                self.release()

        def release(self) -> None:
            if self.lock is not None and self.lock >= 0:
                os.close(self.lock)
            self.lock = -1

    return CodeCache


@cache
def _machine_code() -> Any:
    """How a compiled function is kept: its machine code and types, without what only a compiler would use.

    Beside those, numba keeps intermediate code, which other functions may be compiled with, and names the modules of
    all functions that are a part of this one, among them half of numba. Reading both took four fifths of the time of
    loading a kernel.

    So a function that was read from disk can be called by Python, or by its address, but not be a part of another.
    Private as of numba 0.68: `CompileResultCacheImpl`, what its `reduce` gives, and names in function descriptors.
    """
    from llvmlite.binding import parse_assembly
    from numba.core.caching import CompileResultCacheImpl

    class MachineCode(CompileResultCacheImpl):  # type: ignore[misc]
        def reduce(self, result: Any) -> Any:
            (library, kind, (code, _)), function, *others, _, initializers, environments = super().reduce(result)
            names = function.llvm_func_name, function.llvm_cpython_wrapper_name, function.llvm_cfunc_wrapper_name
            defined = "\n".join(f'define void @"{name}"() {{ ret void }}' for name in names)
            kept = library, kind, (code, parse_assembly(defined).as_bitcode())
            return kept, function, *others, "", initializers, [each for each in environments if each.consts]

    return MachineCode


def is_compiled(compiled: Any, signature: Any) -> bool:
    """Whether `keep_compiled` has the code of a dispatcher; True also if it cannot keep any.

    signature: None for any

    Private as of numba 0.68: `_cache_file` of `FunctionCache` and its index.
    """
    from numba.core.registry import cpu_target

    stored = getattr(compiled._cache, "_cache_file", None)
    if stored is None:
        return True
    key = compiled._cache._index_key(signature, cpu_target.target_context.codegen())
    with suppress(Exception):  # a damaged index, or one that is written before the code is
        index = stored._load_index()
        if signature is None:
            return any(kept[1:] == key[1:] for kept in index)
        return os.access(stored._data_path(index[key]), os.R_OK)
    return False


def is_being_compiled(compiled: Any) -> bool:
    """Whether a process compiles this function, for any types, so that others would wait."""
    lock = _locked(compiled._cache.lock_path, wait_s=0)
    if lock is not None and lock >= 0:
        os.close(lock)
    return lock is None


_LONGEST_WAIT_S = 180.0
"""For another process that compiles the same function."""


def _locked(path: str, wait_s: float = _LONGEST_WAIT_S) -> int | None:
    """A file that is locked; -1 if there can be no lock, None if another process has had it for so long."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return -1
    end = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() < end:
                time.sleep(0.05)
                continue
            os.close(file)
            return None
        except OSError:  # some file systems have no locks
            os.close(file)
            return -1


def compiled_address(compiled: Any, signature: Any) -> int:
    """The address of a dispatcher's code for a signature, which is called with numbers, not with objects of Python.

    Private as of numba 0.68: the library of an overload, and the name of its wrapper in function descriptors.
    """
    compiled.compile(signature)
    overload = compiled.overloads[signature.args]
    return int(overload.library.get_pointer_to_function(overload.fndesc.llvm_cfunc_wrapper_name))
