"""Traces of an engine's steps by torch's profiler, for Perfetto or chrome://tracing."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch.base.errors import ConfigError, EngineError
from cbatch.runtime.tracing.phases import record_spans, span
from cbatch.runtime.tracing.summary import STEP, TraceSummary, read_summary

if TYPE_CHECKING:
    import torch.profiler

WARMUP_STEPS = 8
"""Steps before the first recorded one: they compile kernels."""

MAX_STEPS = 64
"""Recorded steps. A step of a large model has thousands of events."""

_profiler_is_taken = threading.Lock()
"""torch has one profiler for the process, and may crash if two are nested."""


class StepTracer:
    """Records steps of an `EngineThread`, and writes the trace after enough of them or at the end.

    The profiler records the thread that starts it, and all work of the device. If it fails, the recording ends, and
    the steps go on.

    path:      file of the trace; an existing one is replaced
    num_steps: steps so far, recorded or not
    summary:   of the written trace; None before
    error:     why no trace will be written; empty if nothing has failed
    """

    def __init__(self, path: str | Path, *, warmup: int = WARMUP_STEPS, steps: int = MAX_STEPS) -> None:
        """Records `steps` steps after `warmup` others. Raises ConfigError if the file cannot be written."""
        self.path = Path(path)
        self.warmup = warmup
        self.num_steps = 0
        self.summary: TraceSummary | None = None
        self.error = ""
        self._last = warmup + steps
        self._profiler: torch.profiler.profile | None = None
        self._has_lock = self._is_recording = self._on_device = False
        try:
            self._target = Path(os.path.realpath(path))
            self._temporary = self._target.with_name(f".cbatch-trace-{os.getpid()}-{id(self):x}")
            if self._target.exists() and not self._target.is_file():
                raise ConfigError(f"Cannot write the trace {path}: it must be a regular file.")
            self._temporary.touch()
            self._temporary.unlink()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(f"Cannot write the trace {path}: {reason}.") from error

    def prepare(self, *, on_device: bool = False) -> None:
        """Sets up the profiler. Call it on the thread that imported torch, or the profiler complains on stderr.

        on_device: whether the steps run on a GPU
        """
        with self._attempt():
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it logs every start and stop on stderr
            from torch.autograd import profiler
            from torch.profiler import ProfilerActivity, profile

            self._has_lock = _profiler_is_taken.acquire(blocking=False)
            if not self._has_lock or getattr(profiler, "_is_profiler_enabled", False):
                raise EngineError("torch's profiler is already in use")
            activities = [ProfilerActivity.CPU]
            if on_device:
                activities.append(ProfilerActivity.CUDA)
            self._on_device = on_device
            self._profiler = profile(activities=activities)
            self._profiler.prepare_trace()

    @contextmanager
    def step(self) -> Iterator[None]:
        """A context for one step. All steps belong to the same thread."""
        if self.num_steps == self.warmup and self._profiler is not None:
            with self._attempt():
                from torch.profiler import record_function

                self._profiler.start_trace()
                self._is_recording = True
                record_spans(record_function)
        try:
            with span(STEP):
                yield
        finally:
            self.num_steps += 1
            if self.num_steps == self._last:
                self.finish()

    def finish(self) -> None:
        """Ends a recording and writes it, if that has not been done; on the thread of the steps."""
        profiler, was_recording = self._profiler, self._is_recording
        if profiler is not None:
            with self._attempt():
                if not was_recording:
                    profiler.start_trace()  # a prepared profiler can only stop after it was started
                profiler.stop_trace()
                self._release_profiler()
                if was_recording:
                    self._write(profiler)

    def _write(self, profiler: torch.profiler.profile) -> None:
        try:
            profiler.export_chrome_trace(str(self._temporary))
            if not self._temporary.exists():  # the profiler fails silently
                self._temporary.touch()  # raises the reason, if it persists
                raise ValueError("it is incomplete; the disk may be full")
            summary = read_summary(self._temporary, on_device=self._on_device)
            self._temporary.replace(self._target)
            self.summary = summary
        finally:
            self._temporary.unlink(missing_ok=True)
            self._temporary.with_name(f"{self._temporary.name}.tmp").unlink(missing_ok=True)  # the profiler's

    def _release_profiler(self) -> None:
        self._profiler, self._is_recording = None, False
        if self._has_lock:
            record_spans(None)
            _profiler_is_taken.release()
            self._has_lock = False

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """Whatever is raised within ends the recording, and the steps go on."""
        try:
            yield
        except Exception as error:
            self._release_profiler()
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.error = f"Cannot write the trace {self.path}: {reason or repr(error)}."
