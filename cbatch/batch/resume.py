"""Which rows of an earlier run this run keeps, which go on from where they ended, and which it runs again.

A row of a run with a lower `max_tokens` that ended by itself is the same with a higher limit, but for its key. One that
the limit has ended goes on with its tokens, if it holds them (`--token-ids`); else it is computed anew, because a text
does not tell its tokens. So is one whose answer the limit may have changed on the way: by a try that it cut off, or a
call, whose id comes of the key.

Columns that a row only carries along are in its key, too. If only they have changed, the row takes over the answer.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from tempfile import SpooledTemporaryFile
from typing import IO, Any, NamedTuple

from cbatch.batch.journal import CHECK, KEY_BYTES, SUPERSEDED, Journal, columns_digest
from cbatch.batch.lines import Line
from cbatch.batch.row import format_result, format_row
from cbatch.requests.columns import DROPPED, OF_THE_MOMENT
from cbatch.requests.responses import answer_of
from cbatch.requests.row_keys import explain_difference

MOST_LIMITS = 4
"""Limits of earlier runs that are looked for; each costs a key for each row."""

Fields = dict[str, Any]


def earlier_limits(rows: Iterable[bytes], max_tokens: int) -> list[int]:
    """Limits below `max_tokens` that have probably ended outputs of these rows, the most frequent first."""
    limits = (_limit(json.loads(row)) for row in rows)
    found = Counter(limit for limit in limits if limit is not None and limit < max_tokens)
    return [limit for limit, _ in found.most_common(MOST_LIMITS)]


def with_key(row: bytes, key: str) -> bytes | None:
    """A row as a run with a higher limit would write it, whose key is this one. None if it has to be computed."""
    ends = {one.get("finish_reason") for one in _outputs(json.loads(row))}
    return rewritten(row, key) if ends == {"stop"} else None


def rewritten(row: bytes, key: str, carried: Fields | None = None) -> bytes | None:
    """A row with the same answer and another key. None if something wrote it that writes rows in another form.

    carried: the columns that it carries along now, if they are others
    """
    fields = json.loads(row)
    fields.pop(CHECK, None)
    if row not in (format_result(fields), format_row(fields)):
        return None  # it was written by something else
    if "response" in fields:
        response, before = fields["response"], fields["key"]
        fields["id"] = f"batch_req_{key}"
        response["request_id"] = f"req_{key}"
        for named in (response["body"], *response["body"].get("output", ())):
            if "id" in named:
                named["id"] = named["id"].replace(before, key)
    if carried is not None:
        last = {name: fields.pop(name) for name in OF_THE_MOMENT if name in fields}
        fields.pop("extra", None)
        fields |= ({"extra": carried} if carried else {}) | last
    return format_result(fields | {"key": key})


def known_tokens(row: bytes) -> tuple[tuple[int, ...], ...]:
    """The tokens of each output of a row, with which it can go on; empty if the row does not hold all of them."""
    fields = json.loads(row)
    outputs = _outputs(fields)
    if "prompt_logprobs" in answer_of(fields) or any(one.get("logprobs") is not None for one in outputs):
        return ()  # which stand there rounded
    if any("token_ids" not in one for one in outputs):
        return ()
    return tuple(tuple(one["token_ids"]) for one in outputs)


def _limit(fields: Fields) -> int | None:
    outputs = _outputs(fields)
    ended = [one for one in outputs if one.get("finish_reason") == "length"]
    if not ended:
        return None
    if "token_ids" in ended[0]:
        return len(ended[0]["token_ids"])
    tokens = answer_of(fields)["usage"]["completion_tokens"]
    return int(tokens) // len(outputs) if len(ended) == len(outputs) else None


def _outputs(fields: Fields) -> list[Fields]:
    """The outputs of a row; none unless it is the answer to one request, in which only the key depends on the key."""
    if fields.get("error") is not None or fields.get("tool_messages") or DROPPED in answer_of(fields):
        return []
    if fields.get("validation", {"tries": 1})["tries"] != 1:
        return []
    outputs: list[Fields] = answer_of(fields).get("choices", [fields])
    return [] if _has_calls(outputs) else outputs


def _has_calls(outputs: Iterable[Fields]) -> bool:
    return any(one.get("tool_calls") or one.get("message", {}).get("tool_calls") for one in outputs)


Keyed = Callable[[Iterable[Line]], Iterator[tuple[Line, str]]]
"""Gives lines back in their order, each with the key of its row of output; see `BatchDriver.keyed`."""

NO_LINE = "for lines that the input does not have"


class Resuming(NamedTuple):
    """The plan for the rows of an earlier run.

    retry_errors:      keep no error rows
    recompute_changed: drop rows whose key is another one, or whose line is gone, and damaged lines
    max_tokens:        the limit of this run, if rows that a lower one has ended are to go on
    carried_by:        gives the columns that the row of a line carries along, if rows may take over answers to lines
                       that differ only there
    explain:           says why two keys differ
    unit:              what messages call a line of the input: line, or row of a table
    """

    retry_errors: bool = False
    recompute_changed: bool = False
    max_tokens: int | None = None
    carried_by: Callable[[Line], Fields] | None = None
    explain: Callable[[str, str], str] = explain_difference
    unit: str = "line"


KEEP = Resuming()


@dataclass(slots=True)
class ResumePlan:
    """Which rows of a journal this run keeps. `index in plan` tells whether a line's row is kept.

    unit:         as in Resuming
    kept:         for each index, whether its row is kept
    rows, errors: number of kept rows, and of error rows among them
    misfits:      number of rows that do not fit this run, by the reason
    first_misfit: line number of the first row with each reason
    tries:        of rows that are run again because none of them was good, by their index
    rekeyed:      numbers of kept rows that have to be written again, with the key that is in the journal by now
    rewritten:    those rows, as they are to be written; None if there are none
    carried:      number of rows that have taken over an answer to a line with other columns
    truncated:    numbers of rows that go on with their tokens, by their index
    restarted:    number of rows of a run with a lower limit that begin anew
    """

    journal: Journal = field(default_factory=Journal)
    unit: str = "line"
    kept: bytearray = field(default_factory=bytearray)
    rows: int = 0
    errors: int = 0
    misfits: Counter[str] = field(default_factory=Counter)
    first_misfit: dict[str, int] = field(default_factory=dict)
    tries: dict[int, int] = field(default_factory=dict)
    rekeyed: array[int] = field(default_factory=lambda: array("q"))
    rewritten: IO[bytes] | None = None
    carried: int = 0
    truncated: dict[int, int] = field(default_factory=dict)
    restarted: int = 0

    @property
    def fits(self) -> bool:
        return not self.misfits and not self.journal.damaged

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and index < len(self.kept) and bool(self.kept[index])

    def keep(self, index: int, is_error: bool) -> None:
        self.kept.extend(bytes(max(index + 1 - len(self.kept), 0)))
        self.kept[index] = True
        self.rows += 1
        self.errors += is_error

    def take_over(self, index: int, number: int, key: str, row: bytes) -> None:
        """Keeps a row that has to be written again."""
        journal = self.journal
        journal.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES] = bytes.fromhex(key)
        self.keep(index, bool(journal.failed[number]))
        self.rekeyed.append(number)
        self.rewritten = self.rewritten or SpooledTemporaryFile(2**20)  # noqa: SIM115  # whoever reads it closes it
        self.rewritten.write(row)

    def add_misfit(self, reason: str, index: int) -> None:
        self.misfits[reason] += 1
        self.first_misfit.setdefault(reason, index + 1)

    def with_history(self, lines: Iterable[Line]) -> Iterator[Line]:
        """The lines, each with what earlier runs have done for its row.

        That is the number of tries, so that further ones are other ones, or the tokens with which the row goes on.
        """
        for line in lines:
            if line.index in self.tries:
                yield replace(line, tries=self.tries[line.index])
            elif line.index in self.truncated:
                yield replace(line, known=known_tokens(self.journal.row(self.truncated[line.index])))
            else:
                yield line

    def __str__(self) -> str:
        """Says what does not fit: changed lines first, then lines that are missing, then those that are damaged."""
        reasons = sorted(self.misfits, key=NO_LINE.__eq__)
        parts = [f"{self.misfits[one]:,} {one} (first: {self.unit} {self.first_misfit[one]})" for one in reasons]
        return "; ".join([*parts, self.journal.damage()] if self.journal.damaged else parts)


def plan_resume(journal: Journal, lines: Iterator[Line], keyed: Keyed, how: Resuming = KEEP) -> ResumePlan:
    """Compares a journal with the input, and marks the rows that this run has to compute again as superseded.

    lines:      read up to the last one that has a row in the journal
    keyed:      gets the lines whose row may be kept
    """
    plan = ResumePlan(journal, how.unit)
    limits: Sequence[int] = ()
    if how.max_tokens is not None:
        limits = earlier_limits(map(journal.row, journal.rows(input_order=True)), how.max_tokens)
    compared: deque[tuple[int, Fields | None]] = deque()
    """Rows whose lines `keyed` has taken and not yet given back, since it may read ahead, and columns that are new."""
    keys = keyed(_lines_to_compare(plan, lines, compared, limits, how))
    for line, key in keys:
        number, carried = compared.popleft()
        is_carried = carried is not None and next(keys)[1] == journal.key(number)
        earlier = [other for _, other in islice(keys, len(limits))]
        if key == journal.key(number):
            plan.keep(line.index, bool(journal.failed[number]))
        elif is_carried and (made := _with_columns(journal.row(number), key, carried)) is not None:
            plan.take_over(line.index, number, key, made)
            plan.carried += 1
        elif journal.key(number) not in earlier:
            plan.add_misfit(f"made with {how.explain(key, journal.key(number))}", line.index)
            journal.indices[number] = SUPERSEDED
        elif (made := with_key(row := journal.row(number), key)) is not None:
            plan.take_over(line.index, number, key, made)
        else:
            journal.indices[number] = SUPERSEDED
            if known_tokens(row):
                plan.truncated[line.index] = number
            else:
                plan.restarted += 1
    return plan


def _with_columns(row: bytes, key: str, carried: Fields | None) -> bytes | None:
    """A row that has taken over an answer. None if that has calls, whose ids come of the key."""
    fields = json.loads(row)
    outputs = answer_of(fields).get("choices", [fields]) if fields.get("error") is None else []
    return None if fields.get("tool_messages") or _has_calls(outputs) else rewritten(row, key, carried)


def _lines_to_compare(
    plan: ResumePlan,
    lines: Iterator[Line],
    compared: deque[tuple[int, Fields | None]],
    limits: Sequence[int],
    how: Resuming,
) -> Iterator[Line]:
    """The lines whose row is kept if its key fits, each again with the limits that earlier runs may have had.

    Before those it comes with the columns that its row carries along, if they are others.

    Marks rows that are not kept whatever their key is: among them error rows before a damaged line, because it may have
    replaced them.
    """
    journal = plan.journal
    last_damaged = max(journal.damaged, default=-1)
    line = next(lines, None)
    for number in journal.rows(input_order=True):
        index = journal.indices[number]
        while line is not None and line.index < index:
            line = next(lines, None)
        if line is None or line.index > index:
            plan.add_misfit(NO_LINE, index)
        elif not (journal.failed[number] and (how.retry_errors or number < last_damaged)):
            columns = how.carried_by(line) if how.carried_by is not None else None
            is_same = columns is None or columns_digest(columns) == journal.columns[number]
            compared.append((number, None if is_same else columns))
            yield line
            if not is_same:
                yield replace(line, carried=json.loads(journal.row(number)).get("extra", {}))
            yield from (replace(line, max_tokens=limit) for limit in limits)
            continue
        elif how.retry_errors and number in journal.tries:
            plan.tries[index] = journal.tries[number]
        journal.indices[number] = SUPERSEDED
