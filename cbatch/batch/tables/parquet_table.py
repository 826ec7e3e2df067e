"""Parquet: read in batches, so that memory is bounded by the file's row groups, and written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import time
from typing import IO, Any

from cbatch.base.errors import ConfigError, first_line
from cbatch.batch.forms import CHUNK, import_package, seekable
from cbatch.batch.tables.columns import Column, Kind, Rows, TableRow
from cbatch.batch.tables.csv_table import check_names
from cbatch.batch.tables.restored import with_cells
from cbatch.batch.templates import as_data

BATCH_ROWS, BATCH_BYTES = 256, 2**24
"""Most rows that are read at once, and about how many bytes of them."""

GROUP_ROWS, GROUP_BYTES = 100_000, 64 * 2**20
"""Rows of a row group that is written, and the bytes of their results after which it ends earlier."""

_ZERO_FRACTION = r"\.0+(Z|[+-][0-9:]+|)$"


class ParquetTable:
    """The rows of a Parquet file. Times, dates and decimals are text; what is not a finite number is null.

    types: types of the columns by their names, as pyarrow has them
    """

    def __init__(self, stream: IO[bytes], name: str) -> None:
        """Raises ConfigError if pyarrow is not installed or the file is no Parquet file."""
        arrow = import_package("pyarrow", "Parquet needs")
        from pyarrow import parquet

        try:
            self._file = parquet.ParquetFile(seekable(stream), buffer_size=CHUNK, pre_buffer=False)
        except (arrow.ArrowException, OSError) as error:
            raise ConfigError(f"{name} is not a Parquet file: {first_line(error).rstrip('.')}.") from error
        schema = self._file.schema_arrow
        check_names(schema.names, name)
        self.names: list[str] = schema.names
        self.types: dict[str, Any] = dict(zip(schema.names, schema.types, strict=True))
        self.num_rows: int = self._file.metadata.num_rows

    def rows(self) -> Iterator[TableRow]:
        index = 0
        metadata = self._file.metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        largest = max((group.total_byte_size / max(group.num_rows, 1) for group in groups), default=1)
        batch_rows = max(min(int(BATCH_BYTES / max(largest, 1)), BATCH_ROWS), 1)  # few, if rows are large on average
        for batch in self._file.iter_batches(batch_rows):
            columns = [_values(column) for column in batch.columns]
            for number in range(batch.num_rows):
                row = {name: values[number] for name, values in zip(self.names, columns, strict=True)}
                yield TableRow(index, f"row {index + 1}", row)
                index += 1


def is_written_as_text(kind: Any) -> bool:
    """Whether values of this type have no form in JSON, and are read as text that pyarrow reads again."""
    from pyarrow import types

    return bool(types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind) or types.is_decimal(kind))


def _values(column: Any) -> list[Any]:
    import pyarrow
    from pyarrow import compute, types

    if types.is_duration(column.type):
        column = column.cast(pyarrow.int64())
    elif is_written_as_text(column.type):
        is_decimal = types.is_decimal(column.type)
        column = column.cast(pyarrow.string())
        if not is_decimal:
            column = compute.replace_substring_regex(column, pattern=_ZERO_FRACTION, replacement=r"\1")
    return [as_data(value) for value in column.to_pylist()]


def write_parquet(file: IO[bytes], columns: list[Column], rows: Rows, types: Mapping[str, Any]) -> None:
    """Writes Parquet. Columns of the input get their types in `types` again, others those that all values fit.

    Values without a type in common are text: JSON, if they are no text.
    """
    kept = {name: kind for name, kind in types.items() if is_written_as_text(kind) or _is_native(kind)}
    while True:
        try:
            _write_groups(file, columns, rows, kept)
            return
        except _DoesNotFit as error:  # then the column gets a type that all its values fit
            del kept[error.column]
            file.seek(0)
            file.truncate()


class _DoesNotFit(Exception):
    def __init__(self, column: str) -> None:
        self.column = column


def _write_groups(file: IO[bytes], columns: list[Column], rows: Rows, types: Mapping[str, Any]) -> None:
    import pyarrow
    from pyarrow import parquet

    def stored(column: Column, value: Any) -> Any:
        return value if column.of == "input" and column.source in types else column.typed(value)

    columns, cells = with_cells(rows, columns, stored, has_blanks=False)
    kinds = [types.get(column.source) if column.of == "input" else None for column in columns]
    schema = pyarrow.schema(
        [(column.name, kind or _inferred(column.kind)) for column, kind in zip(columns, kinds, strict=True)]
    )
    with parquet.ParquetWriter(file, schema) as writer:
        for group in _groups(cells):
            arrays = [
                _array(values, column, field.type)
                for values, column, field in zip(zip(*group, strict=True), columns, schema, strict=True)
            ]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema), row_group_size=GROUP_ROWS)


def _groups(rows: Iterator[tuple[bytes, list[Any]]]) -> Iterator[list[list[Any]]]:
    group: list[list[Any]] = []
    size = 0
    for row, values in rows:
        group.append(values)
        size += len(row)
        if len(group) == GROUP_ROWS or size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _array(values: Any, column: Column, kind: Any) -> Any:
    import pyarrow

    try:
        if pyarrow.types.is_time(kind):  # pyarrow has no cast for them
            return pyarrow.array([time.fromisoformat(value) if value else None for value in values], kind)
        if is_written_as_text(kind):
            return pyarrow.array(values, pyarrow.string()).cast(kind)
        return pyarrow.array(values, kind)
    except (pyarrow.ArrowException, ValueError, TypeError) as error:
        raise _DoesNotFit(column.source) from error


def _inferred(kind: Kind) -> Any:
    import pyarrow

    text = pyarrow.string()
    wide, texts = pyarrow.float64(), pyarrow.list_(text)
    kinds: dict[Kind, Any] = {bool: pyarrow.bool_(), int: pyarrow.int64(), float: wide, list: texts}
    kinds[tuple] = pyarrow.list_(pyarrow.float32())
    return kinds.get(kind, text)


def _is_native(kind: Any) -> bool:
    from pyarrow import types

    if types.is_struct(kind):
        return all(_is_native(field.type) for field in kind)
    if types.is_list(kind) or types.is_large_list(kind):
        return _is_native(kind.value_type)
    is_text = types.is_string(kind) or types.is_large_string(kind)
    return bool(types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or is_text)
