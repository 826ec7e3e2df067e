"""Tables of SQLite databases: one is read as it was when the run began, and one is written in a single transaction."""

from __future__ import annotations

import io
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import IO, Any

from cbatch.base.errors import ConfigError, RequestError, RunFailed
from cbatch.batch.forms import RESULTS_TABLE
from cbatch.batch.tables.columns import REST, Column, Kind, Rows, TableRow, as_text
from cbatch.batch.tables.restored import with_cells
from cbatch.batch.templates import as_data

_BUSY_S = 60
"""How long another program may hold the database."""

_TYPES: dict[Kind, str] = {bool: "BOOLEAN", int: "INTEGER", float: "REAL"}


class DatabaseTable:
    """The rows of a table or view, in the order of its row ids. Blobs are text if they are UTF-8, else base64.

    They are copied into a temporary file at the start, so that nobody has to wait for the run, nor change its input.

    table:    name of the table
    names:    of its columns
    num_rows: how many it has
    """

    def __init__(self, stream: IO[bytes], name: str, table: str | None) -> None:
        """
        table: None: the only one, or the only one beside `RESULTS_TABLE`

        Raises ConfigError if the file is no database, or has no such table.
        """
        self._copy = _named(stream)
        uri = Path(self._copy if isinstance(self._copy, str) else self._copy.name).absolute().as_uri()
        try:
            self._database = sqlite3.connect(
                f"{uri}?mode=ro", uri=True, timeout=_BUSY_S, check_same_thread=False, isolation_level=None
            )
            found = self._database.execute(
                "SELECT name FROM main.sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite!_%' "
                "ESCAPE '!' ORDER BY rowid"
            )
            self.table = _chosen([name for (name,) in found], table, name)
            columns = self._database.execute(
                "SELECT name, type FROM pragma_table_xinfo(?) WHERE hidden != 1", [self.table]
            )
            self._kinds = {column: str(kind).upper() for column, kind in columns}
            order = "" if _has_no_row_ids(self._database, self.table) else "ORDER BY rowid"
            self._database.execute(f"CREATE TEMP TABLE copied AS SELECT * FROM main.{_quoted(self.table)} {order}")
            [(self.num_rows,)] = self._database.execute("SELECT count(*) FROM temp.copied")
        except sqlite3.Error as error:
            raise ConfigError(f"{name} cannot be read as an SQLite database: {error}.") from error
        self.names = list(self._kinds)
        self._database.text_factory = lambda data: data.decode(errors="surrogateescape")

    def rows(self) -> Iterator[TableRow]:
        are_truths = [kind in ("BOOLEAN", "BOOL") for kind in self._kinds.values()]
        for index, cells in enumerate(self._database.execute("SELECT * FROM temp.copied ORDER BY rowid")):
            where, error = f"row {index + 1}", None
            values = [
                value == 1 if is_truth and value in (0, 1) else as_data(value)
                for value, is_truth in zip(cells, are_truths, strict=True)
            ]
            try:
                "".join(value for value in cells if isinstance(value, str)).encode()
            except UnicodeEncodeError:
                error = RequestError("invalid_utf8", f"{where}: not valid UTF-8")
            yield TableRow(index, where, dict(zip(self.names, values, strict=True)), error)


def _named(stream: IO[bytes]) -> Any:
    """The path of the file that a stream reads, or a temporary copy of what has no name."""
    name = getattr(stream, "name", None) if isinstance(stream, io.BufferedReader) else None  # what unpacks has it, too
    path = Path(name) if isinstance(name, str) else None
    if path is not None and path.is_file() and os.path.samestat(os.fstat(stream.fileno()), path.stat()):
        return name
    copy = tempfile.NamedTemporaryFile()  # noqa: SIM115  # removed when it is freed
    shutil.copyfileobj(stream, copy)
    copy.flush()
    return copy


def _chosen(tables: list[str], wanted: str | None, name: str) -> str:
    """The table that is wanted. Raises ConfigError if it is not there, or none is named and there are several."""
    others = [table for table in tables if table != RESULTS_TABLE]
    alike = [table for table in tables if wanted is not None and table.lower() == wanted.lower()]
    for only in (alike,) if wanted is not None else (tables, others):
        if len(only) == 1:
            return only[0]
    has = f"it has {', '.join(tables) or 'no table'}"
    if wanted is not None or not tables:
        raise ConfigError(f"{name}: there is no such table; {has}.")
    raise ConfigError(f"Name a table of {name}, such as {name}#{others[0]}; {has}.")


def _has_no_row_ids(database: sqlite3.Connection, table: str) -> bool:
    try:
        database.execute(f"SELECT rowid FROM main.{_quoted(table)} LIMIT 0")
    except sqlite3.OperationalError:
        return True
    return False


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def has_table(path: Path, table: str) -> bool:
    """Whether a database has a table. Raises ConfigError if it is none, or something else has that name."""
    try:
        with closing(sqlite3.connect(path, timeout=_BUSY_S)) as database:
            found = database.execute("SELECT type FROM sqlite_master WHERE lower(name) = lower(?)", [table]).fetchone()
    except sqlite3.Error as error:
        raise ConfigError(f"{path} cannot be used as an SQLite database: {error}.") from error
    if found is not None and found[0] != "table":
        raise ConfigError(f"{table!r} in {path} is no table, but: {found[0]}.")
    return found is not None


def write_database(path: Path, table: str, columns: list[Column], rows: Rows) -> None:
    """Writes a table, instead of one that has its name, and leaves the rest of the database alone.

    All of it is one transaction. Raises RunFailed, with the reason, if the database does not take it.
    """
    columns, found = with_cells(rows, list(_distinct(columns)), _stored, has_blanks=False)
    names = ", ".join(f"{_quoted(column.name)} {_TYPES.get(column.kind, 'TEXT')}" for column in columns)
    try:
        with closing(sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute(f"DROP TABLE IF EXISTS main.{_quoted(table)}")
            database.execute(f"CREATE TABLE main.{_quoted(table)} ({names})")
            holes = ", ".join("?" * len(columns))
            database.executemany(f"INSERT INTO main.{_quoted(table)} VALUES ({holes})", (cells for _, cells in found))
            database.execute("COMMIT")  # what has not been committed is gone when it is closed
    except sqlite3.Error as error:
        raise RunFailed(
            f"Cannot write the table {table!r} of {path}: {error}. The rows are kept; --resume makes it of them."
        ) from error


def _distinct(columns: Iterable[Column]) -> Iterator[Column]:
    """The columns; one whose name differs from another only in case, which does not count here, gets a number."""
    columns = list(columns)
    taken = {column.name.lower() for column in columns if column.of == "answer"} | {REST}
    for column in columns:
        if column.of != "answer":
            numbered = (f"{column.name}_{number}" for number in count(2))
            name = next(name for name in chain([column.name], numbered) if name.lower() not in taken)
            taken.add(name.lower())
            column = replace(column, name=name)
        yield column


def _stored(column: Column, value: Any) -> Any:
    value = as_text(value) if isinstance(value, list | dict) else column.typed(value)
    return value + 0.0 if isinstance(value, float) else value  # a zero has no sign there
