"""`--trace FILE`: records steps of an engine, and prints a line about the trace at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from cbatch.base.errors import ReaderGone
from cbatch.cli.common.console import notice
from cbatch.cli.common.options import check_distinct_file
from cbatch.runtime.tracing import StepTracer


@contextmanager
def tracing(path: str | None, others: Mapping[str, str | None], *, quiet: bool) -> Iterator[StepTracer | None]:
    """The tracer for an engine thread, or None without a path. Close the engine thread within this context.

    path:   file of the trace
    others: files that the trace may not replace, as `check_distinct_file` takes them

    Raises ConfigError if the trace cannot be written.
    """
    if path is None:
        yield None
        return
    check_distinct_file("--trace", path, others)
    trace = StepTracer(path)
    try:
        yield trace
    finally:
        error = sys.exception()
        if trace.error:
            notice(trace.error)
        elif not quiet and not isinstance(error, ReaderGone) and (trace.summary or error is None):
            notice(_describe(trace))


def _describe(trace: StepTracer) -> str:
    if trace.summary is None:
        steps = "1 step" if trace.num_steps == 1 else f"{trace.num_steps} steps"
        return f"no trace was written: recording begins after {trace.warmup} steps, and there were {steps}"
    return f"trace of {trace.summary.num_steps} steps in {trace.path}: {trace.summary}"
