"""From a line of input to a request of the engine."""

from __future__ import annotations

from cbatch.base.errors import RequestError
from cbatch.base.outputs import KnownOutput
from cbatch.base.request import Request
from cbatch.batch.lines import DEFAULT_OPTIONS, Line, RowOptions, parse_line
from cbatch.batch.rounds import nth_try
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.requests.completion import Completion
from cbatch.requests.input_processor import InputProcessor


class LineProcessor:
    def __init__(
        self, inputs: InputProcessor, options: RowOptions = DEFAULT_OPTIONS, *, takes_known: bool = True
    ) -> None:
        """`takes_known`: whether rows go on with the tokens that their lines bring"""
        self.inputs, self.options, self._takes_known = inputs, options, takes_known

    @classmethod
    def of(cls, engine: SteppingEngine, options: RowOptions) -> LineProcessor:
        """Makes requests for an engine. Raises RequestError if the options' defaults are wrong."""
        # Else positions would depend on the limit of the output.
        takes_known = engine.model.short_context is None
        return cls(engine.input_processor(options.defaults), options, takes_known=takes_known)

    def key(self, line: Line) -> str:
        row = self._row(line)
        try:
            return self.inputs.request(row).key
        except RequestError as error:
            return self.inputs.refused(row, error, line.source).key

    def process(self, line: Line) -> Request | Completion:
        """A line as a request; or, if anything is wrong with it, its result."""
        row = self._row(line)
        if line.failure:
            row.key = self.key(line)
            return Completion(row, error=RequestError("internal_error", line.failure))
        request = self.inputs.process(row, lambda: line.source)
        if isinstance(request, Completion):
            return request
        if row.tries:
            return self.inputs.encode(nth_try(request, row.tries + 1, []))
        if line.known and self._takes_known:
            request.known = [KnownOutput(tokens) for tokens in line.known]
        return request

    def _row(self, line: Line) -> Request:
        options, row = self.options, parse_line(line, self.options)
        row.columns = options.defaults.columns
        if options.tools and not (row.tools or row.raw or row.prompt_ids):
            row.tools = [tool.schema for tool in options.tools]
            row.tool_rounds = options.max_tool_rounds
        if options.validation is not None:
            row.tries, row.validation = line.tries, options.validation.identity
        if line.carried is not None:
            row.extra = line.carried
        if line.max_tokens is not None:
            row.given.setdefault("max_tokens", line.max_tokens)
        return row
