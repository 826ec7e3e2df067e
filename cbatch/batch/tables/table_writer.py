"""Results as a table: made of the journal once all rows are finished, by an atomic replace."""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

from cbatch.base.errors import ConfigError, os_errors_as
from cbatch.batch.forms import (
    BLANKS,
    READ_ERRORS,
    RESULTS_TABLE,
    Compression,
    OutputForm,
    ResultForm,
    check_output,
    compressed,
    decompressed,
    resolved,
    split_table,
)
from cbatch.batch.journal import Journal
from cbatch.batch.lines import Line
from cbatch.batch.resume import KEEP, Keyed, ResumePlan, Resuming
from cbatch.batch.tables.columns import ALWAYS, Column, Rows, TableLayout, TableRow, is_result
from cbatch.batch.tables.csv_table import write_csv
from cbatch.batch.tables.database import has_table, write_database
from cbatch.batch.tables.json_array import read_array, write_array
from cbatch.batch.tables.npy_array import write_npy
from cbatch.batch.tables.parquet_table import write_parquet
from cbatch.batch.tables.restored import restored
from cbatch.batch.tables.row_input import open_table, row_of_line
from cbatch.batch.tables.workbook import write_workbook
from cbatch.batch.token_journal import token_journal_of
from cbatch.batch.writer import FileWriter, require_file


def open_results(path: Path, form: OutputForm) -> IO[bytes]:
    """The rows of a file of results as lines of JSON, in an unnamed copy unless the file has just those.

    Raises ConfigError if it cannot be read, or is a table of something else.
    """
    if form == "npy":
        path, form = journal_of(path), "jsonl"
    with ExitStack() as opened, os_errors_as(ConfigError, f"Cannot read {path}"):
        file = opened.enter_context(Path(split_table(str(path))[0]).open("rb"))
        try:
            rows = decompressed(file) if form == "jsonl" else _restored_lines(file, str(path), form)
            if rows is file:
                opened.pop_all()
                return file
            lines = tempfile.TemporaryFile()  # noqa: SIM115
            lines.writelines(rows)
        except READ_ERRORS as error:
            raise ConfigError(f"{path} cannot be read: {error}.") from error
        lines.seek(0)
        return lines


def _restored_lines(file: IO[bytes], name: str, form: ResultForm) -> Iterator[bytes]:
    for row in result_rows(file, name, form):
        cells = row.columns
        if row.error is None and is_result(cells):
            yield restored(cells, has_blanks=form in BLANKS)
        else:
            yield json.dumps(cells).encode() + b"\n"  # which is no row of output, so that it counts as damaged


def result_rows(file: IO[bytes], name: str, form: ResultForm) -> Iterator[TableRow]:
    """The rows of a table of results of any form. Raises ConfigError if it has not got their columns."""
    names: Iterable[str]
    if form == "json":
        found = (row_of_line(line, "row", is_text=False) for line in read_array(decompressed(file)))
        first = next(found, None)
        rows: Iterator[TableRow] = chain(filter(None, [first]), found)
        names = first.columns if first is not None else ALWAYS
    else:
        wanted = table_of(Path(name)) if form == "sqlite" else None
        table = open_table(file, name, form, wanted, ",")
        rows, names = table.rows(), table.names
    if not {"index", "text", "key"} <= set(names):
        raise ConfigError(f"{name} is not a table of results.")
    return rows


JOURNAL_ENDING = ".journal.jsonl"


class TableWriter(FileWriter):
    """Appends rows to a journal beside the table, and makes the table of it at the end, which replaces the journal."""

    _completes = "make the table of"

    def __init__(
        self,
        path: Path,
        form: OutputForm,
        compression: Compression | None = None,
        *,
        input_order: bool = True,
        types: Mapping[str, Any] | None = None,
        expand: Sequence[str] | None = None,
    ) -> None:
        """
        types:  types of the input's columns as pyarrow has them, by their names; those of others follow their values
        expand: see `TableLayout`

        Raises ConfigError if the files cannot be written, another run writes them, or an extra is not installed.
        """
        check_output(form, compression)
        file, table = split_table(str(path))
        if table is not None and form != "sqlite":
            raise ConfigError(f"Cannot write {path}: only a database has several tables.")
        require_file(Path(file))
        self._table_path, self._file = resolved(str(path)), resolved(file)
        self._form, self._compression, self._types, self._expand = form, compression, types or {}, expand
        self._is_complete = False
        self._rows: IO[bytes] = io.BytesIO()
        """Those of a finished table."""
        self._has_table = has_results(self._table_path, form)
        super().__init__(journal_of(self._table_path), input_order=input_order)
        self._name = self._place = str(self._path if path.is_symlink() else journal_of(path))
        self._final_name, self.final_path = str(path), self._table_path
        self.tokens_path = token_journal_of(self._table_path)

    @property
    def has_content(self) -> bool:
        return self._has_journal or self._has_table

    def journal(self) -> Journal:
        """Reads the journal; or, if there is none because the table is finished, what the table was made of."""
        if self._has_journal:
            return super().journal()
        self._rows = open_results(self._table_path, self._form)
        return Journal.read(self._rows, self._final_name)

    def resume(self, journal: Journal, lines: Iterator[Line], keyed: Keyed, how: Resuming = KEEP) -> ResumePlan:
        """The same for a finished table, which is left alone if there is nothing to do, and else a journal again."""
        if self._has_journal:
            return super().resume(journal, lines, keyed, how)
        journal.fd = self._rows.fileno()
        plan = self._plan(journal, lines, keyed, how, self._final_name)
        is_whole = plan.rows == len(journal.indices) and not plan.rekeyed
        self._is_complete = is_whole and next(lines, None) is None
        if not self._is_complete:
            self._restore_journal()
            self._go_on(plan)
        return plan

    def _restore_journal(self) -> None:
        """Puts the rows of the table into the journal at once, so that a kill leaves all of them or none."""
        self._rows.seek(0)
        with os_errors_as(ConfigError, f"Cannot write {self._name}"):
            with self._replacing(self._path, self._file.stat()) as target:
                shutil.copyfileobj(self._rows, target)
            made = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            try:
                fcntl.flock(made, fcntl.LOCK_EX | fcntl.LOCK_NB)  # before the lock on the empty one is given up
                os.dup2(made, self._fd, inheritable=False)
            finally:
                os.close(made)

    def finish(self, raise_if_interrupted: Callable[[], None]) -> None:
        if self._is_complete:
            self.drop_tokens()
        else:
            super().finish(raise_if_interrupted)

    def _complete(self, raise_if_interrupted: Callable[[], None]) -> None:
        rows = partial(self._ordered_rows, raise_if_interrupted)
        if self._form == "sqlite" and self._file.exists():  # others may read and write it, and it has their tables
            write_database(self._file, table_of(self._table_path), _columns_of(rows, self._expand), rows)
        else:
            like = self._file if self._file.exists() else self._path
            with self._replacing(self._file, like.stat()) as target:
                table = table_of(self._table_path)
                write_results(target, self._form, self._compression, rows, self._types, self._expand, table)
        self._has_table = True
        if self._form != "npy":
            self._path.unlink()


def write_results(
    file: IO[bytes],
    form: OutputForm,
    kind: Compression | None,
    rows: Rows,
    types: Mapping[str, Any],
    expand: Sequence[str] | None = None,
    table: str = RESULTS_TABLE,
) -> None:
    """Writes rows of results in some form.  types, expand: see `TableWriter`; table: of a database"""
    if form == "jsonl":
        with compressed(file, kind) as target:
            target.writelines(rows())
        return
    if form == "npy":
        write_npy(file, rows)
        return
    columns = _columns_of(rows, expand)
    if form == "parquet":
        write_parquet(file, columns, rows, types)
    elif form == "sqlite":
        write_database(Path(file.name), table, columns, rows)
    elif form == "xlsx":
        write_workbook(file, columns, rows)
    elif form == "json":
        write_array(file, kind, columns, rows)
    else:
        write_csv(file, form, kind, columns, rows)


def _columns_of(rows: Rows, expand: Sequence[str] | None) -> list[Column]:
    layout = TableLayout(expand)
    for row in rows():
        layout.add(json.loads(row))
    return layout.columns()


def table_of(path: Path) -> str:
    """The table that a database gets or has of results."""
    return split_table(str(path))[1] or RESULTS_TABLE


def is_same_output(one: Path, other: Path) -> bool:
    """Whether two names mean the same file, also by a link, and the same table of it if it is a database."""
    first, second = (Path(split_table(str(path))[0]) for path in (one, other))
    is_same = first.exists() and second.exists() and first.samefile(second)
    return is_same and table_of(one).lower() == table_of(other).lower()


def has_results(path: Path, form: OutputForm) -> bool:
    """Whether something stands at the place of a finished output. Raises ConfigError if it can be none."""
    file = Path(split_table(str(path))[0])
    return file.is_file() and file.stat().st_size > 0 and (form != "sqlite" or has_table(file, table_of(path)))


def journal_of(table: Path) -> Path:
    """Where the rows of a table are kept until it is made."""
    return table.with_name(table.name + JOURNAL_ENDING)
