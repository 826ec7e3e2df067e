"""CSV, TSV and JSON arrays, read in bounded memory."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from cbatch.base.errors import ConfigError
from cbatch.batch.tables import csv_table, json_array
from cbatch.batch.tables.csv_table import CsvTable
from cbatch.batch.tables.json_array import read_array


def read(data: bytes | str, delimiter: str | None = None) -> list[Any]:
    """The rows as (index, columns), or (index, columns, code and message of the error)."""
    data = data.encode() if isinstance(data, str) else data
    rows = CsvTable(io.BytesIO(data), "t.csv", delimiter).rows()
    return [
        (row.index, row.columns) if row.error is None else (row.index, row.columns, f"{row.error.code}: {row.error}")
        for row in rows
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_records_of_any_writer(end: str, bom: str) -> None:
    """Guards line ends in and behind values, a BOM, quotes, unicode, NULs, blank lines and a missing last line end."""
    lines = ["id,text", '1,"a, ""b"""', "", f'2,"two{end}lines"', "3,täxt 日本 🎉\0", "4,  spaced ", '"5",']
    assert read(bom + end.join(lines)) == [
        (0, {"id": "1", "text": 'a, "b"'}),
        (1, {"id": "2", "text": f"two{end}lines"}),
        (2, {"id": "3", "text": "täxt 日本 🎉\0"}),
        (3, {"id": "4", "text": "  spaced "}),
        (4, {"id": "5", "text": ""}),
    ]


def test_separators() -> None:
    """Guards tabs, and the semicolons that spreadsheets write in many countries."""
    assert read("a\tb\n1,5\t2\n", "\t") == [(0, {"a": "1,5", "b": "2"})]
    assert read("a;b\n1,5;2\n") == [(0, {"a": "1,5", "b": "2"})]
    assert read("a;b,c\n1,2\n") == [(0, {"a;b": "1", "c": "2"})]


def test_a_bad_record_harms_no_other() -> None:
    """Guards ragged rows, bad UTF-8, stray quotes and lone carriage returns; messages say the row and the line."""
    data = b'a,b\n1\n1,2,3\n\xff,x\n"p"q,x\n"1\n2",\n1\r2,x\nok,x\n'
    rows = read(data)
    assert [row[2] for row in rows if len(row) == 3] == [
        "invalid_row: row 1 (line 2): 1 value for 2 columns",
        "invalid_row: row 2 (line 3): 3 values for 2 columns",
        "invalid_utf8: row 3 (line 4): not valid UTF-8 (invalid start byte)",
        "invalid_row: row 4 (line 5): ',' expected after '\"'",
        "invalid_row: row 6 (line 8): a carriage return stands in a value that is not quoted",
    ]
    assert rows[0][1] == {"a": "1"} and rows[4] == (4, {"a": "1\n2", "b": ""}) and rows[6] == (6, {"a": "ok", "b": "x"})


def test_a_quote_that_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the row that swallows the file: it says where it began, and ends where a row may not be longer."""
    assert read('a\nx\n"y\nz\n')[1][2] == (
        "invalid_row: row 2 (line 3): a quote is opened and not closed until the end of the file, line 4"
    )
    monkeypatch.setattr(csv_table, "MAX_LINE_BYTES", 40)
    rows = read('a\nx\n"y\n' + "1234567890\n" * 5 + "ok\n")
    assert [row[0] for row in rows] == list(range(len(rows))) and rows[-1][1:] == ({"a": "ok"},)
    assert rows[1][2].startswith("line_too_long: row 2 (line 3): it is longer than 0 MiB (5 lines: a quote may have")


def test_huge_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards values above the 128 KiB that Python's reader allows, and memory against lines above the limit."""
    assert csv.field_size_limit() >= csv_table.MAX_LINE_BYTES
    big = "x" * 200_000
    assert read(f"a,b\n{big},1\n") == [(0, {"a": big, "b": "1"})]
    monkeypatch.setattr(csv_table, "MAX_LINE_BYTES", 1000)
    rows = read(f"a,b\n1,2\n{big},1\n3,4\n")
    assert rows[1][1] == {} and "line_too_long" in rows[1][2] and rows[2] == (2, {"a": "3", "b": "4"})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "t.csv must begin with a line that names its columns."),
        (b"\n1,2\n", "t.csv must begin with a line that names its columns."),
        (b"a,b,a\n", "several columns with the name 'a'"),
        (b"a,\xff\n", "are not valid UTF-8 (perhaps Latin-1): iconv -f LATIN1"),
        (b'a,"b\n', "cannot be read"),
        (b"a\r1\r2\r", "cannot be read"),
    ],
)
def test_a_header_that_cannot_be_used(data: bytes, message: str) -> None:
    """Guards the start of a run: what would make every row wrong is told once."""
    with pytest.raises(
        ConfigError, match="(?s).*" + message.replace(".", r"\.").replace("(", r"\(").replace(")", r"\)")
    ):
        CsvTable(io.BytesIO(data), "t.csv")


ROWS: list[Any] = [
    {"prompt": 'a "quoted" \\ [bracket] {brace}, comma', "n": 1},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "x", "content": "\\\\"}]},
    {"": "", "é": "日本 \u2028"},
    5,
    "text, \\",
    [],
    {},
]


def elements(text: str | bytes) -> list[bytes | None]:
    data = text.encode() if isinstance(text, str) else text
    lines = list(read_array(io.BytesIO(data)))
    assert [line.index for line in lines] == list(range(len(lines)))
    return [line.data for line in lines]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 65536])
def test_elements(monkeypatch: pytest.MonkeyPatch, size: int, indent: int | None) -> None:
    """Guards strings, escapes and brackets against the end of a chunk at every place, compared with Python's reader."""
    monkeypatch.setattr(json_array, "CHUNK", size)
    text = json.dumps(ROWS, indent=indent, ensure_ascii=False)
    assert [json.loads(data or b"") for data in elements(f"\n {text}\r\n")] == ROWS


def test_small_arrays() -> None:
    """Guards arrays of nothing, a BOM, and a comma without an element, whose row is an error."""
    assert elements("[]") == elements(" [ \n ] ") == []
    assert elements(b"\xef\xbb\xbf[{}]") == [b"{}"]
    assert elements("[1,]") == [b"1", b""]


def test_a_bad_element_harms_no_other() -> None:
    """Guards the elements beside one that is no JSON inside."""
    assert elements('[{"a": nan}, {"b" 1}, {"c": 1}]') == [b'{"a": nan}', b'{"b" 1}', b'{"c": 1}']


def test_long_elements_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory: an element above the limit becomes its hash, and those behind it are read."""
    monkeypatch.setattr(json_array, "MAX_LINE_BYTES", 20)
    monkeypatch.setattr(json_array, "CHUNK", 16)
    lines = list(read_array(io.BytesIO(b'[{"a": "%s"}, {"a": "%s"}, {"b": 1}]' % (b"x" * 90, b"y" * 90))))
    assert [line.data for line in lines] == [None, None, b'{"b": 1}']
    assert len({line.digest for line in lines}) == 3


@pytest.mark.parametrize(
    ("text", "rows", "message"),
    [
        ('[{"a": 1}, {"b"', 1, "ends in row 2; the file may be cut off"),
        ('[{"a": 1}', 0, "ends in row 1"),
        ("[1] [2]", 1, "something stands behind"),
        ('{"a": 1}', 0, "--format jsonl reads an object a line"),
    ],
)
def test_what_is_no_array(text: str, rows: int, message: str) -> None:
    """Guards against a file that is cut off, or is another form: the rows before are read, then it is told."""
    found = []
    with pytest.raises(ValueError, match=message):
        for line in read_array(io.BytesIO(text.encode())):
            found.append(line)
    assert len(found) == rows
