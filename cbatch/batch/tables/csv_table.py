"""CSV and TSV, read one record at a time in bounded memory, and written. A damaged record harms no other."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

from cbatch.base.errors import ConfigError, RequestError, invalid_row
from cbatch.base.units import format_count
from cbatch.batch.forms import HEAD_BYTES, Compression, OutputForm, compressed, first_bytes
from cbatch.batch.lines import BOM, LATIN1_HINT, MAX_LINE_BYTES
from cbatch.batch.tables.columns import BOOKKEEPING, Column, Rows, TableLayout, TableRow, as_text
from cbatch.batch.tables.restored import REST_COLUMN, cells_of, with_cells

csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))  # of the process; `_Lines` bounds records earlier


class CsvTable:
    """Records as RFC 4180 has them: values may be quoted, and quoted values may hold line ends.

    The first record names the columns. Blank lines are no records. Every value is text, and empty text if it is empty.
    """

    def __init__(self, stream: IO[bytes], name: str, delimiter: str | None = None) -> None:
        """
        delimiter: None: a comma, or a semicolon if the first line has semicolons and no comma outside of quotes

        Raises ConfigError if the names of the columns cannot be read.
        """
        first = first_bytes(stream, HEAD_BYTES).removeprefix(BOM).partition(b"\n")[0]
        if not first.strip():
            raise ConfigError(f"{name} must begin with a line that names its columns.")
        if delimiter is None:
            unquoted = re.sub(rb'"[^"]*"?', b"", first)
            delimiter = ";" if b";" in unquoted and b"," not in unquoted else ","
        self._lines = _Lines(stream)
        self._reader = csv.reader(self._lines, delimiter=delimiter, strict=True)
        try:
            self.names = next(self._reader)
        except (csv.Error, _RecordTooLong) as error:
            raise ConfigError(
                f"The names of the columns of {name} cannot be read: {str(error) or 'too long'}."
            ) from error
        if self._lines.encoding_error is not None:
            raise ConfigError(f"The names of the columns of {name} are not valid UTF-8{LATIN1_HINT}.")
        check_names(self.names, name)

    def rows(self) -> Iterator[TableRow]:
        index = 0
        while True:
            self._lines.begin()
            values: list[str] = []
            error: RequestError | None = None
            try:
                values = next(self._reader)
            except StopIteration:
                return
            except _RecordTooLong:
                lines = self._lines.number - self._lines.begun_at + 1
                hint = f" ({lines:,} lines: a quote may have been left open)" if lines > 1 else ""
                error = RequestError("line_too_long", f"it is longer than {MAX_LINE_BYTES >> 20} MiB{hint}")
            except csv.Error as raised:
                error = invalid_row(self._reason(raised))
            if values or error is not None:
                yield self._row(index, values, error)
                index += 1

    def _row(self, index: int, values: list[str], error: RequestError | None) -> TableRow:
        where = f"row {index + 1} (line {self._lines.begun_at})"
        if error is None and self._lines.encoding_error is not None:
            error = RequestError("invalid_utf8", f"not valid UTF-8 ({self._lines.encoding_error})")
        if error is None and len(values) != len(self.names):
            error = invalid_row(f"{format_count(len(values), 'value')} for {format_count(len(self.names), 'column')}")
        if error is not None:
            error = RequestError(error.code, f"{where}: {error}")
        return TableRow(index, where, dict(zip(self.names, values, strict=False)), error)

    def _reason(self, error: csv.Error) -> str:
        if "unexpected end" in str(error):
            return f"a quote is opened and not closed until the end of the file, line {self._lines.number}"
        is_return = "new-line character" in str(error)
        return "a carriage return stands in a value that is not quoted" if is_return else str(error)


def check_names(names: list[str], table: str) -> None:
    """Raises ConfigError if two columns have the same name."""
    doubled = [name for name, count in Counter(names).items() if count > 1]
    if doubled:
        raise ConfigError(f"{table} has several columns with the name {doubled[0]!r}; each needs a name of its own.")


class _RecordTooLong(Exception):
    pass


class _Lines(Iterator[str]):
    """Physical lines for `csv.reader`, and what it does not say of the record it makes of them.

    number:         lines read so far
    begun_at:       number of the first line of the record
    encoding_error: why the record is not valid UTF-8, or None
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._size = self.number = 0
        self.begun_at = 1
        self.encoding_error: str | None = None

    def begin(self) -> None:
        """A record begins with the next line."""
        self._size, self.begun_at, self.encoding_error = 0, self.number + 1, None

    def __next__(self) -> str:
        data = self._stream.readline(MAX_LINE_BYTES + 2)
        if not data:
            raise StopIteration
        self.number += 1
        if self.number == 1:
            data = data.removeprefix(BOM)
        self._size += len(data)
        if self._size > MAX_LINE_BYTES + 2 or (len(data) > MAX_LINE_BYTES and not data.endswith(b"\n")):
            while not data.endswith(b"\n") and (data := self._stream.readline(2**20)):
                pass
            raise _RecordTooLong
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            self.encoding_error = error.reason
            return data.decode(errors="replace")


def write_csv(file: IO[bytes], form: OutputForm, kind: Compression | None, columns: list[Column], rows: Rows) -> None:
    """Writes CSV or TSV. Values that are no text are written as JSON, null as nothing."""
    columns, cells = with_cells(rows, columns, _cell, has_blanks=True)
    record = _Records(form)
    with compressed(file, kind) as target:
        target.write(record([column.name for column in columns]))
        target.writelines(record(values) for _, values in cells)


class _Records:
    """Makes records of cells."""

    def __init__(self, form: OutputForm) -> None:
        self._buffer = io.StringIO()  # with a terminator of \r\n, what any reader would take for a line end is quoted
        self._writer = csv.writer(self._buffer, delimiter="\t" if form == "tsv" else ",", lineterminator="\r\n")

    def __call__(self, cells: Iterable[str]) -> bytes:
        self._writer.writerow(cells)
        record = self._buffer.getvalue().removesuffix("\r\n").encode() + b"\n"
        self._buffer.seek(0)
        self._buffer.truncate()
        return record


class CsvStream:
    """Makes records of rows one after the other. The columns are those of the input and the first row, and `REST`."""

    def __init__(self, form: OutputForm, names: Iterable[str], expand: Sequence[str] | None) -> None:
        """names: of the input's columns, as far as they are known; expand: see `TableLayout`"""
        self._record, self._layout, self._columns = _Records(form), TableLayout(expand), list[Column]()
        known = dict.fromkeys(name for name in names if name not in BOOKKEEPING)
        identity = {"id": ""} if known.keys() & {"id", "custom_id"} else {}
        self._layout.add(identity | {"extra": {name: None for name in known if name not in ("id", "custom_id")}})

    def __call__(self, row: bytes) -> bytes:
        header = b""
        if not self._columns:
            self._layout.add(json.loads(row))
            self._columns = [*self._layout.columns(), REST_COLUMN]
            header = self._record([column.name for column in self._columns])
        return header + self._record(cells_of(row, self._columns, _cell, has_blanks=True))


def _cell(_: Column, value: Any) -> str:
    return as_text(value) or ""
