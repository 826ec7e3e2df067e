"""The queue of tasks: every task is done once, and threads offer their processor between two of them."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import Any

import numpy as np
import pytest
from numba import njit

from cbatch.kernels.cpu import work_queue
from cbatch.kernels.cpu.jit import entry
from cbatch.kernels.cpu.thread_pool import ThreadPool
from cbatch.kernels.cpu.work_queue import Worker, claimed, lone_worker
from tests.support.faults import wait_until

pytestmark = pytest.mark.kernels


@entry
def count_tasks(worker: Worker, done: Any) -> None:
    for phase in range(len(done)):
        for task in claimed(worker, phase, done.shape[1]):
            done[phase, task] += 1


def test_every_task_is_done_once() -> None:
    """Guards the work queue against tasks that are lost or done twice, with more threads than processors."""
    thread_pool = ThreadPool(4)
    for _ in range(20):
        done = np.zeros((50, 7), np.int64)
        thread_pool.run(count_tasks, done)
        assert (done == 1).all()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no threads")
def test_the_threads_of_a_pool_stay_where_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the distance of all threads to the weights; the one that calls is free again afterwards."""
    bound: list[tuple[str, set[int]]] = []
    own, free = threading.current_thread().name, os.sched_getaffinity(0)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: bound.append((threading.current_thread().name, cpus)))
    thread_pool, done = ThreadPool(3, frozenset([0])), np.zeros((2, 7), np.int64)
    for _ in range(3):
        thread_pool.run(count_tasks, done)
    wait_until(lambda: len(bound) == 8)
    assert [cpus for name, cpus in bound if name == own] == 3 * [{0}, free]
    assert {(name, *cpus) for name, cpus in bound if name != own} == {("cbatch-cpu-1", 0), ("cbatch-cpu-2", 0)}


def number_at(address: Any) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(int(address))


AWAY = 12
"""Quarters of a millisecond that another process has the processor."""


class SlowTasks:
    """The queue as Python runs it, with tasks of a quarter of a millisecond each, by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.quarters, self.held, self.yields = 1000, 0, list[int]()
        replaced = {
            "_load": lambda address: number_at(address).value,
            "_store": lambda address, value: setattr(number_at(address), "value", value),
            "_fetch_add": self._fetch_add,
            "_compare_exchange": self._compare_exchange,
            "_microseconds": lambda _: self.quarters * work_queue._MICROSECONDS_OF_OWN // 4,
            "_yield": self._yield,
            "_give_way": work_queue._give_way.py_func,
            "_claim": work_queue._claim.py_func,
            "_GIVES_WAY": True,
        }
        for name, value in replaced.items():
            monkeypatch.setattr(work_queue, name, value)

    def run(self, phases: int, tasks: int) -> None:
        worker = lone_worker()
        for phase in range(phases):
            for _ in claimed.py_func(worker, phase, tasks):
                self.quarters += 1

    def _fetch_add(self, address: int, value: int) -> int:
        number = number_at(address)
        number.value += value
        self.held -= 1
        return number.value - value

    def _compare_exchange(self, address: int, before: int, after: int) -> bool:
        number_at(address).value = after
        self.held += 1
        return True

    def _yield(self) -> None:
        assert self.held == 0, "it holds a task"
        self.yields.append(self.quarters)
        self.quarters += AWAY


@pytest.mark.parametrize(("phases", "tasks", "gap"), [(1, 400, 8), (400, 1, 4)])
def test_threads_give_way_between_tasks(phases: int, tasks: int, gap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the speed beside other processes: a thread that is taken off its processor within a task delays all.

    It offers it when it has had it for a millisecond, but within a phase only at every eighth task.
    """
    queue = SlowTasks(monkeypatch)
    queue.run(phases, tasks)
    assert set(np.diff(queue.yields)) == {AWAY + gap} and 400 // gap - len(queue.yields) in (0, 1)


def test_the_clock_of_yields() -> None:
    """Guards threads from yielding all the time, or never."""
    clock = work_queue._microseconds
    read = njit(lambda: clock(np.int64(0)))
    before = read()
    time.sleep(0.1)
    assert 50_000 <= read() - before <= 1_000_000
