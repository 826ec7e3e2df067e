"""A cache of answers under whole batches: the same rows as without, and never those of something else."""

from __future__ import annotations

import sqlite3
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cbatch.api import Engine
from cbatch.batch import earlier_outputs
from cbatch.batch.answer_cache import FILE_NAME, CacheConfig, _checksum
from cbatch.batch.engine_driver import EngineStream
from cbatch.batch.line_processor import LineProcessor
from cbatch.batch.lines import RowOptions
from cbatch.batch.templates import lines_of
from cbatch.requests.completion import Completion
from tests.support.faults import slow_steps
from tests.support.model_folder import save_model
from tests.support.shared_engine import ROWS


def run(engine: Engine, rows: list[Any], folder: Path | None, **options: Any) -> list[Completion]:
    return list(engine.map(rows, cache=folder, **options))


def num_computed(engine: Engine, rows: list[Any], folder: Path | None, **options: Any) -> int:
    """Output tokens that the engine makes for these rows."""
    before = engine.stats().num_tokens
    run(engine, rows, folder, **options)
    return engine.stats().num_tokens - before


def test_cached_rows_are_those_that_were_computed(engine: Engine, tmp_path: Path) -> None:
    """Guards every field of every kind of row, and that nothing is computed a second time."""
    plain = [row.to_dict() for row in run(engine, ROWS, None)]
    first = run(engine, ROWS, tmp_path)
    before = engine.stats().num_tokens
    second = run(engine, ROWS, tmp_path)
    assert engine.stats().num_tokens == before
    assert [row.to_dict() for row in first] == [row.to_dict() for row in second] == plain
    assert not any(row.from_cache for row in first)
    assert all(row.from_cache == (row.error is None) for row in second)
    timed = second[0].to_dict(timings=True)
    assert timed["from_cache"] is True and timed["cached_tokens"] == 0
    assert "from_cache" not in first[0].to_dict(timings=True)


HOT = {"prompt": "hello world", "max_tokens": 12, "seed": 1}


def test_other_settings_get_other_answers(engine: Engine, tmp_path: Path) -> None:
    """Guards against the answer of another temperature."""
    rows = [HOT | {"temperature": heat} for heat in (0.0, 1.0, 3.0)]
    cached, plain = ([run(engine, [row], folder)[0].text for row in rows] for folder in (tmp_path, None))
    assert cached == plain and len(set(plain)) == 3


def test_equal_rows_are_computed_once_also_side_by_side(engine: Engine, tmp_path: Path) -> None:
    """Guards a table with the same value in many rows, which are all asked for before the first one has its answer."""
    rows = [{"id": number, "prompt": "hello", "max_tokens": 9} for number in range(12)]
    rows += [{"id": "long", "prompt": "x " * 400}, {"id": "longer", "prompt": "x " * 400}]
    plain = [row.to_dict() for row in run(engine, rows, None)]
    once = num_computed(engine, rows[:1], None)
    assert num_computed(engine, rows, tmp_path / "a") == once > 0
    found = run(engine, rows, tmp_path / "b")
    assert [row.to_dict() for row in found] == plain and sum(row.from_cache for row in found) == 11
    assert all(row.error is not None for row in found[12:])


def test_rows_that_wait_for_a_cancelled_one_are_computed(engine: Engine, tmp_path: Path) -> None:
    """Guards replicas, which cancel a row that another one has finished, and everybody who waits for its answer."""
    processor = LineProcessor(engine.core.input_processor(), RowOptions(cache=CacheConfig(str(tmp_path))))
    stream = EngineStream(engine.thread, processor, window=4)
    rows = [{"prompt": "hello", "max_tokens": 40, "ignore_eos": True}] * 3
    found: list[int] = []
    with slow_steps(), closing(stream.finished(lines_of(rows))) as finished:
        for each in finished:
            if 0 in stream._in_flight:
                stream.cancel(0)
            found += [row.completion.index for row in each]
            if {1, 2} <= set(found):
                break
    assert 0 not in found


def test_another_model_gets_other_answers(engine: Engine, tmp_path: Path) -> None:
    """Guards against the answer of another model, or of one in another dtype."""
    rows = [{"prompt": "hello", "max_tokens": 5}]
    run(engine, rows, tmp_path)
    with Engine(str(save_model(tmp_path / "model", context=300)), device="cpu", dtype="float32") as other:
        assert num_computed(other, rows, tmp_path) > 0
        assert num_computed(other, rows, tmp_path) == 0
    assert num_computed(engine, rows, tmp_path) == 0


@pytest.mark.parametrize("data", [b"", zlib.compress(b'{"outputs": [], "prompt": null}'), zlib.compress(b"[]")])
def test_answers_that_cannot_be_read_are_computed_again(engine: Engine, tmp_path: Path, data: bytes) -> None:
    """Guards a run against what another version may have written, and the cache against keeping it."""
    rows = [{"prompt": "hello", "max_tokens": 5}]
    (right,) = run(engine, rows, tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
        ((key,),) = database.execute("SELECT key FROM answers").fetchall()
        database.execute("UPDATE answers SET data = ?, checksum = ?", (data, _checksum(key, data)))
        database.commit()
    (row,) = run(engine, rows, tmp_path)
    assert row.to_dict() == right.to_dict() and not row.from_cache
    assert run(engine, rows, tmp_path)[0].from_cache


def test_tries_come_from_the_cache_one_by_one(engine: Engine, tmp_path: Path) -> None:
    """Guards a run with more tries after one with fewer: only the new ones are computed, and usage counts all."""
    rows = [{"id": number, "prompt": "hello", "max_tokens": 6, "temperature": 1.0} for number in range(4)]
    check = {"validate": "regex=never"}
    two = num_computed(engine, rows, tmp_path, tries=2, **check)
    three = num_computed(engine, rows, None, tries=3, **check)
    assert num_computed(engine, rows, tmp_path, tries=3, **check) == three - two > 0
    first, again = (run(engine, rows, folder, tries=3, **check) for folder in (None, tmp_path))
    assert [row.to_dict() for row in first] == [row.to_dict() for row in again]
    assert [row.usage.completion_tokens for row in first] == [row.usage.completion_tokens for row in again]
    assert all(row.from_cache for row in again)


def test_closing_a_batch_closes_its_cache(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a notebook that leaves many loops against open databases."""
    closed = []
    close = earlier_outputs.CachedOutputs.close
    monkeypatch.setattr(earlier_outputs.CachedOutputs, "close", lambda self: (closed.append(1), close(self)))
    for _ in engine.map(["a", "b", "c"], params={"max_tokens": 2}, cache=tmp_path):
        break
    assert closed == [1]
