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
    from cbatch.engine.base.errors import Interrupted as Interrupted
    from cbatch.engine.base.errors import ModelError as ModelError
    from cbatch.engine.base.errors import ModelNotFound as ModelNotFound
    from cbatch.engine.base.errors import ReaderGone as ReaderGone
    from cbatch.engine.base.errors import RequestError as RequestError
    from cbatch.engine.base.errors import RunFailed as RunFailed
    from cbatch.engine.base.hub import check_hub_model as check_hub_model
    from cbatch.engine.base.outputs import TokenEvent as TokenEvent
    from cbatch.engine.base.outputs import TokenLogprobs as TokenLogprobs
    from cbatch.engine.base.outputs import ToolCall as ToolCall
    from cbatch.engine.base.params import PARAM_NAMES as PARAM_NAMES
    from cbatch.engine.base.params import SamplingParams as SamplingParams
    from cbatch.engine.base.params import derive_seed as derive_seed
    from cbatch.engine.base.params import with_overrides as with_overrides
    from cbatch.engine.base.request_defaults import RequestDefaults as RequestDefaults
    from cbatch.engine.base.strict_json import parse_json_object as parse_json_object
    from cbatch.engine.base.template_options import FIXED_DATE as FIXED_DATE
    from cbatch.engine.base.template_options import TemplateOptions as TemplateOptions
    from cbatch.engine.base.units import format_bytes as format_bytes
    from cbatch.engine.base.units import format_count as format_count
    from cbatch.engine.base.units import rounded_s as rounded_s
    from cbatch.engine.batch.cache.answer_cache import DEFAULT_CACHE_SIZE as DEFAULT_CACHE_SIZE
    from cbatch.engine.batch.cache.answer_cache import AnswerCache as AnswerCache
    from cbatch.engine.batch.cache.answer_cache import CacheConfig as CacheConfig
    from cbatch.engine.batch.driver import BatchDriver as BatchDriver
    from cbatch.engine.batch.driver import ReplicaStatus as ReplicaStatus
    from cbatch.engine.batch.driver import RowSource as RowSource
    from cbatch.engine.batch.engine_driver import EngineDriver as EngineDriver
    from cbatch.engine.batch.journal import Journal as Journal
    from cbatch.engine.batch.jsonl import format_row as format_row
    from cbatch.engine.batch.jsonl import parse_line as parse_line
    from cbatch.engine.batch.line_processor import LineProcessor as LineProcessor
    from cbatch.engine.batch.lines import MAX_LINE_BYTES as MAX_LINE_BYTES
    from cbatch.engine.batch.lines import Line as Line
    from cbatch.engine.batch.lines import read_lines as read_lines
    from cbatch.engine.batch.ordering.output_forecast import ends_by_limit as ends_by_limit
    from cbatch.engine.batch.ordering.work_ahead import PROMPT_TOKENS_PER_OUTPUT_TOKEN as PROMPT_TOKENS_PER_OUTPUT_TOKEN
    from cbatch.engine.batch.ordering.work_ahead import WorkAhead as WorkAhead
    from cbatch.engine.batch.output_row import OutputRow as OutputRow
    from cbatch.engine.batch.output_row import RowOutcome as RowOutcome
    from cbatch.engine.batch.pipeline import Pipeline as Pipeline
    from cbatch.engine.batch.pipeline import RunObserver as RunObserver
    from cbatch.engine.batch.pipeline import checked_lines as checked_lines
    from cbatch.engine.batch.row_check import CHECK as CHECK
    from cbatch.engine.batch.row_options import RowOptions as RowOptions
    from cbatch.engine.batch.stored_rows import StoredRow as StoredRow
    from cbatch.engine.batch.stored_rows import StoredRows as StoredRows
    from cbatch.engine.batch.tables.forms import INPUT_FORMS as INPUT_FORMS
    from cbatch.engine.batch.tables.forms import OUTPUT_FORMS as OUTPUT_FORMS
    from cbatch.engine.batch.tables.forms import TABLES as TABLES
    from cbatch.engine.batch.tables.forms import InputForm as InputForm
    from cbatch.engine.batch.tables.forms import OutputForm as OutputForm
    from cbatch.engine.batch.tables.forms import compression as compression
    from cbatch.engine.batch.tables.forms import input_form as input_form
    from cbatch.engine.batch.tables.forms import output_form as output_form
    from cbatch.engine.batch.tables.forms import unit_of as unit_of
    from cbatch.engine.batch.tables.row_input import RowInput as RowInput
    from cbatch.engine.batch.tables.shard import WHOLE as WHOLE
    from cbatch.engine.batch.tables.shard import Shard as Shard
    from cbatch.engine.batch.tables.table_writer import TableWriter as TableWriter
    from cbatch.engine.batch.tables.table_writer import check_output as check_output
    from cbatch.engine.batch.tables.table_writer import journal_of as journal_of
    from cbatch.engine.batch.templates.jinja_template import read_template as read_template
    from cbatch.engine.batch.templates.prompt_template import ColumnTemplate as ColumnTemplate
    from cbatch.engine.batch.templates.prompt_template import PromptTemplate as PromptTemplate
    from cbatch.engine.batch.unfinished.resume_plan import ResumePlan as ResumePlan
    from cbatch.engine.batch.unfinished.token_journal import DEFAULT_INTERVAL_S as DEFAULT_INTERVAL_S
    from cbatch.engine.batch.unfinished.token_journal import TokenJournalConfig as TokenJournalConfig
    from cbatch.engine.batch.unfinished.token_journal import is_token_journal as is_token_journal
    from cbatch.engine.batch.writer import FileWriter as FileWriter
    from cbatch.engine.batch.writer import RowWriter as RowWriter
    from cbatch.engine.batch.writer import StreamWriter as StreamWriter
    from cbatch.engine.engine import Engine as Engine
    from cbatch.engine.engine_thread import EngineThread as EngineThread
    from cbatch.engine.execution.kernel_checks.kernel_check import KernelCheck as KernelCheck
    from cbatch.engine.execution.stats import EngineStats as EngineStats
    from cbatch.engine.execution.stats import StepRecord as StepRecord
    from cbatch.engine.extras import require_package as require_package
    from cbatch.engine.models.loader import LoadedModel as LoadedModel
    from cbatch.engine.models.weight_cache import WeightCache as WeightCache
    from cbatch.engine.replicas.driver import TIMEOUT_S as TIMEOUT_S
    from cbatch.engine.replicas.driver import ReplicaDriver as ReplicaDriver
    from cbatch.engine.replicas.launcher import ReplicaLauncher as ReplicaLauncher
    from cbatch.engine.replicas.placement import Place as Place
    from cbatch.engine.replicas.placement import find_places as find_places
    from cbatch.engine.replicas.process import LocalLauncher as LocalLauncher
    from cbatch.engine.replicas.ray_cluster import RayLauncher as RayLauncher
    from cbatch.engine.replicas.replica import EngineLauncher as EngineLauncher
    from cbatch.engine.requests.completion import Choice as Choice
    from cbatch.engine.requests.completion import Completion as Completion
    from cbatch.engine.requests.completion import Score as Score
    from cbatch.engine.requests.completion import TokenLogprob as TokenLogprob
    from cbatch.engine.requests.completion import Usage as Usage
    from cbatch.engine.requests.input_processor import InputProcessor as InputProcessor
    from cbatch.engine.requests.output_processor import OutputProcessor as OutputProcessor
    from cbatch.engine.requests.output_processor import StreamEvent as StreamEvent
    from cbatch.engine.requests.param_names import own_params as own_params
    from cbatch.engine.requests.request import EncodedRequest as EncodedRequest
    from cbatch.engine.requests.request import GenerationRequest as GenerationRequest
    from cbatch.engine.requests.request import RequestHandle as RequestHandle
    from cbatch.engine.requests.row import InputRow as InputRow
    from cbatch.engine.requests.row_keys import explain_difference as explain_difference
    from cbatch.engine.runtime.device import describe_gpus as describe_gpus
    from cbatch.engine.runtime.interpreter import tune_process as tune_process
    from cbatch.engine.runtime.memory import release_memory as release_memory
    from cbatch.engine.scheduler.limits import EngineLimits as EngineLimits
    from cbatch.engine.stepping_engine import SteppingEngine as SteppingEngine
    from cbatch.engine.streams import AsyncStream as AsyncStream
    from cbatch.engine.streams import Stream as Stream
    from cbatch.engine.text.tokenizer import Prompt as Prompt
    from cbatch.engine.text.tool_calls import check_tools as check_tools
    from cbatch.engine.tools.loader import load_tools as load_tools
    from cbatch.engine.tools.tool import MAX_TOOL_ROUNDS as MAX_TOOL_ROUNDS
    from cbatch.engine.tools.tool import Tool as Tool
    from cbatch.engine.tracing.trace import StepTracer as StepTracer
    from cbatch.engine.validation.validation import CHECK_TIMEOUT_S as CHECK_TIMEOUT_S
    from cbatch.engine.validation.validation import Validation as Validation
else:  # so that a type checker knows the names above and no others
    __getattr__, __all__ = lazy_exports(__name__)
