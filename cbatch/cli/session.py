"""Opening an engine for a command, with what a person should know about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cbatch.cli.options import ENGINE_FIELDS
from cbatch.cli.screen import notice

if TYPE_CHECKING:
    from cbatch.engine import Engine

DEMO_NOTICE = (
    "this is the bundled demo model, a toy of a few million parameters; "
    "name a real one with --model, for example --model Qwen/Qwen3-0.6B"
)


def open_engine(options: dict[str, Any], *, quiet: bool) -> Engine:
    """Loads the engine that the options describe, and says on stderr what it is and what it took."""
    from cbatch.engine import Engine, EngineConfig

    engine = Engine(EngineConfig(**{name: options[name] for name in ENGINE_FIELDS}))
    if not quiet:
        if options["model"] is None:
            notice(DEMO_NOTICE)
        notice(engine.describe())
    return engine
