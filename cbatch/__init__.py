"""cbatch: chat with and batch-generate from language models over one continuous-batching engine.

Engine, also called LLM      a model that generates: `Engine().generate("What is 2 plus 3?").text`
EngineConfig, SamplingParams, TemplateOptions                   options of an engine, of a request, of a chat template
Completion, Completions, Choice, Usage, TokenLogprob, ToolCall  results of `generate`, `chat` and `map`
Score, Classification        results of `score` and `classify`
Stream, AsyncStream, StreamEvent                                results of `stream` and `astream`
CbatchError                  base of ConfigError, EngineError, ModelError and RequestError
SteppingEngine, Request, TokenEvent                             for programs that run the steps themselves

These names are the Python API, and `help(cbatch.Engine)` describes one of them. Importing the package is quick: torch
loads with the first name that needs it.
"""

from __future__ import annotations

import ast
import inspect
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the list of names, which `_homes` reads as well
    from cbatch.api import LLM as LLM
    from cbatch.api import Engine as Engine
    from cbatch.base.chat_template_options import TemplateOptions as TemplateOptions
    from cbatch.base.config import EngineConfig as EngineConfig
    from cbatch.base.errors import CbatchError as CbatchError
    from cbatch.base.errors import ConfigError as ConfigError
    from cbatch.base.errors import EngineError as EngineError
    from cbatch.base.errors import ModelError as ModelError
    from cbatch.base.errors import RequestError as RequestError
    from cbatch.base.outputs import TokenEvent as TokenEvent
    from cbatch.base.outputs import ToolCall as ToolCall
    from cbatch.base.params import SamplingParams as SamplingParams
    from cbatch.base.request import Request as Request
    from cbatch.engine.stepping_engine import SteppingEngine as SteppingEngine
    from cbatch.engine.streams import AsyncStream as AsyncStream
    from cbatch.engine.streams import Stream as Stream
    from cbatch.requests.completion import Choice as Choice
    from cbatch.requests.completion import Classification as Classification
    from cbatch.requests.completion import Completion as Completion
    from cbatch.requests.completion import Completions as Completions
    from cbatch.requests.completion import Score as Score
    from cbatch.requests.completion import TokenLogprob as TokenLogprob
    from cbatch.requests.completion import Usage as Usage
    from cbatch.requests.output_processor import StreamEvent as StreamEvent


__version__ = "0.1.0"


def _homes() -> dict[str, str]:
    """The module of each public name, from the imports above, which are only for type checkers."""
    tree = ast.parse(inspect.getsource(sys.modules[__name__]))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}
    return {name: home for name, home in homes.items() if home.startswith("cbatch.")}


if not TYPE_CHECKING:
    _HOMES = _homes()
    __all__ = [*sorted(_HOMES), "__version__"]

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)

    def __dir__() -> list[str]:
        return __all__
