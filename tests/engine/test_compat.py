"""Guards the private names of other packages that `compat` uses: each test fails when its name changes its meaning."""

from __future__ import annotations

import ctypes
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import njit, types

from cbatch.compat import NO_REFERENCE_COUNTS, compiled_address, compiled_once, compilers, keep_compiled


def add_up(numbers: Any, total: Any) -> None:
    for number in numbers:
        total[0] += number


def compile_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, why_not_trusted: Any = lambda folder: None
) -> tuple[list[str], Any]:
    """Compiles `add_up` as a new process would, with the code that is kept; returns what was reported."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    errors: list[str] = []
    compiled = njit(**NO_REFERENCE_COUNTS)(add_up)
    keep_compiled(compiled, add_up, version, why_not_trusted=why_not_trusted, on_error=lambda e: errors.append(str(e)))
    total = np.zeros(1)
    compiled(np.arange(5.0), total)
    assert total[0] == 10
    return ["miss"] * len(compiled.stats.cache_misses) + errors, compiled


def test_numba_keeps_code_by_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `FunctionCache._index_key` and `_cache`: code is found again, but not that of other sources."""
    assert compile_again(tmp_path, monkeypatch, "1")[0] == ["miss"]
    assert compile_again(tmp_path, monkeypatch, "1")[0] == []
    assert compile_again(tmp_path, monkeypatch, "2")[0] == ["miss"]


def test_numba_keeps_only_what_a_call_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the start: with intermediate code, and modules of numba that it named, kernels took ten times as long."""
    compile_again(tmp_path, monkeypatch, "1")
    (file,) = tmp_path.rglob("*.nbc")
    (_, _, (code, names)), *_, environments = pickle.loads(file.read_bytes())
    assert len(names) < len(code) and b"numba.np" not in file.read_bytes()
    assert not [each for each in environments if not each.consts]


def test_numba_compiles_if_the_code_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards machines without a folder to write to, and full disks: the kernels run all the same."""
    monkeypatch.setattr("numba.core.caching.FunctionCache.save_overload", lambda *_: 1 / 0)
    assert compile_again(tmp_path, monkeypatch, "1")[0] == ["miss", "division by zero"]
    monkeypatch.setattr("numba.core.caching.FunctionCache.__init__", lambda *_: (_ for _ in ()).throw(RuntimeError))
    assert compile_again(tmp_path, monkeypatch, "1")[0] == ["miss"]


def test_numba_reads_no_code_from_a_folder_that_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a user whose cache others can write to: what lies there is not run, and nothing is kept there."""
    compile_again(tmp_path, monkeypatch, "1")
    trace = tmp_path / "trace"

    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (trace,)

    (index,) = tmp_path.rglob("*.nbi")
    index.write_bytes(pickle.dumps(Evil()))
    reported, _ = compile_again(tmp_path, monkeypatch, "1", lambda folder: f"{folder.parent.name} is open")
    assert reported == ["miss", f"{tmp_path.name} is open"] and not trace.exists()
    assert compile_again(tmp_path, monkeypatch, "1")[0] == ["miss"] and trace.exists()  # so it would have been run


def do_nothing(one: int, other: int) -> None:
    pass


def test_numba_makes_code_that_is_called_by_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the wrapper for C of a dispatcher that Python cannot call: it is compiled, and found again on disk."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    options = {"pipeline_class": compilers().outer, "no_cpython_wrapper": True, **NO_REFERENCE_COUNTS}
    for hits in range(2):
        compiled = njit(**options)(do_nothing)
        keep_compiled(compiled, do_nothing, "1", on_error=lambda error: pytest.fail(str(error)))
        address = compiled_address(compiled, types.void(types.int64, types.int64))
        ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(address)(1, 2)
        assert sum(compiled.stats.cache_hits.values()) == hits


def test_numba_counts_no_references() -> None:
    """Guards the option `_nrt`, whose absence would only show as slow threads: the code has no calls of NRT."""

    def pick(one: Any, other: Any) -> Any:
        chosen = one
        for i in range(len(one)):
            chosen = other if one[i] > other[i] else one[i:]
        return chosen[0]

    def counts(**options: Any) -> bool:
        compiled = njit(**options)(pick)
        assert compiled(np.arange(3.0), np.arange(3.0)) == 2
        return any("NRT_incref" in code for code in compiled.inspect_llvm().values())

    assert counts() and not counts(**NO_REFERENCE_COUNTS)


def test_inner_functions_are_compiled_as_a_part_of_others() -> None:
    """Guards the time that kernels take to compile: what only others call has no machine code of its own."""
    inner = njit(pipeline_class=compilers().inner)(lambda x: 2 * x + 1)
    middle = njit(pipeline_class=compilers().inner)(lambda x: inner(inner(x)))
    outer = njit(pipeline_class=compilers().outer)(lambda x: middle(x) + inner(x))
    assert outer(3) == 15 + 7
    (overload,) = inner.overloads.values()
    assert overload.entry_point.__name__ == "append", "it was compiled by itself"
    engine = overload.library._codegen._engine
    assert not engine.is_symbol_defined(overload.fndesc.llvm_func_name), "its machine code is kept"


def test_inner_functions_return_parts_of_arrays() -> None:
    """Guards views of buffers: without reference counts, numba lets no function return a part of an array."""
    options = NO_REFERENCE_COUNTS | {"forceinline": True}
    part = njit(pipeline_class=compilers().inner, **options)(lambda numbers, first: numbers[first:])
    outer = njit(pipeline_class=compilers().outer, **NO_REFERENCE_COUNTS)(lambda numbers: part(numbers, 3)[0])
    assert outer(np.arange(5)) == 3
    (code,) = outer.inspect_llvm().values()
    assert "NRT_" not in code and "call i32 @_ZN" not in code.split("define")[1], "it is called"


def test_inner_functions_are_compiled_once_for_all_constants() -> None:
    """Guards the time that kernels take to compile: numba would compile the function for 2, for 3 and for any."""
    inner = compiled_once(njit(pipeline_class=compilers().inner)(lambda x, y: x * y))
    outer = njit(pipeline_class=compilers().outer)(lambda x: inner(x, 2) + inner(x, 3) + inner(x, x))
    assert outer(3) == 6 + 9 + 9 and len(inner.overloads) == 1


def test_one_process_compiles_and_others_wait(tmp_path: Path) -> None:
    """Guards the start of several replicas: each of them would compile the same kernels at the same time."""
    program = f"""
import numba
numba.core.config.CACHE_DIR = {str(tmp_path)!r}
from tests.engine import test_compat
compiled = numba.njit(**test_compat.NO_REFERENCE_COUNTS)(test_compat.add_up)
test_compat.keep_compiled(compiled, test_compat.add_up, "1", on_error=print)
input()
total = test_compat.np.zeros(1)
compiled(test_compat.np.arange(5.0), total)
assert total[0] == 10
print("compiled\\n" * len(compiled.stats.cache_misses), end="")
"""
    command, pipes = [sys.executable, "-c", program], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes: list[Any] = [subprocess.Popen(command, **pipes, text=True) for _ in range(2)]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    assert "".join(process.communicate()[0] for process in processes) == "compiled\n"
    assert [process.returncode for process in processes] == [0, 0]
