"""Compiles parts of a step's kernel in processes of their own, beside the process that needs them.

The code is kept on disk, where the process that needs it finds it. Numba compiles one function at a time in a process.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from typing import Any, Self

from cbatch.isolate.worker import Worker, WorkerFailed
from cbatch.kernels.cpu.jit import Part, compile_free, is_kept

MOST_PROCESSES = 7
"""A model has hardly more kinds of instructions."""

SEND_SECONDS = 60.0
"""How long a process may take to read what it is to compile."""


class Builders:
    """Processes that compile beside this one, until the end of a `with` block.

    What they do not get to, or where they fail, `compile_free` and `address_of` compile. Call those in the block.
    """

    def __init__(self, most: int, module: str, at_once: bool) -> None:
        """They begin when `compile` finds that parts are not kept on disk, or at once.

        most:   processes there may be, up to MOST_PROCESSES
        module: each of them imports it first
        """
        # A frozen program starts itself instead of Python.
        self._most, self._module = 0 if getattr(sys, "frozen", False) else min(most, MOST_PROCESSES), module
        self._workers: list[Worker] = []
        if at_once:
            self._start(self._most)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            worker.kill()

    def compile(self, parts: Iterable[Part]) -> None:
        """Has those parts compiled that are not kept. The first processes begin with the first ones."""
        missing = [
            (part.function.__module__, part.function.__name__, part.signature)
            for part in (parts if self._most else ())
            if not is_kept(part)
        ]
        self._start(min(self._most, len(missing)))
        for number, worker in enumerate(self._workers[: len(missing)]):
            with suppress(WorkerFailed):
                worker.send("compile", missing[number:] + missing[:number], timeout_s=SEND_SECONDS)

    def _start(self, count: int) -> None:
        with suppress(OSError):
            while len(self._workers) < count:
                self._workers.append(Worker(f"{__name__}:Builder", self._module))


class Builder:
    """The compiler in another process."""

    def __init__(self, module: str) -> None:
        gc.disable()
        import_module(module)

    def compile(self, parts: list[tuple[str, str, Any]]) -> None:
        for module, name, signature in parts:
            found = getattr(import_module(module), name)
            compile_free([Part(getattr(found, "function", found), signature)])
