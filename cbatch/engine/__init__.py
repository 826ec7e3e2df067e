"""The continuous-batching engine. These names are all that front ends use; torch loads with the first of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cbatch.engine.base.config import EngineConfig
    from cbatch.engine.base.errors import CbatchError, ConfigError, EngineError, ModelError, RequestError
    from cbatch.engine.base.outputs import Completion, TokenEvent, TokenLogprobs
    from cbatch.engine.base.params import PARAM_NAMES, SamplingParams, derive_seed, with_overrides
    from cbatch.engine.base.units import format_bytes
    from cbatch.engine.engine import Engine
    from cbatch.engine.engine_thread import EngineThread, RequestHandle
    from cbatch.engine.models.loader import LoadedModel
    from cbatch.engine.text.output_parser import OutputParser
    from cbatch.engine.text.tokenizer import FIXED_DATE, Prompt
    from cbatch.engine.text.tool_calls import ToolCall, check_tools
    from cbatch.engine.tracing.trace import StepTracer

_HOME = {
    "OutputParser": "text.output_parser",
    "CbatchError": "base.errors",
    "Completion": "base.outputs",
    "ConfigError": "base.errors",
    "EngineThread": "engine_thread",
    "Engine": "engine",
    "EngineConfig": "base.config",
    "EngineError": "base.errors",
    "FIXED_DATE": "text.tokenizer",
    "LoadedModel": "models.loader",
    "ModelError": "base.errors",
    "PARAM_NAMES": "base.params",
    "Prompt": "text.tokenizer",
    "RequestError": "base.errors",
    "SamplingParams": "base.params",
    "RequestHandle": "engine_thread",
    "TokenEvent": "base.outputs",
    "TokenLogprobs": "base.outputs",
    "ToolCall": "text.tool_calls",
    "StepTracer": "tracing.trace",
    "check_tools": "text.tool_calls",
    "derive_seed": "base.params",
    "format_bytes": "base.units",
    "with_overrides": "base.params",
}

__all__ = [
    "FIXED_DATE",
    "PARAM_NAMES",
    "CbatchError",
    "Completion",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineThread",
    "LoadedModel",
    "ModelError",
    "OutputParser",
    "Prompt",
    "RequestError",
    "RequestHandle",
    "SamplingParams",
    "StepTracer",
    "TokenEvent",
    "TokenLogprobs",
    "ToolCall",
    "check_tools",
    "derive_seed",
    "format_bytes",
    "with_overrides",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
