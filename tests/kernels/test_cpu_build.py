"""Guards compiled kernels: those of other processes are found on disk, and what is damaged is compiled again."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import os
import sys
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
from numba import typeof, types
from numba.core.caching import FunctionCache

from cbatch.kernels.cpu import jit
from cbatch.kernels.cpu.build import Builders
from cbatch.kernels.cpu.jit import Part, address_of, call_address, compile_free, compiling, is_kept, is_known
from cbatch.kernels.cpu.thread_pool import shared_thread_pool
from cbatch.kernels.cpu.work_queue import Worker
from tests.support.faults import wait_until

pytestmark = pytest.mark.kernels


def triple(number: int) -> int:
    return 3 * number


def add_up(worker: Worker, numbers: Any) -> int:
    total = 0
    for number in numbers:
        total += number
    return total


@jit.entry
def call_part(worker: Worker, address: int, numbers: Any, out: Any) -> None:
    out[0] = call_address(address, (worker, numbers))


TRIPLE = Part(triple, types.int64(types.int64))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where code is kept, for this process and those that it starts."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    for function in (jit._dispatcher, address_of):
        function.cache_clear()
    return tmp_path


def builders(most: int, at_once: bool = False) -> Builders:
    return Builders(most, __name__, at_once)


def call(address: int) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address)(5))


@pytest.mark.parametrize("at_once", [True, False])
def test_another_process_compiles(folder: Path, at_once: bool) -> None:
    """Guards the first start: the code comes from another process, and is not compiled here."""
    assert not is_kept(TRIPLE)
    with builders(1, at_once=at_once) as building:
        building.compile([TRIPLE])
        wait_until(lambda: is_kept(TRIPLE), seconds=60)
    assert call(address_of(TRIPLE)) == 15
    assert not jit._dispatcher(TRIPLE).stats.cache_misses


def test_another_process_compiles_an_entry(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the function that runs a step: it is compiled beside the others, and Python finds it under its types."""
    numbers, total = np.arange(5.0), np.zeros(1)
    fresh: Any = jit.entry(sum_of.py_func)  # type: ignore[attr-defined]
    part = Part(fresh, (typeof(numbers), typeof(total)))
    assert not is_known(fresh)
    with builders(1) as building:
        building.compile([part])
        wait_until(lambda: is_kept(part), seconds=60)
    assert is_known(fresh)
    fresh(numbers, total)
    assert total[0] == 10 and not fresh.stats.cache_misses


def test_processes_share_the_work(folder: Path) -> None:
    """Guards the first start: nobody waits for a function that another compiles while there are others to compile."""
    lock = os.open(jit._dispatcher(TRIPLE)._cache.lock_path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    compile_free([TRIPLE])
    assert not is_kept(TRIPLE)
    os.close(lock)
    compile_free([TRIPLE])
    assert is_kept(TRIPLE)


def test_a_disk_without_locks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a cache on a file system that has no locks: nobody waits for one, and all is compiled."""

    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr("cbatch.compat.time.sleep", lambda _: pytest.fail("it waits"))
    compile_free([TRIPLE])
    assert is_kept(TRIPLE)


@pytest.mark.parametrize("slow_s", [0.01, 60])
def test_only_slow_compilation_is_told(
    slow_s: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards starts that take as long as others from a line about kernels; and garbage collection, which goes on."""
    monkeypatch.setattr(jit, "SLOW_SECONDS", slow_s)
    monkeypatch.setattr(jit, "_is_told", Lock())
    with compiling(), compiling():  # as on two threads
        assert not gc.isenabled()
        wait_until(lambda: bool(caplog.messages) or slow_s > 1, seconds=10)
    assert gc.isenabled() and ["Compiling kernels" in text for text in caplog.messages] == [True] * (slow_s < 1)


@pytest.mark.parametrize(("program", "processes"), [("/bin/false", 1), ("/no/such/program", 1), (sys.executable, 0)])
def test_nothing_depends_on_it(folder: Path, program: str, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a start where such a process fails, or cannot be started, or there is no processor for it."""
    monkeypatch.setattr("sys.executable", program)
    with builders(processes) as building:
        building.compile([TRIPLE])
        assert call(address_of(TRIPLE)) == 15
    assert not jit._dispatcher(TRIPLE).stats.cache_hits and is_kept(TRIPLE)


def test_a_frozen_program_starts_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards programs that were made into one file: they would start themselves, again and again."""
    monkeypatch.setattr("sys.frozen", True, raising=False)
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a process was started"))
    with builders(2, at_once=True) as building:
        building.compile([TRIPLE])
        assert not is_kept(TRIPLE)


def test_other_types_are_refused() -> None:
    """Guards memory: what is called by its address would read an array of other numbers as if it were its own."""
    pool, numbers, out = shared_thread_pool(1), np.arange(5), np.zeros(1, np.int64)
    worker = types.NamedTuple([types.int64[::1], types.int64], Worker)
    address = address_of(Part(add_up, types.int64(worker, types.int64[::1])))
    pool.compile(call_part, address, numbers, out)
    pool.run(call_part, address, numbers, out)
    assert out[0] == 10
    for wrong in (numbers[::2], numbers.astype(np.float32)):
        with pytest.raises(TypeError, match="No matching definition"):
            pool.run(call_part, address, wrong, out)
    assert out[0] == 10


@jit.entry
def sum_of(numbers: Any, total: Any) -> None:
    for number in numbers:
        total[0] += number


def summed(dtype: type) -> float:
    total = np.zeros(1, dtype)
    sum_of(np.arange(5, dtype=dtype), total)
    return float(total[0])


def test_damaged_and_foreign_code_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a cut-off file, and against code for other types under the same name."""
    compiled: Any = sum_of
    assert summed(np.float32) == 10
    cache = compiled._cache
    wanted = tuple(typeof(np.zeros(1, np.float32)) for _ in range(2))
    context = compiled.targetctx
    assert cache.load_overload(wanted, context) is not None
    other = tuple(typeof(np.zeros(1, np.float64)) for _ in range(2))
    load = FunctionCache._load_overload
    with monkeypatch.context() as patch:
        patch.setattr(FunctionCache, "_load_overload", lambda self, sig, *args: load(self, wanted, *args))
        assert cache.load_overload(other, context) is None
    Path(cache._cache_file._index_path).write_bytes(b"")
    assert cache.load_overload(wanted, context) is None
    assert summed(np.float64) == 10
    assert cache.load_overload(other, context) is not None, "nothing is kept after a file was damaged"
