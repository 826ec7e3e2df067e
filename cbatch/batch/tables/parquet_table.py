"""Reads Parquet in batches, so that memory is bounded by the file's row groups."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator
from typing import IO, Any

from cbatch.base.errors import ConfigError
from cbatch.batch.python_rows import as_data
from cbatch.batch.tables.compression import CHUNK, import_pyarrow
from cbatch.batch.tables.csv_table import check_names
from cbatch.batch.tables.table import TableRow

BATCH_ROWS, BATCH_BYTES = 256, 2**24
"""Most rows that are read at once, and about how many bytes of them."""

_ZERO_FRACTION = r"\.0+(Z|[+-][0-9:]+|)$"


class ParquetTable:
    """The rows of a Parquet file. Times, dates and decimals are text; what is not a finite number is null.

    types: types of the columns by their names, as pyarrow has them
    """

    def __init__(self, stream: IO[bytes], name: str) -> None:
        """Raises ConfigError if pyarrow is not installed or the file is no Parquet file."""
        arrow = import_pyarrow("Parquet")
        from pyarrow import parquet

        try:
            self._file = parquet.ParquetFile(_seekable(stream), buffer_size=CHUNK, pre_buffer=False)
        except (arrow.ArrowException, OSError) as error:
            raise ConfigError(f"{name} is not a Parquet file: {str(error).splitlines()[0].rstrip('.')}.") from error
        schema = self._file.schema_arrow
        check_names(schema.names, name)
        self.names: list[str] = schema.names
        self.types: dict[str, Any] = dict(zip(schema.names, schema.types, strict=True))
        self.num_rows: int = self._file.metadata.num_rows

    def rows(self) -> Iterator[TableRow]:
        index = 0
        for batch in self._file.iter_batches(self._batch_rows()):
            columns = [_values(column) for column in batch.columns]
            for number in range(batch.num_rows):
                row = {name: values[number] for name, values in zip(self.names, columns, strict=True)}
                yield TableRow(index, f"row {index + 1}", row)
                index += 1

    def _batch_rows(self) -> int:
        """Rows that are read at once: few, if those of a row group are large on average."""
        metadata = self._file.metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        largest = max((group.total_byte_size / max(group.num_rows, 1) for group in groups), default=1)
        return max(min(int(BATCH_BYTES / max(largest, 1)), BATCH_ROWS), 1)


def is_written_as_text(kind: Any) -> bool:
    """Whether values of this type have no form in JSON, and are read as text that pyarrow reads again."""
    from pyarrow import types

    return bool(types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind) or types.is_decimal(kind))


def _values(column: Any) -> list[Any]:
    """The values of a column in the types of JSON."""
    import pyarrow
    from pyarrow import compute, types

    if types.is_duration(column.type):
        column = column.cast(pyarrow.int64())
    elif is_written_as_text(column.type):
        is_decimal = types.is_decimal(column.type)
        column = column.cast(pyarrow.string())
        if not is_decimal:
            column = compute.replace_substring_regex(column, pattern=_ZERO_FRACTION, replacement=r"\1")
    return [_text(value) if isinstance(value, bytes) else as_data(value) for value in column.to_pylist()]


def _text(value: bytes) -> str:
    """Many writers store text without saying that it is text. Other bytes become base64."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()


def _seekable(stream: IO[bytes]) -> IO[bytes]:
    """The stream, or a temporary copy of it: Parquet begins with its end."""
    if stream.seekable():
        return stream
    copy = tempfile.TemporaryFile()  # noqa: SIM115  # closed when it is freed
    while data := stream.read(CHUNK):
        copy.write(data)
    copy.seek(0)
    return copy
