"""JSON arrays, cut into their elements wherever a chunk ends."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from cbatch.batch.tables import json_array
from cbatch.batch.tables.json_array import read_array

ROWS: list[Any] = [
    {"prompt": 'a "quoted" \\ [bracket] {brace}, comma', "n": 1},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "x", "content": "\\\\"}]},
    {"": "", "é": "日本 \u2028"},
    5,
    "text, \\",
    [],
    {},
]


def read(text: str | bytes) -> list[bytes | None]:
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
    assert [json.loads(data or b"") for data in read(f"\n {text}\r\n")] == ROWS


def test_small_arrays() -> None:
    """Guards arrays of nothing, a BOM, and a comma without an element, whose row is an error."""
    assert read("[]") == read(" [ \n ] ") == []
    assert read(b"\xef\xbb\xbf[{}]") == [b"{}"]
    assert read("[1,]") == [b"1", b""]


def test_a_bad_element_harms_no_other() -> None:
    """Guards the elements beside one that is no JSON inside."""
    assert read('[{"a": nan}, {"b" 1}, {"c": 1}]') == [b'{"a": nan}', b'{"b" 1}', b'{"c": 1}']


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
