"""Which rows of an earlier run this run keeps, which go on from where they ended, and which it runs again.

A row of a run with a lower `max_tokens` that ended by itself is the same with a higher limit, but for its key. One that
the limit has ended goes on with its tokens, if it holds them (`--token-ids`); else it is computed anew, because a text
does not tell its tokens. So is one whose answer the limit may have changed on the way: by a try that it cut off, or a
call, whose id comes of the key.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

from cbatch.batch.journal import CHECK, KEY_BYTES, SUPERSEDED, Journal
from cbatch.batch.lines import Line
from cbatch.batch.row import format_result, format_row
from cbatch.requests.columns import DROPPED
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
    fields = json.loads(row)
    if {one["finish_reason"] for one in _outputs(fields)} != {"stop"}:
        return None
    fields.pop(CHECK, None)
    if row not in (format_result(fields), format_row(fields)):
        return None  # it was written by something else
    if "response" in fields:
        response, before = fields["response"], fields["key"]
        fields["id"] = f"batch_req_{key}"
        response["request_id"] = f"req_{key}"
        response["body"]["id"] = response["body"]["id"].replace(before, key)
    return format_result(fields | {"key": key})


def known_tokens(row: bytes) -> tuple[tuple[int, ...], ...]:
    """The tokens of each output of a row, with which it can go on; empty if the row does not hold all of them."""
    fields = json.loads(row)
    outputs = _outputs(fields)
    if "prompt_logprobs" in _body(fields) or any(one.get("logprobs") is not None for one in outputs):
        return ()  # which stand there rounded
    if any("token_ids" not in one for one in outputs):
        return ()
    return tuple(tuple(one["token_ids"]) for one in outputs)


def _limit(fields: Fields) -> int | None:
    outputs = _outputs(fields)
    ended = [one for one in outputs if one["finish_reason"] == "length"]
    if not ended:
        return None
    if "token_ids" in ended[0]:
        return len(ended[0]["token_ids"])
    tokens = _body(fields)["usage"]["completion_tokens"]
    return int(tokens) // len(outputs) if len(ended) == len(outputs) else None


def _body(fields: Fields) -> Fields:
    """The fields of an answer: of the row, or of the body of an OpenAI response."""
    body: Fields = fields["response"]["body"] if "response" in fields else fields
    return body


def _outputs(fields: Fields) -> list[Fields]:
    """The outputs of a row; none unless it is the answer to one request, in which only the key depends on the key."""
    if fields.get("error") is not None or fields.get("tool_messages") or DROPPED in _body(fields):
        return []
    if fields.get("validation", {"tries": 1})["tries"] != 1:
        return []
    outputs: list[Fields] = _body(fields).get("choices", [fields])
    has_calls = any(one.get("tool_calls") or one.get("message", {}).get("tool_calls") for one in outputs)
    return [] if has_calls else outputs


Keyed = Callable[[Iterable[Line]], Iterator[tuple[Line, str]]]
"""Gives lines back in their order, each with the key of its row of output; see `BatchDriver.keyed`."""

NO_LINE = "for lines that the input does not have"


class Resuming(NamedTuple):
    """The plan for the rows of an earlier run.

    retry_errors:      keep no error rows
    recompute_changed: drop rows whose key is another one, or whose line is gone, and damaged lines
    max_tokens:        the limit of this run, if rows that a lower one has ended are to go on
    """

    retry_errors: bool = False
    recompute_changed: bool = False
    max_tokens: int | None = None


KEEP = Resuming()


@dataclass(slots=True)
class ResumePlan:
    """Which rows of a journal this run keeps. `index in plan` tells whether a line's row is kept.

    kept:         for each index, whether its row is kept
    rows, errors: number of kept rows, and of error rows among them
    misfits:      number of rows that do not fit this run, by the reason
    first_misfit: line number of the first row with each reason
    tries:        of rows that are run again because none of them was good, by their index
    rekeyed:      numbers of kept rows that have to be written again, with the key that is in the journal by now
    truncated:    numbers of rows that go on with their tokens, by their index
    restarted:    number of rows of a run with a lower limit that begin anew
    """

    journal: Journal = field(default_factory=Journal)
    kept: bytearray = field(default_factory=bytearray)
    rows: int = 0
    errors: int = 0
    misfits: Counter[str] = field(default_factory=Counter)
    first_misfit: dict[str, int] = field(default_factory=dict)
    tries: dict[int, int] = field(default_factory=dict)
    rekeyed: array[int] = field(default_factory=lambda: array("q"))
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
        parts = [f"{self.misfits[one]:,} {one} (first: line {self.first_misfit[one]})" for one in reasons]
        return "; ".join([*parts, self.journal.damage()] if self.journal.damaged else parts)


def plan_resume(journal: Journal, lines: Iterator[Line], keyed: Keyed, how: Resuming = KEEP) -> ResumePlan:
    """Compares a journal with the input, and marks the rows that this run has to compute again as superseded.

    lines:      read up to the last one that has a row in the journal
    keyed:      gets the lines whose row may be kept
    """
    plan = ResumePlan(journal)
    limits: Sequence[int] = ()
    if how.max_tokens is not None:
        limits = earlier_limits(map(journal.row, journal.rows(input_order=True)), how.max_tokens)
    compared: deque[int] = deque()
    """Rows whose lines `keyed` has taken and not yet given back: it may read ahead."""
    keys = keyed(_lines_to_compare(plan, lines, compared, limits, retry_errors=how.retry_errors))
    for line, key in keys:
        number, earlier = compared.popleft(), [other for _, other in islice(keys, len(limits))]
        if key == journal.key(number):
            plan.keep(line.index, bool(journal.failed[number]))
        elif journal.key(number) not in earlier:
            plan.add_misfit(f"made with {explain_difference(key, journal.key(number))}", line.index)
            journal.indices[number] = SUPERSEDED
        elif with_key(row := journal.row(number), key) is not None:
            journal.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES] = bytes.fromhex(key)
            plan.keep(line.index, is_error=False)
            plan.rekeyed.append(number)
        else:
            journal.indices[number] = SUPERSEDED
            if known_tokens(row):
                plan.truncated[line.index] = number
            else:
                plan.restarted += 1
    return plan


def _lines_to_compare(
    plan: ResumePlan, lines: Iterator[Line], compared: deque[int], limits: Sequence[int], *, retry_errors: bool
) -> Iterator[Line]:
    """The lines whose row is kept if its key fits, each again with the limits that earlier runs may have had.

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
        elif not (journal.failed[number] and (retry_errors or number < last_damaged)):
            compared.append(number)
            yield line
            yield from (replace(line, max_tokens=limit) for limit in limits)
            continue
        elif retry_errors and number in journal.tries:
            plan.tries[index] = journal.tries[number]
        journal.indices[number] = SUPERSEDED
