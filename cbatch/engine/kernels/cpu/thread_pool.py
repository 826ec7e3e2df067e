"""The threads that compute a step together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from queue import SimpleQueue
from typing import Any

from cbatch.engine.kernels.cpu.jit import compile_for
from cbatch.engine.kernels.cpu.work_queue import new_work_queue

_Job = tuple[Callable[..., None], tuple[Any, ...]]


class ThreadPool:
    """The calling thread and `size` - 1 helpers, which end with the team."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._inboxes: list[SimpleQueue[_Job | None]] = [SimpleQueue() for _ in range(size - 1)]
        threads = [
            threading.Thread(target=_work, args=(inbox, index), name=f"cbatch-cpu-{index}", daemon=True)
            for index, inbox in enumerate(self._inboxes, 1)
        ]
        for thread in threads:
            thread.start()
        weakref.finalize(self, _shut_down, self._inboxes, threads)

    def compile(self, function: Callable[..., None], *args: Any) -> None:
        """Compiles what `run` would call, so that nobody waits for it later."""
        compile_for(function, new_work_queue(), 0, *args)

    def run(self, function: Callable[..., None], *args: Any) -> None:
        """Calls function(board, thread, *args) in every thread, with a new board; returns when its work is done.

        The function has to find all of its work through the board: a helper may come when the others have done it.
        """
        queue = new_work_queue()
        try:
            for inbox in self._inboxes:
                inbox.put((function, (queue, args)))
            function(queue, 0, *args)
        except BaseException:  # an interruption: helpers must not be at work when the caller goes on
            function(queue, 0, *args)
            raise


@cache
def shared_thread_pool(size: int) -> ThreadPool:
    """The process's team of that size: those that compute by turns need no threads of their own."""
    return ThreadPool(size)


def _work(inbox: SimpleQueue[_Job | None], index: int) -> None:
    while (job := inbox.get()) is not None:
        function, (queue, args) = job
        del job  # nothing of a step is kept while waiting for the next
        with suppress(Exception):  # one that cannot be compiled: the caller meets the same
            function(queue, index, *args)
        del function, queue, args


def _shut_down(inboxes: list[SimpleQueue[_Job | None]], threads: list[threading.Thread]) -> None:
    for inbox in inboxes:
        inbox.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()  # one that comes out of a kernel while the interpreter ends would abort the process
