"""The continuous-batching engine. These names are all that front ends use; torch loads with the first of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cbatch.engine.answer import AnswerFormat, check_tools
    from cbatch.engine.completion import Completion
    from cbatch.engine.config import EngineConfig
    from cbatch.engine.driver import Driver, Ticket
    from cbatch.engine.engine import Engine
    from cbatch.engine.errors import CbatchError, ConfigError, EngineError, ModelError, RequestError
    from cbatch.engine.loader import LoadedModel
    from cbatch.engine.params import PARAM_NAMES, SamplingParams, derive_seed, with_overrides
    from cbatch.engine.request import TokenEvent, TokenLogprobs
    from cbatch.engine.tokenizer import FIXED_DATE, Prompt
    from cbatch.engine.tool_calls import ToolCall
    from cbatch.engine.tracing import Trace
    from cbatch.engine.units import format_bytes

_HOME = {
    "AnswerFormat": "answer",
    "CbatchError": "errors",
    "Completion": "completion",
    "ConfigError": "errors",
    "Driver": "driver",
    "Engine": "engine",
    "EngineConfig": "config",
    "EngineError": "errors",
    "FIXED_DATE": "tokenizer",
    "LoadedModel": "loader",
    "ModelError": "errors",
    "PARAM_NAMES": "params",
    "Prompt": "tokenizer",
    "RequestError": "errors",
    "SamplingParams": "params",
    "Ticket": "driver",
    "TokenEvent": "request",
    "TokenLogprobs": "request",
    "ToolCall": "tool_calls",
    "Trace": "tracing",
    "check_tools": "answer",
    "derive_seed": "params",
    "format_bytes": "units",
    "with_overrides": "params",
}

__all__ = [
    "FIXED_DATE",
    "PARAM_NAMES",
    "AnswerFormat",
    "CbatchError",
    "Completion",
    "ConfigError",
    "Driver",
    "Engine",
    "EngineConfig",
    "EngineError",
    "LoadedModel",
    "ModelError",
    "Prompt",
    "RequestError",
    "SamplingParams",
    "Ticket",
    "TokenEvent",
    "TokenLogprobs",
    "ToolCall",
    "Trace",
    "check_tools",
    "derive_seed",
    "format_bytes",
    "with_overrides",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
