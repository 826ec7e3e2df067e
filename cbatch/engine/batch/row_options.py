"""How the lines of a batch become requests, and their results rows of output."""

from __future__ import annotations

from dataclasses import dataclass, field

from cbatch.engine.base.request_defaults import RequestDefaults


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Options of all rows of a batch. Can be sent to the process that computes them.

    is_text:       lines are prompts instead of JSON
    allow_unknown: carry misspelt parameters along instead of refusing their row
    timings:       add times and cached tokens to each row of output
    """

    defaults: RequestDefaults = field(default_factory=RequestDefaults)
    is_text: bool = False
    allow_unknown: bool = False
    timings: bool = False
