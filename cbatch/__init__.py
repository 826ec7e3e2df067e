"""cbatch: chat with and batch-generate from language models over one continuous-batching engine.

These names are the Python API. Importing the package is quick: torch loads with the first name that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.lazy_exports import lazy_exports

if TYPE_CHECKING:  # the list of names, for `lazy_exports` as well
    from cbatch.engine import AsyncStream as AsyncStream
    from cbatch.engine import CbatchError as CbatchError
    from cbatch.engine import Choice as Choice
    from cbatch.engine import Completion as Completion
    from cbatch.engine import ConfigError as ConfigError
    from cbatch.engine import Engine as Engine
    from cbatch.engine import EngineConfig as EngineConfig
    from cbatch.engine import EngineError as EngineError
    from cbatch.engine import ModelError as ModelError
    from cbatch.engine import RequestError as RequestError
    from cbatch.engine import SamplingParams as SamplingParams
    from cbatch.engine import Score as Score
    from cbatch.engine import SteppingEngine as SteppingEngine
    from cbatch.engine import Stream as Stream
    from cbatch.engine import StreamEvent as StreamEvent
    from cbatch.engine import TemplateOptions as TemplateOptions
    from cbatch.engine import TokenEvent as TokenEvent
    from cbatch.engine import TokenLogprob as TokenLogprob
    from cbatch.engine import ToolCall as ToolCall
    from cbatch.engine import Usage as Usage
else:
    __getattr__, __all__ = lazy_exports(__name__)
    __all__ += ["__version__"]

__version__ = "0.1.0"
