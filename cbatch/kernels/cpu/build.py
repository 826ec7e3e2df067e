"""Compiles parts of a step's kernel in processes of their own, beside the process that needs them.

The code is kept on disk, where the process that needs it finds it. Numba compiles one function at a time in a process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from cbatch.isolate.worker import Worker, WorkerFailed
from cbatch.kernels.cpu.jit import Part, address_of, is_kept

SEND_SECONDS = 60.0
"""How long a process may take to read what it is to compile."""


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


def _start(parts: list[Part]) -> Worker:
    builder = Worker(f"{__name__}:Builder")
    named = [(part.function.__module__, part.function.__name__, part.signature) for part in parts]
    with suppress(WorkerFailed):
        builder.send("compile", named, timeout_s=SEND_SECONDS)
    return builder


class Builder:
    """The compiler in another process."""

    def compile(self, parts: list[tuple[str, str, Any]]) -> None:
        for module, name, signature in parts:
            found = getattr(import_module(module), name)
            address_of(Part(getattr(found, "function", found), signature))
