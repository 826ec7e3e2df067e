"""Workbooks of Excel (.xlsx): a sheet of one is read, row by row, and one of a single sheet is written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import IO, Any
from zipfile import BadZipFile

from cbatch.base.errors import ConfigError, RunFailed, first_line
from cbatch.batch.forms import import_package, seekable
from cbatch.batch.tables.columns import Column, Rows, TableRow, as_text
from cbatch.batch.tables.csv_table import check_names
from cbatch.batch.tables.restored import with_cells
from cbatch.batch.templates import as_data

MAX_ROWS, MAX_CHARACTERS = 2**20, 32_767
"""Limits of Excel: rows of a sheet, with that of the names, and characters of a cell."""

_EXACT = 10**15
"""Numbers of Excel have 15 digits; a larger one is written as text."""

_ESCAPED = re.compile(r"[\x00-\x08\x0b-\x1f\ufffe\uffff]|_(?=x[0-9A-Fa-f]{4}_)")
_ESCAPE = re.compile(r"_x([0-9A-Fa-f]{4})_")


class WorkbookTable:
    """The rows of a sheet; the first one names the columns. Formulas count as the values they had last."""

    def __init__(self, stream: IO[bytes], name: str, sheet: str | None) -> None:
        """
        sheet: its name; None: the first one

        Raises ConfigError if openpyxl is not installed, the file is no workbook, or there are no such sheet or names.
        """
        openpyxl = import_package("openpyxl")
        try:
            book = openpyxl.load_workbook(seekable(stream), read_only=True, data_only=True)
            found = [one for one in book.worksheets if sheet in (None, one.title)]
            if not found:
                raise ConfigError(f"{name}: there is no such sheet; it has {', '.join(book.sheetnames)}.")
            self._rows: Iterator[tuple[Any, ...]] = found[0].iter_rows(values_only=True)
            first = [_value(value) for value in next(self._rows, ())]
        except (BadZipFile, KeyError, IndexError, ValueError, OSError) as error:
            raise ConfigError(f"{name} is not a workbook (.xlsx): {first_line(error).rstrip('.')}.") from error
        while first and first[-1] is None:
            first.pop()
        if not first or None in first:
            raise ConfigError(f"{name} must begin with a row that names its columns.")
        self.names = list(map(str, first))
        check_names(self.names, name)

    def rows(self) -> Iterator[TableRow]:
        """The rows that are not empty."""
        index = 0
        for number, cells in enumerate(self._rows, start=2):
            values = [_value(value) for value in cells[: len(self.names)]]
            if any(value is not None for value in values):
                values += [None] * (len(self.names) - len(values))
                where = f"row {index + 1} (row {number} of the sheet)"
                yield TableRow(index, where, dict(zip(self.names, values, strict=True)))
                index += 1


def _value(value: Any) -> Any:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), value) if isinstance(value, str) else as_data(value)


def write_workbook(file: IO[bytes], columns: list[Column], rows: Rows) -> None:
    """Writes a workbook. Raises RunFailed, with the place, if Excel has no room for a row or a text."""
    openpyxl = import_package("openpyxl")
    columns, found = with_cells(rows, columns, _stored, has_blanks=True)
    book = openpyxl.Workbook(write_only=True)
    sheet = book.create_sheet("results")
    sheet.append([_cell(sheet, column.name) for column in columns])
    for number, (_, cells) in enumerate(found, start=2):
        long = (column.name for column, cell in zip(columns, cells, strict=True) if len(str(cell)) > MAX_CHARACTERS)
        problem = f"more than {MAX_CHARACTERS:,} characters in {name!r}" if (name := next(long, None)) else ""
        if problem or number > MAX_ROWS:
            raise RunFailed(
                f"A workbook cannot hold row {number} of the sheet: {problem or f'it takes {MAX_ROWS:,} rows'}. "
                "The rows are kept; cbatch convert writes them in another form."
            )
        sheet.append([_cell(sheet, cell) for cell in cells])
    book.save(file)


def _stored(column: Column, value: Any) -> Any:
    value = as_text(value) if isinstance(value, list) else column.typed(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, int | float) and abs(value) >= _EXACT else None if value == "" else value


def _cell(sheet: Any, value: Any) -> Any:
    from openpyxl.cell import WriteOnlyCell

    if not isinstance(value, str):
        return value
    cell = WriteOnlyCell(sheet, _ESCAPED.sub(lambda found: f"_x{ord(found[0]):04X}_", value))
    cell.data_type = "s"  # also of a text that looks like a formula
    return cell
