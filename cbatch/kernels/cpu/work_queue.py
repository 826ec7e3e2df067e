"""A lock-free queue from which threads claim the tasks of a step.

A step is a sequence of phases; a phase is a number of tasks that may run in any order. A thread claims the next task of
its phase. The phase ends when all of its tasks are complete, whichever threads ran them. So a thread that arrives late,
or that the system suspends between two tasks, delays nobody: the other threads do the work.

The queue is 16 int64. The first holds the current phase and its next task; the ninth, in a cache line of its own,
counts the completed tasks.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from cbatch.kernels.cpu.jit import IS_X86, kernel

_INT64 = ir.IntType(64)
_NEXT, _DONE = 0, 8
_PHASE_SHIFT = 32
"""Bits of a ticket that hold the task; the bits above hold the phase."""

_SPINS_BEFORE_YIELD = 4096
"""How often a thread that waits for the end of a phase looks before it yields its processor."""

_yield = types.ExternalFunction("SwitchToThread" if sys.platform == "win32" else "sched_yield", types.int32())


class Worker(NamedTuple):
    """A thread of a step: the queue that all of them share, and its own index."""

    queue: NDArray[np.int64]
    thread: int


def new_work_queue() -> NDArray[np.int64]:
    return np.zeros(16, np.int64)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


@intrinsic  # type: ignore[untyped-decorator]
def _load(context: Any, queue: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, queue, *args), "acquire", 8)

    return types.int64(queue, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _store(context: Any, queue: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _pointer(context, builder, queue, args[0], args[1]), "release", 8)
        return context.get_dummy_value()

    return types.void(queue, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _fetch_add(context: Any, queue: Any, index: Any, value: Any) -> Any:
    """Adds, and returns the value before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(context, builder, queue, args[0], args[1]), args[2], "acq_rel")

    return types.int64(queue, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _compare_exchange(context: Any, queue: Any, index: Any, before: Any, after: Any) -> Any:
    """Replaces `before` by `after`; returns whether `before` was there."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, queue, args[0], args[1])
        return builder.extract_value(builder.cmpxchg(pointer, args[2], args[3], "acq_rel", "acquire"), 1)

    return types.boolean(queue, types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _pause(context: Any) -> Any:
    """Tells the processor that this thread waits for another."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if IS_X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@kernel
def claim(worker: Worker, phase: int, num_tasks: int) -> int:
    """Claims the next task of a phase of at least one; returns -1 once all of them are complete."""
    queue, spins = worker.queue, 0
    while True:
        ticket = _load(queue, _NEXT)
        if ticket >> _PHASE_SHIFT != phase:
            return -1
        task: int = ticket & 0xFFFFFFFF
        if task < num_tasks:
            if _compare_exchange(queue, _NEXT, ticket, ticket + 1):
                return task
        else:
            spins += 1
            if spins % _SPINS_BEFORE_YIELD == 0:
                _yield()
            _pause()


@kernel
def likely_task(worker: Worker, phase: int, num_tasks: int) -> int:
    """The task that is claimed next, perhaps by another thread; -1 if all of the phase are."""
    ticket = _load(worker.queue, _NEXT)
    task: int = ticket & 0xFFFFFFFF
    return task if ticket >> _PHASE_SHIFT == phase and task < num_tasks else -1


@kernel
def next_task(worker: Worker, phase: int, num_tasks: int) -> int:
    """Marks a task as complete, and claims the next. The last one of a phase starts the next phase."""
    if _fetch_add(worker.queue, _DONE, 1) == num_tasks - 1:
        _store(worker.queue, _DONE, 0)
        _store(worker.queue, _NEXT, (phase + 1) << _PHASE_SHIFT)
    return claim(worker, phase, num_tasks)
