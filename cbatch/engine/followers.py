"""The other processes of a tensor-parallel engine, as the first one has them. It schedules; they compute what it sends.

Each process has its part of the weights and of the KV cache (`model/ops/shards.py`), and computes every step. Tokens
are sampled by the first one alone. If one of them ends, so does the engine: nothing can be computed any more.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from cbatch.base.config import EngineConfig
from cbatch.base.errors import EngineError, in_short
from cbatch.base.run_folder import RunFolder
from cbatch.isolate.worker import Worker, WorkerDied
from cbatch.model.ops.shards import Part
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.process_group import ProcessGroup
from cbatch.schedule.limits import StepLimits

_FACTORY = "cbatch.engine.follower:Follower"

_POLL_S = 0.1
"""How often it is asked whether all processes are there."""

_DEATH_S = 1.0
"""How long a process may take to end, and to say why, after it was missed."""


class Followers:
    """Starts the processes, which load their parts of the model at once.

    part:  the place of this process
    group: all of them, once the engine is `formed`
    """

    def __init__(self, config: EngineConfig, devices: Sequence[torch.device]) -> None:
        """devices: of all processes, that of this one first"""
        self._size, self._device = len(devices), devices[0]
        self.part = Part(0, self._size)
        self.group: ProcessGroup | None = None
        self._failure = ""
        self._in_step = False
        self._is_closing = threading.Event()
        self._folder = RunFolder("group")
        self._workers = [
            Worker(
                _FACTORY,
                replace(config, device=str(device), tensor_parallel=1),
                Part(rank, self._size),
                name=f"process {rank + 1} of {self._size}",
            )
            for rank, device in enumerate(devices)
            if rank
        ]
        self._watcher = threading.Thread(target=self._watch, name="cbatch-followers", daemon=True)
        self._watcher.start()

    def agree(self, limits: StepLimits, size: Sequence[int]) -> tuple[StepLimits, list[int]]:
        """Limits, and blocks and slots of a cache, that all have room for. Waits until they have loaded their parts.

        Raises what loading them raises, and EngineError if a process has ended.
        """
        try:
            self._send_all("measure", limits)
            for worker in self._workers:
                graphs, *its_size = worker.receive(math.inf)
                limits = replace(limits, graphs=limits.graphs and graphs)
                size = list(map(min, size, its_size))
        except WorkerDied as error:
            raise self._fail(error) from error
        return limits, list(size)

    def form(self, limits: StepLimits, size: Sequence[int]) -> ProcessGroup:
        """Makes the group, while the other processes do, and go on to what is made together."""
        path = str(self._folder.path / "store")
        self._send_all("make", path, limits, size)
        self._in_step = True
        self.group = ProcessGroup(path, self.part.rank, self._size, self._device)
        return self.group

    @contextmanager
    def leading(self, batch: RaggedBatch) -> Iterator[None]:
        """While this process computes a step: the others do so, too.

        Raises EngineError for whatever goes wrong in any of them, after which they are gone.
        """
        try:
            self._wait()
            self._send_all("step", *batch.for_others())
            self._in_step = True
            yield
        except Exception as error:
            raise self._fail(error) from error
        except BaseException as error:  # Ctrl-C, in the middle of a step
            self._fail(error)
            raise

    def close(self) -> None:
        """Ends the processes. May be called twice."""
        self._is_closing.set()
        for worker in self._workers:
            worker.send_kill()
        for worker in self._workers:
            worker.kill()
        self._folder.close()

    def _wait(self) -> None:
        """Until the others have begun the last step; a GPU may still compute it."""
        if self._failure:
            raise EngineError(self._failure)
        if self._in_step:
            for worker in self._workers:
                worker.receive(math.inf)
            self._in_step = False

    def _send_all(self, method: str, *arguments: Any) -> None:
        for worker in self._workers:
            worker.send(method, *arguments, timeout_s=math.inf)

    def _fail(self, error: BaseException) -> EngineError:
        """The reason why the engine ends, whichever process noticed it first."""
        if not self._failure:
            reason = self._death() or in_short(error)
            self._failure = f"One of the {self._size} processes that compute the model has failed: {reason}"
        self.close()
        return EngineError(self._failure)

    def _death(self) -> str:
        """How another process has died; empty if none has, a moment after something went wrong here.

        A signal goes first: what the other processes say is that they miss the one that has got it.
        """
        deadline, deaths = time.monotonic() + _DEATH_S, list[tuple[bool, str]]()
        while not deaths and time.monotonic() < deadline:
            for rank, worker in enumerate(self._workers, 1):
                if not worker.is_running():
                    try:
                        worker.receive(_DEATH_S)
                    except WorkerDied as death:
                        has_signal = death.code is not None and death.code < 0
                        deaths.append((not has_signal, f"process {rank + 1} died: {death}".rstrip(".")))
            time.sleep(_POLL_S)
        return min(deaths, default=(True, ""))[1]

    def _watch(self) -> None:
        """Ends the waiting of this process for one that is gone."""
        while not self._is_closing.wait(_POLL_S):
            if all(worker.is_running() for worker in self._workers):
                continue
            if self.group is not None and not self._is_closing.is_set():
                with suppress(Exception):
                    self.group.abort()
            return
