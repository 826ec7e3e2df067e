"""The continuous-batching engine, as the command line uses it: the names of `cbatch` and some more.

Programs import from `cbatch`; what is only here may change between versions. Modules inside are not imported from
outside. Torch loads with the first name that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.lazy_exports import lazy_exports

if TYPE_CHECKING:  # the list of names, for `lazy_exports` as well
    from cbatch.engine.base.config import EngineConfig as EngineConfig
    from cbatch.engine.base.errors import CbatchError as CbatchError
    from cbatch.engine.base.errors import ConfigError as ConfigError
    from cbatch.engine.base.errors import EngineError as EngineError
    from cbatch.engine.base.errors import ModelError as ModelError
    from cbatch.engine.base.errors import RequestError as RequestError
    from cbatch.engine.base.outputs import Completion as Completion
    from cbatch.engine.base.outputs import TokenEvent as TokenEvent
    from cbatch.engine.base.outputs import TokenLogprobs as TokenLogprobs
    from cbatch.engine.base.params import PARAM_NAMES as PARAM_NAMES
    from cbatch.engine.base.params import SamplingParams as SamplingParams
    from cbatch.engine.base.params import derive_seed as derive_seed
    from cbatch.engine.base.params import with_overrides as with_overrides
    from cbatch.engine.base.units import format_bytes as format_bytes
    from cbatch.engine.engine import Engine as Engine
    from cbatch.engine.engine_thread import EngineThread as EngineThread
    from cbatch.engine.engine_thread import RequestHandle as RequestHandle
    from cbatch.engine.execution.stats import StepRecord as StepRecord
    from cbatch.engine.models.loader import LoadedModel as LoadedModel
    from cbatch.engine.text.detokenizer import OutputDetokenizer as OutputDetokenizer
    from cbatch.engine.text.output_parser import OutputParser as OutputParser
    from cbatch.engine.text.tokenizer import FIXED_DATE as FIXED_DATE
    from cbatch.engine.text.tokenizer import Prompt as Prompt
    from cbatch.engine.text.tool_calls import ToolCall as ToolCall
    from cbatch.engine.text.tool_calls import check_tools as check_tools
    from cbatch.engine.tracing.trace import StepTracer as StepTracer
else:  # so that a type checker knows the names above and no others
    __getattr__, __all__ = lazy_exports(__name__)
