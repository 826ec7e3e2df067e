"""The pictures of a bench: in characters, and as SVG for light and for dark pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cbatch.cli.bench import comparison
from cbatch.cli.bench.load import Capacity
from cbatch.cli.bench.page import Page
from cbatch.cli.bench.recorder import RunRecord
from cbatch.cli.bench.timeline import time_shares, whole_percents
from tests.support.bench_reports import (
    both,
    load_report,
    make_comparison,
    make_load,
    make_one_load,
    make_search,
    static_record,
)
from tests.support.pictures import check_colours, check_pictures, draw_all


def test_shares_are_whole() -> None:
    """Guards that shares add up to 1, and their percents to 100, whatever is rounded."""
    for record in (*both().values(), RunRecord(3, [])):
        assert sum(time_shares(record).values()) == pytest.approx(1)
    assert time_shares(static_record()) == {"useful": 0.6875, "padding": 0.0625, "idle": 0.125, "empty": 0.125}
    assert whole_percents({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}) == {"a": 34, "b": 33, "c": 33}


EXPECTED = {
    "timeline": {"static batches: 8.00 s", "continuous: 6.00 s", "useful 100%, padding 0%, idle 0%, empty 0%"},
    "speed": {"output tokens/s", "transformers-generate", "first token (TTFT)", "2.00 s / 7.88 s", "not known"},
    "load": {"users at once", "the objective (SLO)", "4 users", "16", "100 ms", "100%"},
}


@pytest.fixture(scope="module")
def drawn() -> dict[str, tuple[str, Any]]:
    """The SVG text and the figure of every picture, by name: with very slow runs and peers."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plot)")
    search = make_search(1, 2, 4, 7, 8, 16, capacity=4, rounds=2)
    pages = make_comparison("ablations", "peers"), search, make_one_load()
    return draw_all([one for page in pages for one in page.pictures])


def test_pictures_are_whole(drawn: dict[str, tuple[str, Any]]) -> None:
    """Guards each picture: well-formed, it says what it shows in figures counted by hand, and no words are misplaced.

    The same data give the same picture, so that a diff of kept ones says something.
    """
    check_pictures(drawn, EXPECTED)
    one, other = (make_search(1).pictures[0].drawing.svg for _ in range(2))
    assert one == other


def test_colours(drawn: dict[str, tuple[str, Any]]) -> None:
    """Guards legends and dark pages: each colour that is no ink or background is explained, and has a dark one."""
    check_colours(drawn)


def names(page: Page) -> set[str]:
    """Of its pictures."""
    return {picture.name for picture in page.pictures}


def test_pictures_of_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards empty runs and other strategies: pictures without data are left out, and stderr says why there is none."""
    unjudged = make_load(4) | {"users_served_share": None}
    empty = load_report(4, {1: [unjudged]}, Capacity(0))
    empty.write(str(tmp_path), None)
    assert "no picture, because no answer" in capsys.readouterr().err and not any(tmp_path.iterdir())
    assert names(empty) == names(make_one_load()) == set()
    assert names(make_search(1)) == {"load"}
    page_with = lambda **records: comparison.page_of(make_comparison().data, records)  # noqa: E731
    assert names(page_with(nothing=RunRecord(1, []))) == {"speed"}
    assert names(make_comparison()) == {"timeline", "speed"}
