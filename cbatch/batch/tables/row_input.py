"""Reads the rows of an input: JSON Lines, text, CSV, TSV, a JSON array, Parquet, a workbook or a database.

Rows of tables become lines of JSON, so that they are keyed, sent to replicas and resumed like the lines of a file.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import IO, Any

from cbatch.base.errors import ConfigError, RequestError, invalid_row
from cbatch.base.strict_json import parse_json_object, parse_json_value
from cbatch.batch.forms import (
    GZIP,
    HEAD_BYTES,
    READ_ERRORS,
    TABLES,
    WHOLE,
    ZSTD,
    InputForm,
    Shard,
    decompressed,
    first_bytes,
    split_table,
    unit_of,
)
from cbatch.batch.lines import BOM, Line, read_lines, taken_twice
from cbatch.batch.tables.columns import TableRow, as_text, carried_columns, is_result
from cbatch.batch.tables.csv_table import CsvTable
from cbatch.batch.tables.database import DatabaseTable
from cbatch.batch.tables.json_array import NO_ARRAY, read_array
from cbatch.batch.tables.parquet_table import ParquetTable
from cbatch.batch.tables.workbook import WorkbookTable
from cbatch.batch.templates import ColumnTemplate, PromptTemplate, carried
from cbatch.requests.param_names import REFUSED
from cbatch.requests.rows import ID_FIELDS, KNOWN, PROMPT_FIELDS

_TEXTS = frozenset(["prompt", "system", "regex", "grammar", "guided_regex", "guided_grammar", *ID_FIELDS])
"""Fields whose cells are taken as they are, whatever they look like."""


def line_of(row: TableRow, template: ColumnTemplate | None, *, is_text: bool = False) -> Line:
    """The line `{"columns": ..., "row": ...}` of a row (see `parse_line`). Never raises for a row.

    template: makes the prompt; without one, the columns are the fields of a row, as those of a line of JSON
    is_text:  cells have no lists and truth values, so texts in those of fields that are no text are read as JSON
    """
    columns, error, is_empty = row.columns, row.error, False
    fields: dict[str, Any] = {}
    try:
        if error is None and is_result(columns):
            columns, problem = carried_columns(columns)
            if problem:
                raise invalid_row(problem)
        if is_text:
            columns = {name: text for name, text in columns.items() if text != "" or name not in ID_FIELDS}
        if error is None and template is not None:
            if isinstance(template, PromptTemplate):  # shows values as they are
                fields = template.fields({name: as_text(value) for name, value in columns.items()}, columns)
            else:
                fields = {"prompt": template.render(columns)}
        elif error is None:
            fields = _fields(columns, is_text=is_text)
        used = template.names if template is not None else ("prompt",)
        is_empty = any(isinstance(text := columns.get(name), str) and not text.strip() for name in used)
    except RequestError as raised:
        error = RequestError(raised.code, f"{row.where}: {raised}")
    data = json.dumps({"columns": carried(columns, template), "row": fields}).encode()
    return replace(Line.of(row.index, data), error=error, has_empty_column=is_empty and error is None)


def row_of_line(line: Line, unit: str, *, is_text: bool) -> TableRow:
    """The columns of a line of JSON, or of a line of text, which is the column `prompt`."""
    where = f"{unit} {line.index + 1}"
    try:
        text = line.text(where)
        columns = {"prompt": text} if is_text else parse_json_object(text, where, "a row")
    except RequestError as error:
        return TableRow(line.index, where, {}, error)
    return TableRow(line.index, where, columns)


def missing_columns(names: list[str], template: ColumnTemplate | None) -> str | None:
    """Why no row of a table with these columns could have a prompt; None if one could."""
    shown = ", ".join(names)
    example = next((name for name in names if name not in ID_FIELDS), "column")
    if template is None:
        if any(name in names for name in (*PROMPT_FIELDS, "body")):
            return None
        return (
            f"has no column 'prompt' (it has {shown}). --template makes prompts of other columns: "
            "--template 'Summarise: {" + example + "}'"
        )
    missing = [repr(name) for name in template.names if name not in names]
    if not missing:
        return None
    return f"has no column {' and no column '.join(missing)}, which the template needs (it has {shown})"


def _fields(columns: Mapping[str, Any], *, is_text: bool) -> dict[str, Any]:
    """The fields of a row. All rows of a table have all columns, so an empty cell or a null sets no field."""
    fields = {}
    for name, value in columns.items():
        if name not in KNOWN and name not in REFUSED:
            fields[name] = value
        elif value is not None and not (is_text and value == ""):
            is_json = is_text and isinstance(value, str) and name not in _TEXTS
            fields[name] = _value(value) if is_json else value
    return fields


def _value(text: str) -> Any:
    """The value in the cell of a parameter: JSON, else text. pandas writes True, and 12.0 for whole numbers."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = parse_json_value(text)
    except ValueError:
        return text
    return int(value) if isinstance(value, float) and value.is_integer() else value


_MISTAKES = {
    b"PAR1": "it is a Parquet file: --format parquet reads it",
    b"PK\x03\x04": "it is a zip archive or a workbook: unpack it, or read the workbook with --format xlsx",
    b"SQLite format 3\0": "it is an SQLite database: --format sqlite reads it",
    b"BZh": "it is compressed with bzip2: unpack it, or compress it with gzip or zstd",
    b"\xfd7zXZ": "it is compressed with xz: unpack it, or compress it with gzip or zstd",
}
"""First bytes of files that are no text, and what to do."""

UTF16 = (b"\xff\xfe", b"\xfe\xff")
"""First bytes of text in UTF-16."""

_PAGE = re.compile(rb"\s*<(!doctype\s+)?html\b", re.IGNORECASE)
_ARRAY = re.compile(rb"\s*\[\s*(?:\{|\n)")


Table = CsvTable | ParquetTable | WorkbookTable | DatabaseTable


def open_table(
    stream: IO[bytes], name: str, form: InputForm, table: str | None = None, delimiter: str | None = None
) -> Table:
    """A table of a form in `TABLES`. Raises ConfigError if it is none.

    table:     name of the table of a database or the sheet of a workbook
    delimiter: of CSV; see `CsvTable`
    """
    if form == "parquet":
        return ParquetTable(stream, name)
    if form == "xlsx":
        return WorkbookTable(stream, name, table)
    if form == "sqlite":
        return DatabaseTable(decompressed(stream), name, table)
    return CsvTable(decompressed(stream), name, "\t" if form == "tsv" else delimiter)


class RowInput:
    """An input of rows. A table, and a file that can be read twice, is looked at when it is opened.

    names: of the columns, if it is a table
    table: the name of the database's table; empty of other forms
    types: types of the columns as pyarrow has them; empty unless the input is Parquet
    template: makes the prompts; None if rows have them
    """

    def __init__(
        self,
        stream: IO[bytes],
        name: str,
        form: InputForm,
        *,
        template: ColumnTemplate | None = None,
        shard: Shard = WHOLE,
        is_sure: bool = True,
    ) -> None:
        """
        name:    for messages
        is_sure: whether the form was said; a name that ends in .json may also be that of JSON Lines

        Raises ConfigError if the input is not what it is said to be, or none of its rows could have a prompt.
        """
        self.stream, self.name = stream, name
        self._form, self.template, self._shard, self._is_sure = form, template, shard, is_sure
        self._start = stream.tell() if stream.seekable() else None
        self._opened: Table | Iterator[Line] | None = None
        if form in TABLES or self._start is not None:
            try:
                self._opened = self._open()
            except READ_ERRORS as error:
                raise ConfigError(f"{name} cannot be read: {error}.") from error
        table = self._opened if isinstance(self._opened, Table) else None
        if table is not None and (problem := missing_columns(table.names, template)) is not None:
            raise ConfigError(f"{name} {problem}.")
        self.table = table.table if isinstance(table, DatabaseTable) else ""
        self.names: list[str] = table.names if table is not None else []
        self.types: dict[str, Any] = table.types if isinstance(table, ParquetTable) else {}
        self._num_rows = table.num_rows if isinstance(table, ParquetTable | DatabaseTable) else None

    def lines(self) -> Iterator[Line]:
        """The lines from the beginning; only once, unless the stream can be read again (see `read_twice`)."""
        opened, self._opened = self._opened or self._open(), None
        unit, is_text = unit_of(self._form), self._form not in ("parquet", "jsonl", "json")
        for found in opened.rows() if isinstance(opened, Table) else opened:
            if found.index not in self._shard:
                continue
            if isinstance(found, TableRow):
                yield line_of(found, self.template, is_text=is_text)
            elif self.template is not None:
                yield line_of(row_of_line(found, unit, is_text=is_text), self.template)
            else:
                yield found

    def read_twice(self) -> tuple[Iterator[Line], Callable[[], Iterator[Line]]]:
        """The lines, and what gives them once more from the beginning. What comes from a pipe is kept in a file."""
        if self._start is not None:
            return self.lines(), self.lines
        return taken_twice(self.lines())

    def count(self) -> int | None:
        """About how many rows there are, for a display of progress; None if only reading them all would tell."""
        if self._num_rows is not None:
            return self._shard.size(self._num_rows)
        is_file = self._start == 0 and stat.S_ISREG(os.fstat(self.stream.fileno()).st_mode)
        if not is_file or self._form in ("json", "xlsx"):
            return None
        has_quotes = self._form in TABLES
        lines = quotes = place = 0
        while data := os.pread(self.stream.fileno(), 2**20, place):  # does not move what the rows are read from
            if place == 0 and data.startswith((GZIP, ZSTD)):
                return None
            place += len(data)
            parts = data.split(b'"') if has_quotes else [data]
            lines += sum(part.count(b"\n") for part in parts[quotes % 2 :: 2])  # those that are not quoted
            quotes += len(parts) - 1
        return self._shard.size(max(lines - has_quotes, 0))

    def _open(self) -> Table | Iterator[Line]:
        """The input from its beginning. Raises ValueError if its first bytes are those of another form."""
        if self._start is not None:
            self.stream.seek(self._start)
        if self._form in ("parquet", "xlsx", "sqlite"):
            return open_table(self.stream, self.name, self._form, split_table(self.name)[1])
        stream = decompressed(self.stream)
        head = first_bytes(stream, HEAD_BYTES)
        text = head.removeprefix(BOM)
        for start, problem in _MISTAKES.items() if self._form != "text" else ():
            if head.startswith(start):
                raise ValueError(problem)
        if head.startswith(UTF16):
            raise ValueError("it is no UTF-8 (perhaps UTF-16): iconv -f UTF-16 -t UTF-8 converts it")
        if _PAGE.match(text):
            raise ValueError("it is a web page: use the address of the file itself")
        if self._form == "jsonl" and _ARRAY.match(text):
            raise ValueError("it is a JSON array: --format json reads one")
        if self._form in TABLES:
            return open_table(stream, self.name, self._form)
        starts = text.lstrip()[:1]
        if self._form == "json" and (self._is_sure or starts != b"{"):
            if starts not in (b"[", b""):
                raise ValueError(NO_ARRAY)
            return read_array(stream)
        return read_lines(stream)

    def close(self) -> None:
        self.stream.close()
