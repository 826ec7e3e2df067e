"""Writes rows of results as CSV, Parquet or compressed JSON Lines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from datetime import time
from typing import IO, Any

from cbatch.batch.tables.compression import compressed
from cbatch.batch.tables.forms import Compression, OutputForm
from cbatch.batch.tables.layout import Column, Kinds, values_of
from cbatch.batch.tables.parquet_table import is_written_as_text
from cbatch.batch.tables.table import as_text

GROUP_ROWS, GROUP_BYTES = 100_000, 64 * 2**20
"""Rows of a row group of Parquet, and the bytes of their results after which it ends earlier."""

Rows = Callable[[], Iterator[bytes]]
"""Gives the rows of results, as lines of JSON, from the beginning."""


def write_text(file: IO[bytes], form: OutputForm, kind: Compression | None, columns: list[Column], rows: Rows) -> None:
    """Writes CSV, TSV, or the rows as they are. Values that are no text are written as JSON, null as nothing."""
    with closing(compressed(file, kind)) as target:
        if form == "jsonl":
            target.writelines(rows())
            return
        format_record = _RecordFormat("\t" if form == "tsv" else ",")
        target.write(format_record([column.name for column in columns]))
        for row in rows():
            target.write(format_record(map(as_text, values_of(json.loads(row), columns))))


def write_parquet(file: IO[bytes], columns: list[Column], rows: Rows, types: Mapping[str, Any]) -> None:
    """Writes Parquet. Columns of the input get their types in `types` again, others those that all values fit.

    Values without a type in common are text: JSON, if they are no text.
    """
    kept = {name: kind for name, kind in types.items() if _is_restorable(kind)}
    while True:
        try:
            _write_groups(file, columns, rows, kept)
            return
        except _DoesNotFit as error:  # then the column gets a type that all its values fit
            del kept[error.column]
            file.seek(0)
            file.truncate()


class _DoesNotFit(Exception):
    """A value does not fit the type that its column had in the input."""

    def __init__(self, column: str) -> None:
        self.column = column


class _RecordFormat:
    """Formats records of CSV that end with a newline alone, and quotes what any reader would take for a line end."""

    def __init__(self, delimiter: str) -> None:
        self._buffer = io.StringIO()
        self._writer = csv.writer(self._buffer, delimiter=delimiter, lineterminator="\r\n")

    def __call__(self, values: Any) -> bytes:
        self._writer.writerow(values)
        text = self._buffer.getvalue().removesuffix("\r\n")
        self._buffer.seek(0)
        self._buffer.truncate()
        return text.encode() + b"\n"


def _write_groups(file: IO[bytes], columns: list[Column], rows: Rows, types: Mapping[str, Any]) -> None:
    import pyarrow
    from pyarrow import parquet

    kinds = [types.get(column.source) if column.is_input else None for column in columns]
    schema = pyarrow.schema(
        [(column.name, kind or _inferred(column.kinds)) for column, kind in zip(columns, kinds, strict=True)]
    )
    with parquet.ParquetWriter(file, schema) as writer:
        for group in _groups(rows(), columns):
            arrays = [
                _array(values, column, field.type, is_restored=kind is not None)
                for values, column, field, kind in zip(zip(*group, strict=True), columns, schema, kinds, strict=True)
            ]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema), row_group_size=GROUP_ROWS)


def _groups(rows: Iterator[bytes], columns: list[Column]) -> Iterator[list[list[Any]]]:
    group: list[list[Any]] = []
    size = 0
    for row in rows:
        group.append(values_of(json.loads(row), columns))
        size += len(row)
        if len(group) == GROUP_ROWS or size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _array(values: Any, column: Column, kind: Any, *, is_restored: bool) -> Any:
    import pyarrow

    if not is_restored:
        return pyarrow.array(map(as_text, values) if kind == pyarrow.string() else values, kind)
    try:
        if pyarrow.types.is_time(kind):  # pyarrow has no cast for them
            return pyarrow.array([time.fromisoformat(value) if value else None for value in values], kind)
        if is_written_as_text(kind):
            return pyarrow.array(values, pyarrow.string()).cast(kind)
        return pyarrow.array(values, kind)
    except (pyarrow.ArrowException, ValueError, TypeError) as error:
        raise _DoesNotFit(column.source) from error


def _inferred(kinds: Kinds) -> Any:
    """The type of a column that has held these kinds of values."""
    import pyarrow

    if kinds in (Kinds.FLOAT, Kinds.FLOAT | Kinds.INT):
        return pyarrow.float64()
    return {Kinds.BOOL: pyarrow.bool_(), Kinds.INT: pyarrow.int64()}.get(kinds, pyarrow.string())


def _is_restorable(kind: Any) -> bool:
    """Whether pyarrow makes this type again of values that were JSON in between."""
    from pyarrow import types

    if is_written_as_text(kind):
        return True
    if types.is_list(kind) or types.is_large_list(kind):
        return _is_native(kind.value_type)
    return _is_native(kind)


def _is_native(kind: Any) -> bool:
    from pyarrow import types

    if types.is_struct(kind):
        return all(_is_native(field.type) for field in kind)
    if types.is_list(kind) or types.is_large_list(kind):
        return _is_native(kind.value_type)
    is_text = types.is_string(kind) or types.is_large_string(kind)
    return bool(types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or is_text)
