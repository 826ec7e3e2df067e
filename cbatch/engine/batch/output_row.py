"""A finished row as the writer takes it, and what a run counts of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class RowOutcome(NamedTuple):
    """What a run counts of a finished row. Small, so that it can be sent from the process that computed the row.

    error_code:        None if the row succeeded; what follows the message is only set then
    completion_tokens: of all outputs of the row
    ttft_s:            seconds from when the row was taken to its first token; None without tokens
    tpot_s:            seconds for each token after the first one; None if no output has a second one
    """

    error_code: str | None = None
    error_message: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None


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
