"""Parquet in and out: types that JSON has no form for, and columns that are what they were afterwards."""

from __future__ import annotations

import io
import json
import math
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import pytest

from cbatch.base.errors import ConfigError
from cbatch.batch.row import format_result
from cbatch.batch.tables.columns import TableLayout
from cbatch.batch.tables.parquet_table import ParquetTable, write_parquet

pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")

NOW = datetime(2024, 5, 6, 7, 8, 9)
COLUMNS: dict[str, tuple[Any, list[Any]]] = {
    "text": (pyarrow.string(), ["täxt", None, "\0 🎉"]),
    "number": (pyarrow.int32(), [1, None, -3]),
    "share": (pyarrow.float64(), [0.5, math.nan, math.inf]),
    "flag": (pyarrow.bool_(), [True, None, False]),
    "at": (pyarrow.timestamp("ns"), [NOW, None, NOW.replace(microsecond=5)]),
    "zoned": (pyarrow.timestamp("us", tz="UTC"), [NOW.replace(tzinfo=UTC), None, None]),
    "day": (pyarrow.date32(), [date(2024, 5, 6), None, date(1, 1, 1)]),
    "clock": (pyarrow.time64("us"), [time(1, 2, 3), None, None]),
    "price": (pyarrow.decimal128(9, 2), [Decimal("1.50"), None, Decimal("-2.00")]),
    "tags": (pyarrow.list_(pyarrow.string()), [["a", "b"], None, []]),
    "nested": (
        pyarrow.struct([("a", pyarrow.int64()), ("b", pyarrow.list_(pyarrow.int64()))]),
        [{"a": 1, "b": [2]}] * 3,
    ),
    "pairs": (pyarrow.map_(pyarrow.string(), pyarrow.int64()), [[("k", 1)], None, []]),
    "bytes": (pyarrow.binary(), [b"text", None, b"\xff\x00"]),
    "word": (pyarrow.dictionary(pyarrow.int8(), pyarrow.string()), ["x", None, "x"]),
    "nothing": (pyarrow.null(), [None, None, None]),
}


def table_file(columns: dict[str, tuple[Any, list[Any]]] = COLUMNS) -> io.BytesIO:
    arrays = [pyarrow.array(values, kind) for kind, values in columns.values()]
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(arrays, names=list(columns)), file, row_group_size=2)
    file.seek(0)
    return file


def test_values_are_those_of_json() -> None:
    """Guards each type of a column: nulls, times, decimals, nested values, numbers that are none."""
    table = ParquetTable(table_file(), "in")
    first, empty, last = table.rows()
    assert (table.num_rows, last.index, last.where) == (3, 2, "row 3")
    assert first.columns == {
        "text": "täxt",
        "number": 1,
        "share": 0.5,
        "flag": True,
        "at": "2024-05-06 07:08:09",
        "zoned": "2024-05-06 07:08:09Z",
        "day": "2024-05-06",
        "clock": "01:02:03",
        "price": "1.50",
        "tags": ["a", "b"],
        "nested": {"a": 1, "b": [2]},
        "pairs": [["k", 1]],
        "bytes": "text",
        "word": "x",
        "nothing": None,
    }
    assert {name for name, value in empty.columns.items() if value is not None} == {"nested"}
    assert last.columns["share"] is None and last.columns["bytes"] == "/wA="
    assert last.columns["at"] == "2024-05-06 07:08:09.000005000"
    json.dumps([first.columns, last.columns], allow_nan=False)


def written(rows: list[dict[str, Any]], types: dict[str, Any]) -> Any:
    """The table of results whose columns are these."""
    layout = TableLayout()
    results = [format_result({"index": number, "text": "", "extra": row}) for number, row in enumerate(rows)]
    for result in results:
        layout.add(json.loads(result))
    file = io.BytesIO()
    write_parquet(file, layout.columns(), lambda: iter(results), types)
    file.seek(0)
    return parquet.read_table(file)


@pytest.mark.parametrize(
    ("values", "kind", "wanted"),
    [
        ([1, None, 2**63 - 1], "int64", None),
        ([1, 2.5], "double", [1.0, 2.5]),
        ([True, None], "bool", None),
        ([1, "a", None, [2]], "string", ["1", "a", None, "[2]"]),
        ([2**63, 1], "string", [str(2**63), "1"]),
        ([{"a": 1}, None], "string", ['{"a": 1}', None]),
        ([True, 1], "string", ["true", "1"]),
        ([None, None], "string", None),
    ],
)
def test_types_that_all_values_fit(values: list[Any], kind: str, wanted: list[Any] | None) -> None:
    """Guards columns of JSON Lines, whose values have no type in common: they are text, and writing never fails."""
    column = written([{"x": value} for value in values], {}).column("x")
    assert str(column.type) == kind and column.to_pylist() == (wanted or values)


def test_a_value_that_does_not_fit_its_old_type() -> None:
    """Guards the end of a long run: a type that cannot be made again becomes one that fits."""
    types = {"n": pyarrow.int64(), "at": pyarrow.date32(), "clock": pyarrow.time32("s"), "gone": pyarrow.int8()}
    made = written([{"n": "many", "at": "2024-01-01", "clock": "x"}], types)
    assert made.column("n").to_pylist() == ["many"] and made.column("clock").to_pylist() == ["x"]
    assert made.column("at").to_pylist() == [date(2024, 1, 1)]


def test_groups_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory: rows are written in groups."""
    monkeypatch.setattr("cbatch.batch.tables.parquet_table.GROUP_ROWS", 2)
    made = written([{"x": number} for number in range(5)], {})
    assert made.column("x").num_chunks == 3 and made.column("x").to_pylist() == list(range(5))


def test_what_is_no_parquet_file() -> None:
    """Guards against a traceback of pyarrow, and columns that no name can tell apart."""
    with pytest.raises(ConfigError, match="in is not a Parquet file: "):
        ParquetTable(io.BytesIO(b"PAR1 but no more"), "in")
    file = io.BytesIO()
    parquet.write_table(pyarrow.table([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"]), file)
    with pytest.raises(ConfigError, match="several columns with the name 'a'"):
        ParquetTable(file, "in")
