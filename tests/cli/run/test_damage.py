"""Outputs with random damage: refused, run again, and in the end as if nothing had happened to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cbatch.api import Engine
from cbatch.batch import journal
from cbatch.batch.journal import fits_check
from tests.support.damaged_outputs import DamageTest, make_engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with make_engine(tmp_path_factory.mktemp("engine")) as engine:
        yield engine


SAMPLE = {"rows": 24, "table": 6, "tokens": 3, "cache": 2, "tries": 2}
ALL = {"rows": 90, "table": 30, "tokens": 20, "cache": 5, "tries": 5}


@pytest.mark.parametrize(
    ("kind", "count"), [*SAMPLE.items(), *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in ALL.items())]
)
def test_damaged_outputs_become_whole(engine: Engine, tmp_path: Path, kind: str, count: int) -> None:
    """Guards every byte of rows, journals, tokens and cached answers against flips, cuts, doublings and insertions."""
    counts = DamageTest(engine, tmp_path, kind).damage_many(count)
    assert not counts.differing and not counts.not_ours, counts
    assert counts.kinds.total() == count and counts.computed > count / 2
    if kind != "cache":  # of which few bytes matter
        assert counts.resumed == count if kind == "tokens" else counts.refused > count / 2


@pytest.mark.exhaustive
def test_the_damage_is_such_that_checks_are_needed(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the test above: if checks are ignored, it finds outputs that differ."""
    monkeypatch.setattr(journal, "fits_check", lambda line: fits_check(line) is not None or None)
    counts = DamageTest(engine, tmp_path, "rows").damage_many(36)
    assert len(counts.differing) >= 2
