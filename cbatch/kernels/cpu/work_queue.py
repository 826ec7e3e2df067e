"""A lock-free queue from which threads claim the tasks of a step.

A step is a sequence of phases; a phase is a number of tasks that may run in any order. A thread claims the next task of
its phase. The phase ends when all of its tasks are complete, whichever threads ran them. So a thread that arrives late,
or that the system suspends between two tasks, delays nobody: the other threads do the work.

One that is suspended in the middle of a task delays all of them, for as long as another process has its processor. So
threads offer theirs between two tasks about once a millisecond, which is before the system takes it away.

The queue is int64 in cache lines: the first number of the first holds the current phase and its next task, that of the
second counts the completed tasks, and that of each thread's line is when it last offered its processor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from cbatch.kernels.cpu.emit import INT64, LINE, Value, call_intrinsic, emitted
from cbatch.kernels.cpu.instruction_sets import IS_ARM, IS_X86
from cbatch.kernels.cpu.jit import kernel

_PHASE_SHIFT = 32
"""Bits of a ticket that hold the task; the bits above hold the phase."""

_SPINS_BEFORE_YIELD = 4096
"""How often a thread that waits for the end of a phase looks before it yields its processor."""

_GIVES_WAY = sys.platform == "linux"
"""Not known to help elsewhere."""

_MICROSECONDS_OF_OWN = 1300
"""How long a thread computes before it offers its processor."""

_yield = types.ExternalFunction("SwitchToThread" if sys.platform == "win32" else "sched_yield", types.int32())


class Worker(NamedTuple):
    """A thread of a step: the queue that all of them share, and its own index."""

    queue: NDArray[np.int64]
    thread: int


def new_workers(count: int) -> list[Worker]:
    """The threads of a new step."""
    queue = np.zeros((2 + count) * LINE // 8, np.int64)
    return [Worker(queue, thread) for thread in range(count)]


def lone_worker() -> Worker:
    """A thread that runs a step alone."""
    return new_workers(1)[0]


@emitted(types.int64, types.int64)
def _load(address: Value) -> Any:
    return address.builder.load_atomic(address.pointer(INT64), "acquire", 8)


@emitted(types.void, types.int64, types.int64)
def _store(address: Value, value: Value) -> None:
    address.builder.store_atomic(value.of, address.pointer(INT64), "release", 8)


@emitted(types.int64, types.int64, types.int64)
def _fetch_add(address: Value, value: Value) -> Any:
    """Adds, and returns the value before."""
    return address.builder.atomic_rmw("add", address.pointer(INT64), value.of, "acq_rel")


@emitted(types.boolean, types.int64, types.int64, types.int64)
def _compare_exchange(address: Value, before: Value, after: Value) -> Any:
    """Replaces `before` by `after`; returns whether `before` was there."""
    builder, pointer = address.builder, address.pointer(INT64)
    return builder.extract_value(builder.cmpxchg(pointer, before.of, after.of, "acq_rel", "acquire"), 1)


@emitted(types.void, types.int64)
def _pause(queue: Value) -> None:
    """Tells the processor that this thread waits for another."""
    if IS_X86:
        call_intrinsic(queue.builder, "x86.sse2.pause", ir.VoidType())


@emitted(types.int64, types.int64)
def _microseconds(queue: Value) -> Any:
    """Microseconds, roughly, by the processor's counter, which is read without a call."""
    builder = queue.builder
    if IS_X86:  # its counter has 2 to 5 GHz
        return call_intrinsic(builder, "readcyclecounter", INT64) >> 11
    if not IS_ARM:
        return queue.constant(0)
    names = (builder.module.add_metadata([name]) for name in ("cntvct_el0", "cntfrq_el0"))
    count, frequency = (call_intrinsic(builder, "read_volatile_register.i64", INT64, name) for name in names)
    return count // (frequency >> 20 | 1)


@kernel
def _give_way(worker: Worker) -> None:
    place = np.int64(worker.queue.ctypes.data) + LINE * (2 + worker.thread)
    since, now = _load(place), _microseconds(place)
    if since == 0:
        _store(place, now)
    elif now - since >= _MICROSECONDS_OF_OWN:
        _yield()
        _store(place, _microseconds(place))


@kernel
def _claim(worker: Worker, phase: int, num_tasks: int, done: int) -> int:
    """Claims the next task; returns -1 once all of them are complete.

    done: the task that this thread claimed before; -1 for none. The last one of a phase starts the next phase
    """
    queue, spins = np.int64(worker.queue.ctypes.data), 0
    if done >= 0 and _fetch_add(queue + LINE, 1) == num_tasks - 1:
        _store(queue + LINE, 0)
        _store(queue, (phase + 1) << _PHASE_SHIFT)
    if _GIVES_WAY and done % 8 == 7:  # -1, too
        _give_way(worker)
    while True:
        ticket = _load(queue)
        if ticket >> _PHASE_SHIFT != phase:
            return -1
        task: int = ticket & 0xFFFFFFFF
        if task < num_tasks:
            if _compare_exchange(queue, ticket, ticket + 1):
                return task
        else:
            spins += 1
            if spins % _SPINS_BEFORE_YIELD == 0:
                _yield()
            _pause(queue)


@kernel
def claimed(worker: Worker, phase: int, num_tasks: int) -> Iterator[int]:
    """The tasks of a phase, at least one, that this thread claims: each is complete when the next is asked for."""
    task = _claim(worker, phase, num_tasks, -1)
    while task >= 0:
        yield task
        task = _claim(worker, phase, num_tasks, task)


@kernel
def likely_task(worker: Worker, phase: int, num_tasks: int) -> int:
    """The task that is claimed next, perhaps by another thread; -1 if all of the phase are."""
    ticket = _load(np.int64(worker.queue.ctypes.data))
    task: int = ticket & 0xFFFFFFFF
    return task if ticket >> _PHASE_SHIFT == phase and task < num_tasks else -1
