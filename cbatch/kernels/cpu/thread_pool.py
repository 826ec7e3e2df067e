"""The threads that run a kernel together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from queue import SimpleQueue
from typing import Any

from numba import typeof

from cbatch.kernels.cpu.work_queue import Worker, lone_worker, new_workers
from cbatch.runtime.cpu import bind_thread, near_cpus, on_cpus

_Job = tuple[Callable[..., None], Worker, tuple[Any, ...]]


class ThreadPool:
    """The calling thread and `size` - 1 helper threads, which end when the pool is garbage-collected."""

    def __init__(self, size: int, cpus: frozenset[int] = frozenset()) -> None:
        """cpus: those that all of these threads stay on; empty: any"""
        self.size = size
        self._cpus = cpus
        self._inboxes: list[SimpleQueue[_Job | None]] = [SimpleQueue() for _ in range(size - 1)]
        threads = [
            threading.Thread(target=_work, args=(inbox, cpus), name=f"cbatch-cpu-{index}", daemon=True)
            for index, inbox in enumerate(self._inboxes, 1)
        ]
        for thread in threads:
            thread.start()
        weakref.finalize(self, _shut_down, self._inboxes, threads)

    def compile(self, entry: Any, *args: Any) -> None:
        """Compiles what `run` would call with these arguments. From then on `run` raises TypeError for other types.

        What an entry calls by its address was compiled for the same types, and nothing else would notice.
        """
        entry.disable_compile(False)
        entry.compile(tuple(typeof(argument) for argument in (lone_worker(), *args)))
        entry.disable_compile()

    def run(self, function: Callable[..., None], *args: Any) -> None:
        """Calls function(worker, *args) in every thread, with a new work queue; returns when its work is done.

        The function must find all of its work through the queue: a helper may start after the others have finished.
        """
        own, *others = new_workers(self.size)
        with on_cpus(self._cpus):
            try:
                for inbox, worker in zip(self._inboxes, others, strict=True):
                    inbox.put((function, worker, args))
                function(own, *args)
            except BaseException:  # an interruption: helpers must not be at work when the caller goes on
                function(own, *args)
                raise


def shared_thread_pool(size: int) -> ThreadPool:
    """The process's pool of that size, near the weights. Engines take turns, so they can share it."""
    return _shared_thread_pool(size, near_cpus())


_shared_thread_pool = cache(ThreadPool)


def _work(inbox: SimpleQueue[_Job | None], cpus: frozenset[int]) -> None:
    bind_thread(cpus)
    while (job := inbox.get()) is not None:
        function, worker, args = job
        del job  # keep nothing of a step while waiting for the next
        with suppress(BaseException):  # if it cannot be compiled, the caller gets the same error
            function(worker, *args)
        del function, worker, args


def _shut_down(inboxes: list[SimpleQueue[_Job | None]], threads: list[threading.Thread]) -> None:
    for inbox in inboxes:
        inbox.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()  # a thread that returns from a kernel at interpreter shutdown would abort the process
