"""The token masks of a step, filled on threads of their own while the model runs.

llguidance can fill the masks of a batch on threads of its own (`LLExecutor`), but that call returns only when the
slowest mask is done, and its threads cannot be replaced: one endless mask would hold up every request of the engine.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cbatch.runtime import cpu
from cbatch.sample.structured.grammar import FAILED, GrammarState
from cbatch.sample.structured.reasoning import ReasoningState
from cbatch.sample.structured.token_bitmask import full_bitmask

STEP_LIMIT = 5.0
"""Seconds that the mask of one request may take. Real ones take milliseconds."""


class TokenMasks(NamedTuple):
    """The tokens that may come next at G places: after the outputs so far of requests, and after parts of their drafts.

    bitmasks  [G, bitmask_size] int32 on the CPU (see `token_bitmask`); all tokens for a place that failed
    errors    for each place a sentence or None; that of a state's first place is from then on the state's `error`
    """

    bitmasks: Tensor
    errors: list[str | None]


class Place(NamedTuple):
    """Where an output is in its grammar, and the drafted tokens after each of which a mask is wanted, too."""

    state: GrammarState | ReasoningState
    draft: tuple[int, ...] = ()


class _MaskJob:
    def __init__(self, places: Sequence[Place], pin: bool) -> None:
        self._places = places
        ends = list(accumulate((1 + len(place.draft) for place in places), initial=0))
        self._spans = [slice(*span) for span in pairwise(ends)]
        full = full_bitmask(places[0].state.vocab_size)
        self.bitmasks = torch.empty(ends[-1], len(full), dtype=torch.int32, pin_memory=pin)
        self.errors: list[str | None] = [None] * ends[-1]
        self._rows = self.bitmasks.numpy()
        self._rows[:] = full
        self.is_done = threading.Event()
        self._lock = threading.Lock()
        self._started_at: dict[int, float] = {}
        self._waited = 0.0
        self._to_fill = iter(range(len(places)))
        self._num_left = len(places)

    def run(self) -> bool:
        """Fills masks until none is left. False if one took so long that this thread was replaced."""
        while True:
            with self._lock:
                if (index := next(self._to_fill, None)) is None:
                    return True
                self._started_at[index] = self._waited
            state, draft = self._places[index]
            rows = np.empty((1 + len(draft), self._rows.shape[1]), dtype=np.int32)
            try:
                errors = state.fill_ahead(rows, draft)
            except BaseException as raised:  # a panic of the library is not an Exception
                errors = [f"{FAILED}{raised!r}"] * len(rows)
            with self._lock:
                if index not in self._started_at:
                    return False
                is_filled = [error is None for error in errors]
                self._rows[self._spans[index]][is_filled] = rows[is_filled]
                self._close(index, errors)

    def fail_stalled(self, waited: float, limit: float) -> int:
        """Fails the states whose masks have been taking longer than `limit` seconds, and returns how many.

        waited: seconds waited since the last call; no clock is used, because it goes on while a process is stopped
        """
        with self._lock:
            self._waited += waited
            stalled = [index for index, started_at in self._started_at.items() if self._waited - started_at > limit]
            for index in stalled:
                sentence = f"{FAILED}the step took longer than {limit:g} s."
                self._close(index, [sentence] * (1 + len(self._places[index].draft)))
        return len(stalled)

    def _close(self, index: int, errors: Sequence[str | None]) -> None:
        del self._started_at[index]
        self._places[index].state.error = errors[0]
        self.errors[self._spans[index]] = errors
        self._num_left -= 1
        if self._num_left == 0:
            self.is_done.set()


class MaskFiller:
    """Fills masks on threads of its own while the caller runs the model."""

    def __init__(self, num_threads: int | None = None, limit: float = STEP_LIMIT, *, pin: bool = False) -> None:
        """
        num_threads: None is half of those that compute, at most 8
        limit:       seconds that the mask of one state may take
        pin:         put masks in pinned memory, from which a GPU copies while the host goes on
        """
        self._pin = pin
        self._limit = limit
        self._jobs: queue.SimpleQueue[_MaskJob | None] = queue.SimpleQueue()
        self._job: _MaskJob | None = None
        self._num_threads = num_threads or max(1, min(8, cpu.num_threads() // 2))
        self._num_started = 0

    def begin(self, places: Sequence[Place]) -> None:
        """Starts filling. Until `result` has returned, nothing else may use the states of these places."""
        if not places:
            return
        job = _MaskJob(places, self._pin)
        for _ in range(min(self._num_threads, len(places))):
            self._put(job)
            self._job = job  # only now: `result` must not wait for a job that no thread has

    def result(self) -> TokenMasks | None:
        """Waits for the masks of the places that were passed to `begin`; None if there were none."""
        job, self._job = self._job, None
        if job is None:
            return None
        interval = min(self._limit, 0.1)
        while not job.is_done.wait(interval):
            for _ in range(job.fail_stalled(interval, self._limit)):
                self._num_started -= 1
                self._put(job)
        return TokenMasks(job.bitmasks, job.errors)

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
