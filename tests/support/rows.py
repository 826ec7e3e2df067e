"""Files of rows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from cbatch.batch.journal import CHECK
from cbatch.batch.row import format_result


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def write_results(path: Path, rows: list[Any]) -> Path:
    """Writes rows of output, with their checks; text stays as it is."""
    path.write_bytes(b"".join(row.encode() if isinstance(row, str) else format_result(row) for row in rows))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return parse_rows(path.read_bytes())


def parse_rows(data: bytes) -> list[dict[str, Any]]:
    """The rows of a file, without the checks that a file of results has."""
    return [without_check(json.loads(line)) for line in data.splitlines()]


def without_check(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != CHECK}


@contextmanager
def pipe_of(data: bytes) -> Iterator[IO[bytes]]:
    """The reading end of a pipe that holds these bytes, and ends after them."""
    reader, writer = os.pipe()
    os.write(writer, data)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        yield stream
