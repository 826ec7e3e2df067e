"""From a line of input to a request of the engine, and what may follow on its answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cbatch.base.errors import RequestError
from cbatch.base.outputs import KnownOutput
from cbatch.base.request import Request
from cbatch.batch.cache.answer_cache import CacheConfig
from cbatch.batch.cache.cached_outputs import CachedOutputs
from cbatch.batch.jsonl import parse_line
from cbatch.batch.lines import Line
from cbatch.batch.rounds.round_loop import Ask, RoundLoop
from cbatch.batch.rounds.tool_loop import ToolLoop
from cbatch.batch.rounds.try_loop import TryLoop, nth_try
from cbatch.batch.row_options import RowOptions
from cbatch.batch.token_journal import TokenJournalConfig
from cbatch.batch.unfinished.journaled_outputs import JournaledOutputs
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.requests.completion import Completion
from cbatch.requests.input_processor import InputProcessor
from cbatch.tools.tool import Tool
from cbatch.validation.validation import Validation


@dataclass(frozen=True, slots=True)
class LineProcessor:
    """Makes requests of the lines of an input.

    is_text:       lines are prompts instead of JSON
    has_columns:   each line has a row and its columns (see `parse_line`)
    allow_unknown: carry misspelt parameters along instead of refusing their row
    unit:          what messages call a line
    tools, max_tool_rounds, validation, cache, token_journal: see `RowOptions`
    takes_known:   whether rows go on with the tokens that their lines bring
    """

    inputs: InputProcessor
    is_text: bool = False
    has_columns: bool = False
    allow_unknown: bool = False
    unit: str = "line"
    tools: tuple[Tool, ...] = ()
    max_tool_rounds: int = 0
    validation: Validation | None = None
    cache: CacheConfig | None = None
    token_journal: TokenJournalConfig | None = None
    takes_known: bool = True

    @classmethod
    def of(cls, engine: SteppingEngine, options: RowOptions) -> LineProcessor:
        """Makes requests for an engine. Raises RequestError if the options' defaults are wrong."""
        inputs = engine.input_processor(options.defaults)
        return cls(
            inputs,
            is_text=options.is_text,
            has_columns=options.has_columns,
            allow_unknown=options.allow_unknown,
            unit=options.unit,
            tools=options.tools,
            max_tool_rounds=options.max_tool_rounds,
            validation=options.validation,
            cache=options.cache,
            token_journal=options.token_journal,
            takes_known=engine.model.short_context is None,  # else positions would depend on the limit of the output
        )

    def loops(self, ask: Ask) -> list[RoundLoop]:
        """What takes the answers of a batch that are not the end of their row: calls of tools, then all to validate."""
        made: list[RoundLoop] = []
        if self.tools:
            made.append(ToolLoop(self.tools, self.max_tool_rounds, self.inputs, ask))
        if self.validation is not None:
            made.append(TryLoop(self.validation, self.inputs, ask))
        return made

    def open_cache(self, engine: SteppingEngine) -> CachedOutputs | None:
        """What keeps answers from one batch to the next, if anything. Raises ConfigError if it cannot be used."""
        return CachedOutputs(engine, self.cache) if self.cache is not None else None

    def open_token_journal(self, engine: SteppingEngine) -> JournaledOutputs | None:
        """What keeps tokens of unfinished rows, if anything. Raises ConfigError if it cannot be used."""
        return JournaledOutputs(engine, self.token_journal) if self.token_journal is not None else None

    def key(self, line: Line) -> str:
        """The key of a line's row of output."""
        row = self._row(line)
        try:
            return self.inputs.request(row).key
        except RequestError as error:
            return self.inputs.refused(row, error, line.source).key

    def keyed(self, lines: Iterable[Line]) -> Iterator[tuple[Line, str]]:
        """The lines, each with the key of its row of output."""
        return ((line, self.key(line)) for line in lines)

    def failed(self, line: Line, error: RequestError) -> Completion:
        """The result of a line that nobody serves, whatever is on it."""
        row = self._row(line)
        row.key = self.key(line)
        return Completion(row, error=error)

    def process(self, line: Line) -> Request | Completion:
        """A line as a request; or, if anything is wrong with it, its result."""
        row = self._row(line)
        request = self.inputs.process(row, lambda: line.source)
        if isinstance(request, Completion):
            return request
        if row.tries:
            return self.inputs.encode(nth_try(request, row.tries + 1, []))
        if line.known and self.takes_known:
            request.known = [KnownOutput(tokens) for tokens in line.known]
        return request

    def _row(self, line: Line) -> Request:
        row = parse_line(
            line,
            is_text=self.is_text,
            has_columns=self.has_columns,
            allow_unknown=self.allow_unknown,
            unit=self.unit,
        )
        if self.tools and not (row.tools or row.raw or row.prompt_ids):
            row.tools = [tool.schema for tool in self.tools]
            row.tool_rounds = self.max_tool_rounds
        if self.validation is not None:
            row.tries, row.validation = line.tries, self.validation.identity
        if line.max_tokens is not None:
            row.given.setdefault("max_tokens", line.max_tokens)
        return row
