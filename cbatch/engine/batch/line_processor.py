"""From a line of input to a request of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from cbatch.engine.base.errors import RequestError
from cbatch.engine.batch.jsonl import parse_line
from cbatch.engine.batch.lines import Line
from cbatch.engine.batch.row_options import RowOptions
from cbatch.engine.batch.tool_loop import ToolLoop
from cbatch.engine.requests.completion import Completion
from cbatch.engine.requests.input_processor import InputProcessor
from cbatch.engine.requests.request import EncodedRequest
from cbatch.engine.requests.row import InputRow
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.engine.tools.tool import Tool


@dataclass(frozen=True, slots=True)
class LineProcessor:
    """Makes requests of the lines of an input.

    is_text:       lines are prompts instead of JSON
    has_columns:   each line has a row and its columns (see `parse_line`)
    allow_unknown: carry misspelt parameters along instead of refusing their row
    unit:          what messages call a line
    tools, max_tool_rounds: see `RowOptions`
    """

    inputs: InputProcessor
    is_text: bool = False
    has_columns: bool = False
    allow_unknown: bool = False
    unit: str = "line"
    tools: tuple[Tool, ...] = ()
    max_tool_rounds: int = 0

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
        )

    def tool_loop(self, ask: Callable[[int, EncodedRequest | Completion, float], None]) -> ToolLoop | None:
        """What runs the calls of a batch's models; None if the batch brings no tools."""
        return ToolLoop(self.tools, self.max_tool_rounds, self.inputs, ask) if self.tools else None

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
        return Completion(self._row(line), key=self.key(line), error=error)

    def process(self, line: Line) -> EncodedRequest | Completion:
        """A line as a request; or, if anything is wrong with it, its result."""
        return self.inputs.process(self._row(line), lambda: line.source)

    def _row(self, line: Line) -> InputRow:
        row = parse_line(
            line,
            is_text=self.is_text,
            has_columns=self.has_columns,
            allow_unknown=self.allow_unknown,
            unit=self.unit,
        )
        if self.tools and not (row.tools or row.raw or row.prompt_token_ids is not None):
            row.tools = [tool.schema for tool in self.tools]
            row.tool_rounds = self.max_tool_rounds
        return row
