"""Inputs of all forms as lines: the same rows, read once or twice, whole or in shards, compressed or not."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cbatch.base.errors import ConfigError
from cbatch.batch.forms import (
    READ_ERRORS,
    WHOLE,
    Compression,
    InputForm,
    Shard,
    compressed,
    compression,
    decompressed,
    first_bytes,
    input_form,
    output_form,
    unit_of,
)
from cbatch.batch.lines import RowOptions, parse_line
from cbatch.batch.tables.row_input import RowInput
from cbatch.batch.templates import JinjaTemplate, PromptTemplate
from tests.support.rows import pipe_of

ROWS = [{"id": str(number), "text": f"row {number}, täxt", "n": number} for number in range(20)]
TEMPLATE = PromptTemplate("Say {text} of {id}")


def in_form(form: InputForm, rows: list[dict[str, Any]]) -> bytes:
    if form == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    if form == "json":
        return json.dumps(rows, indent=1).encode()
    sep = "," if form == "csv" else "\t"
    quoted = [sep.join(f'"{value}"' for value in row.values()) for row in rows]
    return "\r\n".join([sep.join(rows[0]), *quoted]).encode()


def prompts(lines: Iterator[Any], unit: str = "row") -> list[tuple[int, str | None]]:
    rows = [parse_line(line, RowOptions(has_columns=True, unit=unit)) for line in lines]
    return [(row.index, row.text if row.error is None else str(row.error)) for row in rows]


WANTED = [(number, f"Say row {number}, täxt of {number}") for number in range(20)]


@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "tsv"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_all_forms_give_the_same_rows(form: InputForm, is_packed: bool) -> None:
    """Guards each form, from files and pipes, compressed or not: once, and again from the beginning to resume."""
    data = in_form(form, ROWS)
    data = gzip.compress(data) if is_packed else data
    with pipe_of(data) as pipe:
        for stream in (io.BytesIO(data), pipe):
            source = RowInput(stream, "in", form, template=TEMPLATE)
            first, again = source.read_twice()
            assert prompts(line for line, _ in zip(first, range(7), strict=False)) == WANTED[:7]
            assert prompts(again()) == WANTED


def test_a_file_is_read_from_where_it_stood() -> None:
    """Guards a redirected file whose first line a shell has already read."""
    stream = io.BytesIO(b'gone\n{"prompt": "one"}\n{"prompt": "two"}\n')
    stream.readline()
    first, again = RowInput(stream, "in", "jsonl").read_twice()
    assert next(first).data == b'{"prompt": "one"}'
    assert [line.index for line in again()] == [0, 1]


def test_a_pipe_of_lines_is_not_waited_for() -> None:
    """Guards a run that is started before its input: opening a pipe of lines reads nothing, and one line a line."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as stream:
        lines = RowInput(stream, "in", "text").lines()
        for text in (b"one\n", b"two\n"):
            os.write(writer, text)
            assert next(lines).data == text.strip()
        os.close(writer)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2", "1/2/3"])
def test_what_is_no_shard(text: str) -> None:
    """Guards against a shard that does not exist, whose run would be empty."""
    with pytest.raises(ConfigError, match="--shard takes K/N"):
        Shard.parse(text)


@pytest.mark.parametrize(
    ("data", "form", "message"),
    [
        (b'[{"prompt": "a"}]', "jsonl", "a JSON array: --format json reads one"),
        (b"\xef\xbb\xbf[\n  {}\n]", "jsonl", "--format json reads one"),
        (b'{"prompt": "a"}', "json", "--format jsonl reads an object a line"),
        (b"PAR1....", "csv", "--format parquet reads it"),
        (b"PK\x03\x04....", "jsonl", "read the workbook with --format xlsx"),
        (b"BZh91AY", "csv", "compress it with gzip or zstd"),
        (b"id,name\n1,2\n", "csv", "has no column 'prompt' .it has id, name.*--template 'Summarise: {name}'"),
        (b"\x1f\x8bbroken", "csv", "cannot be read"),
        ('{"prompt": "a"}'.encode("utf-16"), "jsonl", "iconv -f UTF-16 -t UTF-8"),
        ("prompt\na".encode("utf-16"), "csv", "iconv -f UTF-16 -t UTF-8"),
    ],
)
def test_a_mistaken_form_names_the_remedy(data: bytes, form: InputForm, message: str) -> None:
    """Guards a wrong file or --format: one sentence at the start, and not an error for each row."""
    with pytest.raises(ConfigError, match=message):
        RowInput(io.BytesIO(data), "in", form)
    if form not in ("csv",):
        with pipe_of(data) as pipe, pytest.raises(ValueError, match=message):
            list(RowInput(pipe, "in", form).lines())


def test_a_name_in_json_may_hold_lines() -> None:
    """Guards files of JSON Lines whose names end in .json, which ran before arrays did."""
    lines = RowInput(io.BytesIO(b'{"prompt": "a"}\n\n{"prompt": "b"}'), "a.json", "json", is_sure=False).lines()
    assert [line.index for line in lines] == [0, 2]


def test_columns_that_the_template_needs(tmp_path: Path) -> None:
    """Guards a misspelt column: told once if the table has not got it, else an error of each row that lacks it."""
    with pytest.raises(ConfigError, match=r"in has no column 'txt', which the template needs \(it has id, text\)"):
        RowInput(io.BytesIO(b"id,text\n1,a\n"), "in", "csv", template=PromptTemplate("{txt} {text}"))
    (path := tmp_path / "t").write_text(
        "{{ txt }} {{ note | default('') }} {% if other is defined %}{{ other }}{% endif %}"
    )
    jinja = JinjaTemplate(path)
    with pytest.raises(ConfigError, match="no column 'txt', which"):
        RowInput(io.BytesIO(b"id,text\n1,a\n"), "in", "csv", template=jinja)
    rows = b'{"text": "a"}\n{"id": 1, "other": 1}\n{bad\n{"text": null}\n'
    found = prompts(RowInput(io.BytesIO(rows), "in", "jsonl", template=PromptTemplate("{text}")).lines(), "line")
    assert found == [
        (0, "a"),
        (1, "line 2: the column 'text' of the template is missing; the row has id, other"),
        (2, "line 3, column 2: Expecting property name enclosed in double quotes"),
        (3, "line 4: the column 'text' of the template is null"),
    ]


def test_cells_are_fields_without_a_template() -> None:
    """Guards parameters in CSV, which are text there: numbers, lists, words of pandas; empty cells set nothing."""
    data = (
        "id,prompt,max_tokens,temperature,stop,raw,regex,label\n"
        'a,12,5,0.5,"[""x"", ""y""]",True,[0-9],\n'
        ",13,12.0,,end,,,7\n"
    )
    lines = RowInput(io.BytesIO(data.encode()), "in", "csv").lines()
    first, second = [parse_line(line, RowOptions(has_columns=True, unit="row")) for line in lines]
    assert first.error is None and second.error is None
    assert (first.id, first.prompt, first.raw, second.id, second.prompt) == ("a", "12", True, None, "13")
    assert first.given == {"max_tokens": 5, "temperature": 0.5, "stop": ["x", "y"], "regex": "[0-9]"}
    assert second.given == {"max_tokens": 12, "stop": "end"}
    assert first.extra["label"] == "" and first.extra["max_tokens"] == "5" and second.extra["prompt"] == "13"


def test_rows_are_counted(tmp_path: Path) -> None:
    """Guards the bar of progress: line ends in quotes, the header and other shards are no rows."""
    path = tmp_path / "in.csv"
    path.write_text('{,prompt\n1,"two\nlines ""x\n"""\n2,b\n3,c\n')
    cases: list[tuple[InputForm, Shard, int | None]] = [
        ("csv", WHOLE, 3),
        ("csv", Shard(2, 2), 1),
        ("text", WHOLE, 6),
        ("json", WHOLE, None),
    ]
    for form, shard, rows in cases:
        with path.open("rb") as stream:
            assert RowInput(stream, str(path), form, shard=shard, is_sure=form != "json").count() == rows
    assert [unit_of("csv"), unit_of("json"), unit_of("text")] == ["row", "row", "line"]


TEXT = b"one\ntwo\n" + b"long " * 50_000 + b"\nlast"


def packed(kind: Compression | None, data: bytes = TEXT) -> bytes:
    file = io.BytesIO()
    with compressed(file, kind) as target:
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
    with pipe_of(packed(kind, b"from\na pipe")) as pipe:
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
    names = ["a.csv", "a.CSV.gz", "b.tsv.zst", "c.json", "d.parquet", "e.jsonl.gz", "e.ndjson", "b.x/-", "-", "gz"]
    wanted = ["csv", "csv", "tsv", "json", "parquet", "jsonl", "jsonl", "jsonl", "jsonl", "jsonl"]
    assert [input_form(name) for name in names] == wanted
    assert [output_form(name) for name in names] == wanted
    assert input_form("a.xlsx") == output_form("a.xlsx") == "xlsx"
    assert input_form("x.txt") == input_form("x.txt.gz") == "text"
    for name in ("x.txt", "x.jsnol", "x.txt.gz"):
        with pytest.raises(ConfigError, match=f"{name}: no form of results ends in .*--output-format"):
            output_form(name)
    assert [compression(name) for name in names] == [None, "gz", "zst", None, None, "gz", None, None, None, None]
