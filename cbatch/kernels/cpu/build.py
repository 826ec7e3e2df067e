"""Compiles parts of a step's kernel in processes of their own, beside the process that needs them.

The code is kept on disk, where the process that needs it finds it. Numba compiles one function at a time in a process.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module

from cbatch.base.child_command import child_command
from cbatch.kernels.cpu.jit import Part, address_of, is_kept


@contextmanager
def built_beside(parts: Iterable[Part], processes: int) -> Iterator[None]:
    """Parts that are not kept on disk are compiled by other processes meanwhile.

    Where that fails, or is not finished, `address_of` compiles them or waits. Call it before this ends.

    processes: the most there may be
    """
    # A frozen program starts itself instead of Python.
    missing = [] if getattr(sys, "frozen", False) else [part for part in parts if not is_kept(part)]
    builders = []
    for share in filter(None, (missing[number::processes] for number in range(processes))):
        try:
            builders.append(_start(share))
        except OSError:
            break
    try:
        yield
    finally:
        for builder in builders:
            builder.kill()
            builder.wait()


def _start(parts: list[Part]) -> subprocess.Popen[bytes]:
    nowhere = subprocess.DEVNULL
    builder = subprocess.Popen(child_command(__name__), stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere)
    named = [(part.function.__module__, part.function.__name__, part.signature) for part in parts]
    assert builder.stdin is not None
    with suppress(BrokenPipeError), builder.stdin:
        builder.stdin.write(pickle.dumps(named))
    return builder


def main() -> None:
    """Compiles the parts that are named on the standard input."""
    for module, name, signature in pickle.load(sys.stdin.buffer):
        address_of(Part(getattr(import_module(module), name), signature))
