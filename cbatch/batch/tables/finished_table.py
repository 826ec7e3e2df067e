"""The keys of the rows of a finished table, for a run that resumes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from cbatch.base.errors import ConfigError
from cbatch.batch.journal import Journal
from cbatch.batch.tables.compression import READ_ERRORS, decompressed
from cbatch.batch.tables.csv_table import CsvTable
from cbatch.batch.tables.forms import OutputForm
from cbatch.batch.tables.parquet_table import ParquetTable
from cbatch.batch.tables.result_columns import is_result


def read_keys(path: Path, name: str, form: OutputForm) -> Journal:
    """A journal that knows which rows a table holds, and not where. Raises ConfigError if it is no table of results."""
    journal = Journal()
    with path.open("rb") as file:
        if form == "jsonl":
            return _read_lines(file, name)
        for columns in _rows(file, name, form):
            if not is_result(columns):
                raise ConfigError(f"{name} is not a table of results; --overwrite replaces it.")
            journal.append(int(columns["index"]), 0)
            journal.keys += bytes.fromhex(columns["key"])
            journal.failed.append(bool(columns["error_code"]))
    return journal


def _read_lines(file: IO[bytes], name: str) -> Journal:
    try:
        return Journal.read(decompressed(file), name)
    except READ_ERRORS as error:
        raise ConfigError(f"{name} cannot be read: {error}.") from error


def _rows(file: IO[bytes], name: str, form: OutputForm) -> Iterator[Mapping[str, Any]]:
    try:
        delimiter = "\t" if form == "tsv" else ","
        table = ParquetTable(file, name) if form == "parquet" else CsvTable(decompressed(file), name, delimiter)
        for row in table.rows():
            yield {"error_code": None} | row.columns
    except READ_ERRORS as error:
        raise ConfigError(f"{name} cannot be read: {error}.") from error
