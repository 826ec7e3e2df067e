"""What is still to be computed of a batch, as far as it is known."""

from __future__ import annotations

from typing import NamedTuple

PROMPT_TOKENS_PER_OUTPUT_TOKEN = 8
"""Tokens of a prompt that take about as long as one of an output, because many are computed at once."""


class WorkAhead(NamedTuple):
    """The rows that were read and are not finished.

    rows:           their number
    prompt_tokens:  of all their prompts; `prompts_to_come`, of those of which nothing was generated yet
    output_tokens:  that they will probably still get
    longest_likely: of these, those of the output that gets the most
    longest:        most tokens that one output may still get
    is_last:        whether the input has ended, and all rows were given to the engine
    """

    rows: int = 0
    prompt_tokens: int = 0
    prompts_to_come: int = 0
    output_tokens: int = 0
    longest_likely: int = 0
    longest: int = 0
    is_last: bool = False
