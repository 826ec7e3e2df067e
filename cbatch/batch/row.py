"""A row on its way from its line to its file, and what a run counts of it.

Nothing here imports torch: the process that drives replicas needs none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from cbatch.base.request import Request
from cbatch.batch.journal import with_check
from cbatch.batch.lines import Line
from cbatch.requests.columns import DROPPED
from cbatch.requests.completion import Completion, Usage

if TYPE_CHECKING:
    from cbatch.requests.output_processor import OutputProcessor

_ENCODER = json.JSONEncoder(ensure_ascii=False)


class RowOutcome(NamedTuple):
    """Figures of a finished row that a run counts. Small, so that they can be sent between processes.

    error_code:        None if the row succeeded; else what follows the message is set only if it was validated
    prompt_tokens:     that were computed; `completion_tokens`, of all outputs, rounds and tries, likewise
    ttft_s:            seconds from when the row got a slot to its first token; None without computed tokens
    tpot_s:            seconds for each token after the first one; None if no output has a second one, or one went on
    reused_tokens:     of outputs, from a cache of answers or an earlier run
    from_cache:        whether nothing was computed
    tries:             in this run, of a row that was validated
    continued_tokens:  of outputs that went on where an earlier run had ended
    reasoning_tokens:  of `completion_tokens`
    truncated:         whether an output was cut off; `incomplete_form`: inside a form that it was to have
    empty:             whether an output has neither text nor tool calls. Error rows are none of these
    dropped_tokens:    of the prompt, which was too long
    invalid_cut:       whether no answer was good, and an output was cut off; `is_last_try`: see `Completion`
    """

    error_code: str | None = None
    error_message: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None
    reused_tokens: int = 0
    from_cache: bool = False
    tries: int = 0
    continued_tokens: int = 0
    reasoning_tokens: int = 0
    truncated: bool = False
    incomplete_form: bool = False
    empty: bool = False
    dropped_tokens: int = 0
    invalid_cut: bool = False
    is_last_try: bool = False

    @classmethod
    def of(cls, completion: Completion) -> RowOutcome:
        error, validation = completion.error, completion.validation
        code, message = (None, "") if error is None else (error.code, str(error))
        if error is not None and validation is None:
            return cls(code, message)
        cut = [one for one in completion.choices if one.finish_reason == "length"]
        outputs = completion.choices
        is_whole = error is not None or all(one.text.strip() or one.tool_calls or one.score for one in outputs)
        timing, usage, reused = completion.timing, completion.usage, completion.reused
        ttft_s = tpot_s = None
        if timing.first_token_at is not None and not completion.from_cache:
            ttft_s = timing.first_token_at - timing.taken_at
            longest = max(len(choice.token_ids) for choice in completion.choices)
            if longest > 1 and not completion.continued_tokens:
                tpot_s = (timing.finished_at - timing.first_token_at) / (longest - 1)
        return cls(
            code,
            message,
            usage.prompt_tokens - reused.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens - reused.completion_tokens,
            ttft_s,
            tpot_s,
            reused.completion_tokens,
            completion.from_cache,
            len(validation["errors"]) + validation["valid"] if validation is not None else 0,
            completion.continued_tokens,
            usage.reasoning_tokens - reused.reasoning_tokens,
            error is None and bool(cut),
            error is None and completion.has_form and not all(one.closed for one in cut),
            completion.has_text and not is_whole,
            completion.request_columns.get(DROPPED, 0),
            error is not None and not all(one.closed for one in cut),
            completion.is_last_try,
        )


SUCCESS, NO_TOKENS, NO_LINE = RowOutcome(), Usage(), Line(0, None)


@dataclass(eq=False, slots=True)
class Row:
    """A row of a run. Who computes it fills it in as it goes.

    position:   among the rows of this run
    index:      of its line
    outcome:    set once it is finished, like `finished_at`, in seconds of `time.monotonic` of this process
    completion: its result; None if another process has computed it

    As long as an engine of this process computes it:
    line:          what was read
    taken_at:      when that was, in seconds of `time.monotonic`; once it is answered: when it got its first slot
    request:       what the engine is asked now: first what the line asks, later what follows on the answers to that
    outputs:       what the engine has answered to it so far
    limit:         most tokens of each output; `tokens`: of the prompt and, probably, the outputs
    unfinished:    number of outputs that the engine goes on with
    beginning:     what the prompt has in common with others that begin alike (see `feed.beginning_of`)
    usage, reused: of all answers so far; see `Completion`

    As long as replicas compute it:
    beginnings: hashes of the first bytes of its prompt, the shortest first
    holders:    numbers of the replicas that it was given to
    deaths:     how many of them have died
    """

    position: int
    index: int
    _data: bytes = b""
    outcome: RowOutcome = SUCCESS
    finished_at: float = 0.0
    completion: Completion | None = None
    line: Line = field(default=NO_LINE, init=False)
    taken_at: float = field(init=False)
    request: Request = field(init=False)
    outputs: OutputProcessor = field(init=False)
    limit: int = field(init=False)
    unfinished: int = 0
    tokens: int = field(init=False)
    beginning: int | None = field(init=False)
    usage: Usage = NO_TOKENS
    reused: Usage = NO_TOKENS
    beginnings: tuple[int, ...] = ()
    holders: list[int] = field(init=False)
    deaths: int = 0

    @property
    def has_failed(self) -> bool:
        """Whether it is an error row."""
        return self.outcome.error_code is not None

    @property
    def data(self) -> bytes:
        """The row of output, with the line end. It is made when it is first asked for."""
        if not self._data and self.completion is not None:
            self._data = format_result(self.completion.to_dict())
        return self._data

    def finish(self, completion: Completion) -> None:
        self.completion, self.outcome = completion, RowOutcome.of(completion)
        self.finished_at = completion.timing.finished_at

    def receive(self, data: bytes, outcome: RowOutcome, finished_at: float) -> None:
        """Sets what another process has computed."""
        self._data, self.outcome, self.finished_at = data, outcome, finished_at


def format_result(fields: dict[str, Any]) -> bytes:
    """A row of output, with its check."""
    return with_check(format_row(fields))


def format_row(fields: dict[str, Any]) -> bytes:
    """A row of output without a check, as older versions wrote it."""
    return _ENCODER.encode(fields).encode("utf-8", "replace") + b"\n"
