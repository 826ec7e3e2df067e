"""Traces of an engine's steps by torch's profiler, for Perfetto or chrome://tracing.

Chrome's format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch.base.errors import ConfigError, EngineError

if TYPE_CHECKING:
    import torch.profiler

WARMUP_STEPS = 8
"""Steps before the first recorded one: they compile kernels."""

MAX_STEPS = 64
"""Recorded steps. A step of a large model has thousands of events."""

_profiler_is_taken = threading.Lock()
"""torch has one profiler for the process, and may crash if two are nested."""

OpenSpan = Callable[[str], AbstractContextManager[object]]

_NOTHING = nullcontext()
_open: OpenSpan | None = None


def span(name: str) -> AbstractContextManager[object]:
    """A context that a trace shows under this name, on the current thread."""
    return _NOTHING if _open is None else _open(name)


def record_spans(open_span: OpenSpan | None) -> None:
    """Makes `span` use `open_span` on all threads from now on; None turns spans off."""
    global _open
    _open = open_span


class StepTracer:
    """Records steps of an `EngineThread`, and writes the trace after enough of them or at the end.

    The profiler records the thread that starts it, and all work of the device. If it fails, the recording ends, and
    the steps go on.

    path:        file of the trace; an existing one is replaced
    num_steps:   steps so far, recorded or not
    num_written: steps in the written trace; 0 before
    error:       why no trace will be written; empty if nothing has failed
    """

    def __init__(self, path: str | Path, *, warmup: int = WARMUP_STEPS, steps: int = MAX_STEPS) -> None:
        """Records `steps` steps after `warmup` others. Raises ConfigError if the file cannot be written."""
        self.path = Path(path)
        self.warmup = warmup
        self.num_steps = 0
        self.num_written = 0
        self.error = ""
        self._last = warmup + steps
        self._profiler: torch.profiler.profile | None = None
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

            made = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])])
            if getattr(profiler, "_is_profiler_enabled", False) or not _profiler_is_taken.acquire(blocking=False):
                raise EngineError("torch's profiler is already in use")
            self._profiler = made
            made.prepare_trace()

    @contextmanager
    def step(self) -> Iterator[None]:
        """A context for one step. All steps belong to the same thread."""
        if self.num_steps == self.warmup and self._profiler is not None:
            with self._attempt():
                from torch.profiler import record_function

                self._profiler.start_trace()
                record_spans(record_function)
        try:
            with span("step"):
                yield
        finally:
            self.num_steps += 1
            if self.num_steps == self._last:
                self.finish()

    def finish(self) -> None:
        """Ends a recording and writes it, if that has not been done; on the thread of the steps."""
        if (profiler := self._profiler) is not None:
            with self._attempt():
                was_recording = self.num_steps > self.warmup
                if not was_recording:
                    profiler.start_trace()  # a prepared profiler can only stop after it was started
                profiler.stop_trace()
                self._release_profiler()
                if was_recording:
                    self._write(profiler)

    def _write(self, profiler: torch.profiler.profile) -> None:
        try:
            profiler.export_chrome_trace(str(self._temporary))
            if not self._is_whole():  # the profiler fails silently
                self._temporary.touch()  # raises the reason, if it persists
                raise ValueError("it is incomplete; the disk may be full")
            self._temporary.replace(self._target)
            self.num_written = min(self.num_steps, self._last) - self.warmup
        finally:
            self._temporary.unlink(missing_ok=True)
            self._temporary.with_name(f"{self._temporary.name}.tmp").unlink(missing_ok=True)  # the profiler's

    def _is_whole(self) -> bool:
        """Whether what the profiler has written is there, up to the end of its JSON object."""
        with suppress(OSError), self._temporary.open("rb") as stream:
            stream.seek(-2, os.SEEK_END)
            return stream.read().rstrip().endswith(b"}")
        return False

    def _release_profiler(self) -> None:
        if self._profiler is not None:
            self._profiler = None
            record_spans(None)
            _profiler_is_taken.release()

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """Whatever is raised within ends the recording, and the steps go on."""
        try:
            yield
        except Exception as error:
            self._release_profiler()
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.error = f"Cannot write the trace {self.path}: {reason or repr(error)}."
