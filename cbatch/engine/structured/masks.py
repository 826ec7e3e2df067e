"""The token masks of a step, filled on threads of their own while the model runs.

llguidance can fill the masks of a batch on threads of its own (`LLExecutor`), but that call returns only when the
slowest mask is done, and its threads cannot be replaced: one endless mask would hold up every request of the engine.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.engine.structured.grammar import FAILED, GrammarState
from cbatch.engine.structured.token_bitmask import full_bitmask

STEP_LIMIT = 5.0
"""Seconds that the mask of one request may take. Real ones take milliseconds."""


class TokenMasks(NamedTuple):
    """The tokens that may come next for G requests of one model.

    bitmasks  [G, bitmask_size] int32 on the CPU (see `token_bitmask`); all tokens in the row of a state that failed
    errors    for each state a sentence or None; from then on it is the state's `error`
    """

    bitmasks: Tensor
    errors: list[str | None]


class _MaskJob:
    """The masks of one step, filled by several threads."""

    def __init__(self, states: Sequence[GrammarState], pin: bool) -> None:
        self.states = states
        full = full_bitmask(states[0].vocab_size)
        self.bitmasks = torch.empty(len(states), len(full), dtype=torch.int32, pin_memory=pin)
        self._rows = self.bitmasks.numpy()
        self._rows[:] = full
        self.is_done = threading.Event()
        self._lock = threading.Lock()
        self._started_at: dict[int, float] = {}
        self._waited = 0.0
        self._to_fill = iter(range(len(states)))
        self._num_left = len(states)

    def run(self) -> bool:
        """Fills masks until none is left. False if one took so long that this thread was replaced."""
        while (index := self._take()) is not None:
            state = self.states[index]
            row = np.empty(self._rows.shape[1], dtype=np.int32)
            try:
                error = state.error or state.fill(row)
            except BaseException as raised:  # a panic of the library is not an Exception
                error = f"{FAILED}{raised!r}"
            if not self._finish(index, row, error):
                return False
        return True

    def fail_stalled(self, waited: float, limit: float) -> int:
        """Fails the states whose masks have been taking longer than `limit` seconds, and returns how many.

        waited: seconds waited since the last call; no clock is used, because it goes on while a process is stopped
        """
        with self._lock:
            self._waited += waited
            stalled = [index for index, started_at in self._started_at.items() if self._waited - started_at > limit]
            for index in stalled:
                self._close(index, f"{FAILED}the step took longer than {limit:g} s.")
        return len(stalled)

    def _take(self) -> int | None:
        with self._lock:
            index = next(self._to_fill, None)
            if index is not None:
                self._started_at[index] = self._waited
            return index

    def _finish(self, index: int, row: NDArray[np.int32], error: str | None) -> bool:
        with self._lock:
            if index not in self._started_at:
                return False
            if error is None:
                self._rows[index] = row
            self._close(index, error)
        return True

    def _close(self, index: int, error: str | None) -> None:
        del self._started_at[index]
        self.states[index].error = error
        self._num_left -= 1
        if self._num_left == 0:
            self.is_done.set()


class MaskFiller:
    """Fills masks on threads of its own while the caller runs the model."""

    def __init__(self, num_threads: int | None = None, limit: float = STEP_LIMIT, *, pin: bool = False) -> None:
        """
        num_threads: None is half of the processors, at most 8
        limit:       seconds that the mask of one state may take
        pin:         put masks in pinned memory, from which a GPU copies while the host goes on
        """
        self._pin = pin
        self._limit = limit
        self._jobs: queue.SimpleQueue[_MaskJob | None] = queue.SimpleQueue()
        self._job: _MaskJob | None = None
        self._num_threads = num_threads or max(1, min(8, (os.cpu_count() or 1) // 2))
        self._num_started = 0

    def begin(self, states: Sequence[GrammarState]) -> None:
        """Starts filling. Until `result` has returned, nothing else may use these states."""
        if not states:
            return
        job = _MaskJob(states, self._pin)
        for _ in range(min(self._num_threads, len(states))):
            self._put(job)
            self._job = job  # only now: `result` must not wait for a job that no thread has

    def result(self) -> TokenMasks | None:
        """Waits for the masks of the states that were passed to `begin`; None if there were none."""
        job, self._job = self._job, None
        if job is None:
            return None
        interval = min(self._limit, 0.1)
        while not job.is_done.wait(interval):
            for _ in range(job.fail_stalled(interval, self._limit)):
                self._num_started -= 1
                self._put(job)
        return TokenMasks(job.bitmasks, [state.error for state in job.states])

    def close(self) -> None:
        """Ends the threads."""
        for _ in range(self._num_started):
            self._jobs.put(None)
        self._num_started = 0

    def _put(self, job: _MaskJob) -> None:
        if self._num_started < self._num_threads:
            threading.Thread(target=_work, args=(self._jobs,), name="cbatch-masks", daemon=True).start()
            self._num_started += 1
        self._jobs.put(job)


def _work(jobs: queue.SimpleQueue[_MaskJob | None]) -> None:
    while (job := jobs.get()) is not None and job.run():
        pass
