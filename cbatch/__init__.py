"""cbatch: chat with and batch-generate from language models over one continuous-batching engine.

Importing this package loads nothing heavy; torch comes with the first name that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cbatch import engine

if TYPE_CHECKING:
    from cbatch.engine import (
        CbatchError,
        Completion,
        ConfigError,
        Engine,
        EngineConfig,
        EngineError,
        ModelError,
        RequestError,
        SamplingParams,
        TokenEvent,
    )

__version__ = "0.1.0"

__all__ = [
    "CbatchError",
    "Completion",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineError",
    "ModelError",
    "RequestError",
    "SamplingParams",
    "TokenEvent",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(engine, name)
