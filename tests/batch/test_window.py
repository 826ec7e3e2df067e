"""How far ahead rows are read, unless somebody says it, and how much memory they take meanwhile."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from cbatch.batch.driver import Window, default_window, weight_of
from cbatch.batch.jsonl import parse_line
from cbatch.batch.lines import Line


def test_the_default_window() -> None:
    """Guards the order of the last rows, which needs many of them, and the memory of engines with many slots."""
    assert [default_window(slots) for slots in (1, 32, 128, 256, 1000)] == [16, 512, 2048, 2048, 4000]


def test_the_window_bounds_bytes_as_well_as_rows() -> None:
    """Guards memory against a window full of large rows; a row larger than the window goes alone."""
    window = Window(3, size=100)
    window.acquire(0, 500)
    window.release([0])
    window.acquire(1, 60)
    window.release([1])
    window.acquire(2, 60)
    window.acquire(3, 40)
    assert window.waited_s < 1 and window._bytes_left == 0 and window._rows_left == 1


def test_a_row_that_takes_less_than_it_could_makes_room() -> None:
    """Guards the number of rows in flight: what a row could have taken at most is given back once it is read."""
    window = Window(3, size=100)
    window.acquire(0, 90)
    window.settle(0, 20)
    window.acquire(1, 80)
    window.release([0])
    window.acquire(2, 20)
    assert window.waited_s < 1 and window._bytes_left == 0


@pytest.mark.parametrize(
    "columns",
    [
        {"k": [[]] * 20_000},
        {"k": [{}] * 20_000},
        {"k": [{"a": 1}] * 20_000},
        {"k": [[300]] * 20_000},
        {"k": [300.5] * 20_000},
        {"k": {f"n{number}": number for number in range(20_000)}},
        {"k": [f"t{number}" for number in range(20_000)]},
        {"messages": [{"role": "user", "content": "a"}] * 10_000},
        {"k": "é" * 200_000},
        {"k": "a" * 500_000 + "\U0001f600"},
    ],
    ids=[
        "lists",
        "objects",
        "filled objects",
        "filled lists",
        "numbers",
        "names",
        "texts",
        "messages",
        "wide",
        "wider",
    ],
)
def test_a_row_takes_no_more_memory_than_its_weight(columns: dict[str, Any]) -> None:
    """Guards the bound on memory: rows in flight are counted by the weight of their lines."""
    fields = columns if "messages" in columns else {"prompt": "a"} | columns
    line = Line(0, json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode())
    tracemalloc.start()
    row = parse_line(line)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert row.error is None and taken < weight_of(line.data)
