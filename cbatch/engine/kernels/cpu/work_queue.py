"""How threads share the work of a step without waiting for each other more than they must.

A step is a row of phases, a phase a number of pieces that may be done in any order. A thread takes the next piece of
the phase it is in; a phase ends when all its pieces are done, wherever they were done. So a thread that comes late,
or that the system has put aside between two pieces, delays nobody: the others do the work.

A board is 16 numbers: in the first the phase and the next piece of it, in the ninth how many pieces are done.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from cbatch.engine.kernels.cpu.jit import IS_X86, kernel

_INT64 = ir.IntType(64)
_NEXT, _DONE = 0, 8
_PHASE_SHIFT = 32
"""Bits of a ticket that hold the piece; those above hold the phase."""

_SPINS_BEFORE_YIELD = 4096
"""Looks at a phase that is about to end before the processor is offered to others."""

if sys.platform == "win32":
    _yield = types.ExternalFunction("SwitchToThread", types.int32())
else:
    _yield = types.ExternalFunction("sched_yield", types.int32())


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
    """Returns what was there before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(context, builder, queue, args[0], args[1]), args[2], "acq_rel")

    return types.int64(queue, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _compare_exchange(context: Any, queue: Any, index: Any, before: Any, after: Any) -> Any:
    """Whether `before` was there, and was replaced."""

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
def claim(queue: Any, phase: int, num_tasks: int) -> int:
    """The next of a phase's pieces (one at least), for the calling thread to do; -1 once all are done."""
    spins = 0
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
def complete(queue: Any, phase: int, num_tasks: int) -> None:
    """Says that a piece is done; with the last one the next phase begins."""
    if _fetch_add(queue, _DONE, 1) == num_tasks - 1:
        _store(queue, _DONE, 0)
        _store(queue, _NEXT, (phase + 1) << _PHASE_SHIFT)
