"""The lines of an input, read one at a time in bounded memory, and the options with which they become rows."""

from __future__ import annotations

import hashlib
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from cbatch.base.errors import RequestError, RunFailed, as_error
from cbatch.base.request import Request, RequestDefaults
from cbatch.base.strict_json import parse_json_object
from cbatch.base.units import format_count, word_for
from cbatch.batch.answer_cache import CacheConfig
from cbatch.batch.token_journal import TokenJournalConfig
from cbatch.requests.embeddings import EMBED, fill_embedding
from cbatch.requests.rows import fill_broken, fill_row, fill_with_columns
from cbatch.requests.scores import SCORE, continuations_in
from cbatch.tools.tool import MAX_TOOL_ROUNDS, Tool
from cbatch.validation.validation import Validation

MAX_LINE_BYTES = 16 * 2**20

BOM = b"\xef\xbb\xbf"
"""First bytes of a file in UTF-8 that some programs write."""

LATIN1_HINT = " (perhaps Latin-1): iconv -f LATIN1 -t UTF-8 converts it, if all of it is"


@dataclass(frozen=True, slots=True)
class Line:
    """One physical line of the input, without its line end.

    data:   None if the line is longer than MAX_LINE_BYTES
    digest: hash of such a line, which goes into its key
    error:  why there is no row, if that is known already; `data` may then hold the row's `id`
    failure: why its row is not run, whatever is on it; its key is that of the row
    has_empty_column: whether a column that its prompt uses is empty
    tries:  how many tries earlier runs have given its row
    known:  tokens of the outputs of its row that an earlier run has generated
    max_tokens: what holds for its row if the row says nothing, instead of what the options say; for keys of other runs
    carried: columns that its row is to carry along instead of its own; for keys of other runs, too
    """

    index: int
    data: bytes | None
    digest: bytes = b""
    error: RequestError | None = None
    tries: int = 0
    known: tuple[tuple[int, ...], ...] = ()
    max_tokens: int | None = None
    failure: str = ""
    carried: dict[str, Any] | None = None
    has_empty_column: bool = False

    @classmethod
    def of(cls, index: int, data: bytes) -> Line:
        """A line that is whole in memory, and may be too long."""
        return cls(index, data) if len(data) <= MAX_LINE_BYTES else cls(index, None, line_digest(data).digest())

    def text(self, where: str) -> str:
        """Raises RequestError, which says where the line is, if it is too long or not UTF-8."""
        if self.data is None:
            raise RequestError("line_too_long", f"{where} is longer than {MAX_LINE_BYTES >> 20} MiB")
        try:
            return self.data.decode()
        except UnicodeDecodeError as error:
            reason = f"{where}, byte {error.start + 1}: not valid UTF-8 ({error.reason})"
            raise RequestError("invalid_utf8", reason) from None

    @property
    def source(self) -> bytes:
        """The content of a refused line's key: all that its row of output depends on."""
        if self.error is not None:
            return (self.data or b"") + f"{self.error.code}: {self.error}".encode("utf-8", "replace")
        return self.digest if self.data is None else self.data

    def __reduce__(self) -> tuple[type[Line], tuple[object, ...]]:
        # Quicker than what a frozen dataclass does.
        own = (self.index, self.data, self.digest, self.error, self.tries, self.known, self.max_tokens, self.failure)
        return Line, (*own, self.carried, self.has_empty_column)


class PromptFigures:
    """Counts rows in which a column that the prompt uses is empty, and prompts that were cut."""

    def __init__(self) -> None:
        self.empty = self.cut = self.dropped_tokens = 0
        self._first: list[int] = []

    def add(self, line: Line, dropped_tokens: int) -> None:
        self.cut += dropped_tokens > 0
        self.dropped_tokens += dropped_tokens
        if line.has_empty_column:
            self.empty += 1
            self._first = sorted([*self._first, line.index])[:5]

    def as_dict(self) -> dict[str, object]:
        """As --check and --stats show it."""
        columns = {"empty_columns": self.empty, "first_empty_columns": self._first}
        return columns | {"cut_prompts": self.cut, "dropped_prompt_tokens": self.dropped_tokens}

    def sentence(self, unit: str) -> str:
        """Where columns are empty, for people, who count from 1; empty if there are no such rows."""
        where = ", ".join(f"{index + 1:,}" for index in self._first) + (" …" if self.empty > len(self._first) else "")
        have = f"{format_count(self.empty, 'row')} {word_for(self.empty, 'has', 'have')} nothing"
        what = f"{have} in a column that the prompt uses: {word_for(self.empty, unit, f'{unit}s')} {where}"
        return what if self.empty else ""


def taken_twice(lines: Iterator[Line]) -> tuple[Iterator[Line], Callable[[], Iterator[Line]]]:
    """The lines, and what gives those that were taken once more, and then the rest; it may be called once.

    They are kept in an unnamed temporary file, which no crash leaves behind.
    """
    kept = tempfile.TemporaryFile()  # noqa: SIM115

    def first() -> Iterator[Line]:
        for line in lines:
            pickle.dump(line, kept)
            yield line

    def again() -> Iterator[Line]:
        kept.seek(0)
        with suppress(EOFError):
            while True:
                yield pickle.load(kept)
        yield from lines

    return first(), again


def read_lines(stream: IO[bytes]) -> Iterator[Line]:
    """Yields the lines that are not blank, without a BOM at the start and CRs at the ends. Only `\\n` ends a line.

    Reads at most one line ahead.
    """
    index = 0
    limit = MAX_LINE_BYTES + 2  # room for a line end of two bytes
    while data := stream.readline(limit):
        text = data.rstrip(b"\r\n")
        if len(text) > MAX_LINE_BYTES or (len(data) == limit and not data.endswith(b"\n")):
            yield Line(index, None, _skip(stream, data))
        else:
            if index == 0:
                text = text.removeprefix(BOM)
            if text.strip():
                yield Line(index, text)
        index += 1


def checked_lines(lines: Iterable[Line]) -> Iterator[Line]:
    """The lines. Raises RunFailed, with a sentence, for what reading them raises."""
    try:
        yield from lines
    except GeneratorExit:
        raise
    except BaseException as raised:
        error = as_error(raised)
        raise RunFailed(f"Cannot read the input: {str(error).rstrip('.')}.") from raised


def _skip(stream: IO[bytes], data: bytes) -> bytes:
    """Reads the rest of a line that begins with `data`, and returns the hash of the whole line."""
    digest = line_digest()
    while not data.endswith(b"\n") and (more := stream.readline(MAX_LINE_BYTES)):
        if len(more) > 2:
            digest.update(data)
            data = more
        else:  # perhaps only the line end, whose CR was read before
            data += more
    digest.update(data.rstrip(b"\r\n"))
    return digest.digest()


def line_digest(data: bytes | bytearray = b"") -> hashlib.blake2b:
    """The hash of a line that is too long to be kept."""
    return hashlib.blake2b(data, digest_size=16)


def place_of(index: int, unit: str) -> str:
    """Where a row stands, for messages."""
    return f"{unit} {index if unit == 'item' else index + 1}"


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Options of all rows of a batch. Can be sent to the process that computes them.

    is_text:       lines are prompts instead of JSON
    has_columns:   each line is `{"columns": ..., "row": ...}`: a row, and columns whose names have no meaning but `id`
    scores:        every row is a score row (see `requests/scores.py`)
    embeds:        every row is embedded (see `requests/embeddings.py`)
    unit:          what messages call a line: `line`, `row` of a table, or `item` of a program, whose first is 0
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
    scores: bool = False
    embeds: bool = False
    unit: str = "line"
    allow_unknown: bool = False
    tools: tuple[Tool, ...] = ()
    max_tool_rounds: int = MAX_TOOL_ROUNDS
    validation: Validation | None = None
    cache: CacheConfig | None = None
    reorders: bool = True
    token_journal: TokenJournalConfig | None = None


DEFAULT_OPTIONS = RowOptions()


def parse_line(line: Line, options: RowOptions = DEFAULT_OPTIONS) -> Request:
    """Reads one line. Does not raise: whatever is wrong with the line is the row's `error`."""
    row = Request(index=line.index, where=place_of(line.index, options.unit))
    try:
        text = line.text(row.where)
        if options.is_text:
            if options.embeds:
                fill_embedding(row, {"input": text})
            else:
                row.text, row.raw, row.continuations = text, options.scores, [None] if options.scores else []
        else:
            fields = parse_json_object(text, row.where, "a row")
            asked = fields["row"] if options.has_columns else fields
            if options.scores:
                of_columns = continuations_in(fields["columns"]) if options.has_columns else {}
                asked = {SCORE: True, **of_columns, **asked}
            asked = {EMBED: True, **asked} if options.embeds else asked
            if options.has_columns:
                fill_with_columns(row, asked, fields["columns"], allow_unknown=options.allow_unknown)
            else:
                fill_row(row, asked, allow_unknown=options.allow_unknown)
    except RequestError as error:
        row.error = error
        is_json = not (options.is_text or options.has_columns)
        if is_json and line.data and error.code in ("invalid_json", "invalid_utf8"):
            fill_broken(row, line.data)
    except Exception as unforeseen:  # one line that breaks something harms no other
        row = Request(index=row.index, where=row.where)
        row.error = row.invalid(f"the row cannot be read: {unforeseen!r}", "internal_error")
    if line.error is not None:
        row.error = line.error
    return row
