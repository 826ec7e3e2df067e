"""cbatch: chat with and batch-generate from language models over one continuous-batching engine.

These names are the Python API. Importing the package is quick: torch loads with the first name that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.lazy_exports import lazy_exports

if TYPE_CHECKING:  # the list of names, for `lazy_exports` as well
    from cbatch.api import Engine as Engine
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
    from cbatch.base.template_options import TemplateOptions as TemplateOptions
    from cbatch.engine.stepping_engine import SteppingEngine as SteppingEngine
    from cbatch.engine.streams import AsyncStream as AsyncStream
    from cbatch.engine.streams import Stream as Stream
    from cbatch.requests.completion import Choice as Choice
    from cbatch.requests.completion import Completion as Completion
    from cbatch.requests.completion import Score as Score
    from cbatch.requests.completion import TokenLogprob as TokenLogprob
    from cbatch.requests.completion import Usage as Usage
    from cbatch.requests.output_processor import StreamEvent as StreamEvent
    from cbatch.runtime.tracing.trace import StepTracer as StepTracer
else:
    __getattr__, __all__ = lazy_exports(__name__)
    __all__ += ["__version__"]

__version__ = "0.1.0"
