"""Compressed files, told by their content."""

from __future__ import annotations

import io
import os
from contextlib import closing

import pytest

from cbatch.batch.forms import (
    READ_ERRORS,
    Compression,
    compressed,
    compression,
    decompressed,
    first_bytes,
    input_form,
    output_form,
)

TEXT = b"one\ntwo\n" + b"long " * 50_000 + b"\nlast"


def packed(kind: Compression | None, data: bytes = TEXT) -> bytes:
    file = io.BytesIO()
    with closing(compressed(file, kind)) as target:
        target.write(data)
    assert not file.closed
    return file.getvalue()


@pytest.mark.parametrize("kind", [None, "gz", "zst"])
def test_lines_come_back(kind: Compression | None) -> None:
    """Guards each compression: the lines are those that were written, from files and pipes, also of joined files."""
    if kind == "zst":
        pytest.importorskip("pyarrow", reason="zstd needs pyarrow")
    data = packed(kind)
    assert (data == TEXT) == (kind is None) and data == packed(kind)
    stream = decompressed(io.BytesIO(data))
    assert first_bytes(stream, 3) == b"one"
    assert [stream.readline(), stream.readline(2), stream.read()] == [b"one\n", b"tw", TEXT[6:]]
    assert decompressed(io.BytesIO(data * 2)).read() == TEXT * 2
    reader, writer = os.pipe()
    os.write(writer, packed(kind, b"from\na pipe"))
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert list(decompressed(pipe)) == [b"from\n", b"a pipe"]


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_damaged_files_raise(kind: Compression) -> None:
    """Guards against the end of a file that is cut off: it is no shorter file."""
    if kind == "zst":
        pytest.importorskip("pyarrow", reason="zstd needs pyarrow")
    data = packed(kind, os.urandom(200_000))
    with pytest.raises(READ_ERRORS):
        decompressed(io.BytesIO(data[:100_000])).read()


def test_forms_of_names() -> None:
    """Guards what an ending says, in any case, with and without that of a compression."""
    names = ["a.csv", "a.CSV.gz", "b.tsv.zst", "c.json", "d.parquet", "e.jsonl.gz", "e.ndjson", "x.txt", "-", "gz"]
    wanted = ["csv", "csv", "tsv", "json", "parquet", "jsonl", "jsonl", "jsonl", "jsonl", "jsonl"]
    assert [input_form(name) for name in names] == wanted
    assert [output_form(name) for name in names] == ["jsonl" if form == "json" else form for form in wanted]
    assert [compression(name) for name in names] == [None, "gz", "zst", None, None, "gz", None, None, None, None]
