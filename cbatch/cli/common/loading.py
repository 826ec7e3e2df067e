"""Opens the engine of a command, and tells the user what was loaded."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cbatch.cli.common.console import notice
from cbatch.engine import tune_process

if TYPE_CHECKING:
    from cbatch.engine import Engine, EngineConfig, StepTracer

DEMO_NOTICE = (
    "this is the bundled demo model, a toy of a few million parameters; "
    "name a real one with --model, for example --model Qwen/Qwen3-0.6B"
)


def open_engine(config: EngineConfig, *, quiet: bool, verbose: bool = False, trace: StepTracer | None = None) -> Engine:
    """Loads an engine, and prints on stderr what it is and how much memory it takes.

    trace: records some of the engine's steps
    """
    from cbatch.engine import Engine

    print_notices(quiet=quiet)
    gc.freeze()  # imported modules stay
    gc.enable()
    engine = Engine(config, trace=trace)
    tune_process()
    if not quiet:
        show_loaded(engine.core.describe(), is_demo=config.model is None, verbose=verbose)
    return engine


def print_notices(*, quiet: bool) -> None:
    """Prints what the engine logs as notices, unless `quiet`."""
    logging.getLogger("cbatch").handlers = [logging.NullHandler() if quiet else _Notices()]


def show_loaded(shown: Mapping[str, str], *, is_demo: bool, verbose: bool) -> None:
    """Prints what was loaded, from the description of an engine."""
    if is_demo:
        notice(DEMO_NOTICE)
    if keys := shown.get("not applied"):
        notice(f"the model's generation_config.json asks for {keys}, which this version does not apply")
    notice(f"parameters: {shown['parameters']} in {shown['dtype']} on {shown['device']}")
    notice(f"KV cache: {shown['KV cache']}")
    for name in ("model", "attention", "context", "batch") if verbose else ():
        notice(f"{name}: {shown[name]}")


class _Notices(logging.Handler):
    """Prints the engine's log records as notices."""

    def emit(self, record: logging.LogRecord) -> None:
        notice(record.getMessage())
