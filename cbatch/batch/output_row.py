"""A finished row as the writer takes it, and what a run counts of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class RowOutcome(NamedTuple):
    """What a run counts of a finished row. Small, so that it can be sent from the process that computed the row.

    error_code:        None if the row succeeded; else what follows the message is set only if it was validated
    prompt_tokens:     that were computed; `completion_tokens`, of all outputs, rounds and tries, likewise
    ttft_s:            seconds from when the row was taken to its first token; None without computed tokens
    tpot_s:            seconds for each token after the first one; None if no output has a second one, or one went on
    reused_tokens:     of outputs, from a cache of answers or an earlier run
    from_cache:        whether nothing was computed
    tries:             in this run, of a row that was validated
    continued_tokens:  of outputs that went on where an earlier run had ended
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


SUCCESS = RowOutcome()


@dataclass(frozen=True, slots=True)
class OutputRow:
    """A finished row of output.

    position:    among the rows of this run
    index:       of its line
    data:        its bytes, with the line end
    finished_at: seconds of `time.monotonic` of this process
    """

    position: int
    index: int
    data: bytes
    outcome: RowOutcome = SUCCESS
    finished_at: float = 0.0
