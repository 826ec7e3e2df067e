"""A row of a table as readers give it, and its values as text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from cbatch.base.errors import RequestError


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


def as_text(value: Any) -> str | None:
    """A value as it stands in a prompt, or in a cell of CSV: what is no text as JSON, and null as None."""
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
