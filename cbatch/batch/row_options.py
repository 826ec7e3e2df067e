"""How the lines of a batch become requests, and their results rows of output."""

from __future__ import annotations

from dataclasses import dataclass, field

from cbatch.base.request import RequestDefaults
from cbatch.batch.answer_cache import CacheConfig
from cbatch.batch.token_journal import TokenJournalConfig
from cbatch.tools.tool import MAX_TOOL_ROUNDS, Tool
from cbatch.validation.validation import Validation


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Options of all rows of a batch. Can be sent to the process that computes them.

    is_text:       lines are prompts instead of JSON
    has_columns:   each line is `{"columns": ..., "row": ...}`: a row, and columns whose names have no meaning but `id`
    unit:          what messages call a line: `line`, or `row` of a table
    allow_unknown: carry misspelt parameters along instead of refusing their row
    tools:         run what models call of these, in conversations whose rows bring no tools of their own
    max_tool_rounds: rounds of calls in one row, after which its model has to answer without tools
    validation:      what makes an answer good, and how often a model may try
    cache:           where answers are kept and taken from
    reorders:        whether rows may begin in another order than they come; changes no row
    """

    defaults: RequestDefaults = field(default_factory=RequestDefaults)
    is_text: bool = False
    has_columns: bool = False
    unit: str = "line"
    allow_unknown: bool = False
    tools: tuple[Tool, ...] = ()
    max_tool_rounds: int = MAX_TOOL_ROUNDS
    validation: Validation | None = None
    cache: CacheConfig | None = None
    reorders: bool = True
    token_journal: TokenJournalConfig | None = None


DEFAULT_OPTIONS = RowOptions()
