"""Which columns a table of results has, and what stands in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag
from typing import Any

from cbatch.batch.tables.result_columns import ALWAYS, ANSWER, FIRST, LAST, input_names, split_result


class Kinds(IntFlag):
    """Kinds of values that a column has been seen to hold, beside null."""

    NONE = 0
    BOOL = 1
    INT = 2
    FLOAT = 4
    TEXT = 8
    OTHER = 16


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table.

    source:   name of the value in the answer, or in the columns of the input
    is_input: which of both
    kinds:    what it holds
    """

    name: str
    source: str
    is_input: bool
    kinds: Kinds


class TableLayout:
    """Collects the columns of all rows, since a table names them before its first row.

    errors: number of error rows
    """

    def __init__(self) -> None:
        self._answer = dict.fromkeys(ALWAYS, Kinds.NONE)
        self._input: dict[str, Kinds] = {}
        self.errors = 0

    def add(self, fields: Mapping[str, Any]) -> None:
        """Takes the columns of a row of results into account."""
        answer, columns = split_result(fields)
        self.errors += answer["error_code"] is not None
        for seen, values in ((self._answer, answer), (self._input, columns)):
            for name, value in values.items():
                seen[name] = seen.get(name, Kinds.NONE) | _kind(value)

    def columns(self) -> list[Column]:
        """The columns in their order: index, `id` if a row has one, those of the input, the answer, the key."""
        first = [name for name in FIRST if name != "id" or self._answer[name]]
        more = [name for name in self._answer if name not in ALWAYS]
        names = input_names(self._input, {*first, *ANSWER, *more, *LAST})
        inputs = [Column(names[name], name, True, kinds) for name, kinds in self._input.items()]
        before, after = (
            [Column(name, name, False, self._answer[name]) for name in some]
            for some in (first, (*ANSWER, *more, *LAST))
        )
        return before + inputs + after


def values_of(fields: Mapping[str, Any], columns: list[Column]) -> list[Any]:
    """The values of a row of results in the order of the columns; None for what it does not have."""
    answer, inputs = split_result(fields)
    return [(inputs if column.is_input else answer).get(column.source) for column in columns]


def _kind(value: Any) -> Kinds:
    if value is None:
        return Kinds.NONE
    if isinstance(value, bool):
        return Kinds.BOOL
    if isinstance(value, int):
        return Kinds.INT if -(2**63) <= value < 2**63 else Kinds.OTHER
    return Kinds.FLOAT if isinstance(value, float) else Kinds.TEXT if isinstance(value, str) else Kinds.OTHER
