"""A table as its readers give it: named columns, and rows one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cbatch.engine.base.errors import RequestError


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a table.

    index:   0-based number of the row; what names the columns is none
    where:   where it stands, for messages: “row 3 (line 5)”
    columns: values in the types of JSON, by the names of their columns
    error:   why the row cannot be read; `columns` then holds what is known of it
    """

    index: int
    where: str
    columns: dict[str, Any]
    error: RequestError | None = None


class Table(Protocol):
    """Names of columns, which have been read already, and rows, which can be taken once."""

    @property
    def names(self) -> Sequence[str]: ...

    def rows(self) -> Iterator[TableRow]: ...
