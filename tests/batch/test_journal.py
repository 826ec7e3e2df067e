"""Journals keep the whole rows of a file; what is said of lines that are none."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from cbatch.batch.journal import Journal, fits_check, with_check
from cbatch.batch.row import format_result, format_row


def fields_of(index: int, **more: Any) -> dict[str, Any]:
    return {"index": index, "id": None, "text": f"answer {index} ✓", "key": f"{index:032x}"} | more


ROWS = [format_result(fields_of(index)) for index in range(4)]
OLDER = [format_row(fields_of(index)) for index in range(4)]
WHOLE = b"".join(ROWS)
FIT, NONE, JSON = "its check does not fit", "does not end with a check", "not valid JSON"
HALF = len(ROWS[0]) + 30
"""In the middle of the second row."""


def read(*parts: bytes) -> Journal:
    return Journal.read(io.BytesIO(b"".join(parts)), "out.jsonl")


def kept(journal: Journal) -> list[int]:
    return [journal.indices[number] for number in journal.rows(input_order=False)]


def test_a_check_is_the_crc_of_the_bytes_before_it() -> None:
    """Guards what the documentation says, so that other programs can make checks and test them."""
    row = b'{"index": 0, "text": "\xc3\xa9"'
    assert with_check(row + b"}\n") == row + b', "check": "a877ca7e"}\n'
    assert json.loads(ROWS[1]) == fields_of(1, check=ROWS[1][-11:-3].decode())
    found = [fits_check(line) for line in (ROWS[0], ROWS[0].replace(b"answer", b"anewer"), OLDER[0])]
    assert found == [True, False, None]


@pytest.mark.parametrize(
    ("damaged", "lines", "rows"),
    [
        pytest.param(WHOLE.replace(b"answer 1", b"answer 7"), {1: FIT}, [0, 2, 3], id="a character flipped"),
        pytest.param(WHOLE.replace(b'"check"', b'"chcck"', 1), {0: NONE}, [1, 2, 3], id="its name"),
        pytest.param(WHOLE.replace(ROWS[1], OLDER[1]), {1: NONE}, [0, 2, 3], id="a check cut out"),
        pytest.param(WHOLE.replace(ROWS[0][-1:] + ROWS[1], b" " + ROWS[1]), {0: FIT}, [2, 3], id="two glued"),
        pytest.param(WHOLE[:HALF] + b"\n" + WHOLE[HALF:], {1: JSON, 2: FIT}, [0, 2, 3], id="one split"),
        pytest.param(ROWS[0] + b"\n" + b"".join(ROWS[1:]), {1: JSON}, [0, 1, 2, 3], id="a blank line"),
        pytest.param(WHOLE.replace(b"}\n", b"}\r\n", 1), {0: NONE}, [1, 2, 3], id="another line end"),
        pytest.param(b"\xef\xbb\xbf" + WHOLE, {0: FIT}, [1, 2, 3], id="a byte order mark"),
        pytest.param(WHOLE + b"notes of mine", {4: JSON}, [0, 1, 2, 3], id="a last line that was not torn"),
    ],
)
def test_damaged_lines_are_told(damaged: bytes, lines: dict[int, str], rows: list[int]) -> None:
    """Guards against keeping a row whose bytes have changed; the others are kept."""
    journal = read(damaged)
    assert list(journal.damaged) == list(lines)
    assert all(reason in journal.damaged[number] for number, reason in lines.items())
    assert kept(journal) == rows
    assert journal.end == damaged.rfind(b"\n") + 1
    assert journal.is_in_order(input_order=True) == (4 in journal.damaged), "the end of the file is cut off"


@pytest.mark.parametrize("end", [ROWS[1][:1], ROWS[1][:40], ROWS[1][:-1], ROWS[1][:40] + bytes(20)])
def test_a_torn_row_at_the_end_is_no_damage(end: bytes) -> None:
    """Guards a run that was killed, or a power loss: what is left of the last row is cut off without a question."""
    journal = read(ROWS[0], end)
    assert (kept(journal), journal.damaged, journal.end, journal.torn) == ([0], {}, len(ROWS[0]), len(end))


def test_rows_of_older_versions_are_taken_in_front() -> None:
    """Guards files that were begun before rows had a check, and against rows that have lost theirs."""
    journal = read(OLDER[0], OLDER[1], ROWS[2])
    assert kept(journal) == [0, 1, 2] and not journal.damaged and not journal.is_in_order(input_order=True)
    assert [journal.has_check(number) for number in range(3)] == [False, False, True]
    assert [*read(ROWS[0], OLDER[1]).damaged] == [1]
    strange = format_row(fields_of(0, chcck="00000000"))
    assert [*read(strange, OLDER[1]).damaged] == [0]
    assert [*read(OLDER[0], OLDER[1][:-9] + b"\n", OLDER[2]).damaged] == [1]
