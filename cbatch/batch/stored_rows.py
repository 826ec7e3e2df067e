"""The rows of an output file, for whoever compares them with something. The file may still be growing."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from cbatch.base.errors import ConfigError
from cbatch.batch.journal import Journal
from cbatch.batch.tables.compression import READ_ERRORS, decompressed


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A row of output as the file has it.  fields: its JSON"""

    index: int
    key: str
    fields: dict[str, Any]


class StoredRows:
    """The rows of a file of JSON Lines, which may be compressed; the last one of each index counts.

    Used as a context. Keeps some 40 bytes for each row.

    journal: says also which lines are damaged, which are no rows here
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be read, or no line of it was a row of output."""
        self._name = str(path)
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
        try:
            self.journal = Journal.read(decompressed(self._file), self._name)
        except READ_ERRORS as error:
            raise ConfigError(f"{self._name} cannot be read: {error}.") from error
        self._numbers = array("q", self.journal.rows(input_order=True))

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, places: Iterable[int]) -> Iterator[StoredRow]:
        """Yields some of the rows in the order of the file.

        places: of the rows among those that count, in the order of their indices
        """
        wanted = {self._numbers[place] for place in places}
        self._file.seek(0)
        for number, line in enumerate(decompressed(self._file)):
            if number in wanted:
                yield StoredRow(self.journal.indices[number], self.journal.key(number), json.loads(line))
                wanted.remove(number)
                if not wanted:
                    return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
