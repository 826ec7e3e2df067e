"""The table of answers on disk: bounded, private, safe under several runs, kills and damage."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Semaphore
from pathlib import Path

import pytest

from cbatch.base.errors import ConfigError
from cbatch.batch.answer_cache import FILE_NAME, AnswerCache, CacheConfig

FORK = multiprocessing.get_context("fork")


def keys(count: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in range(count)]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[AnswerCache]:
    with closing(AnswerCache(CacheConfig(str(tmp_path / "new" / "cache"), "1MiB"))) as made:
        yield made


def test_it_is_private(cache: AnswerCache, tmp_path: Path) -> None:
    """Guards answers against other users of the machine, in each file that SQLite makes."""
    cache.put({keys(1)[0]: b"secret"})
    folder = tmp_path / "new" / "cache"
    assert folder.stat().st_mode & 0o777 == 0o700
    found = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert FILE_NAME in found and set(found.values()) == {0o600}, found


def test_what_was_used_longest_ago_leaves_first(cache: AnswerCache, tmp_path: Path) -> None:
    """Guards the disk: the file stays about as large as it may be, and what is used is kept."""
    answer, names = os.urandom(10_000), keys(400)
    for number, key in enumerate(names):
        assert number == 0 or cache.get(names[0]) == answer
        cache.put({key: answer})
    size = (tmp_path / "new" / "cache" / FILE_NAME).stat().st_size
    assert 0.8 * 2**20 < size < 1.3 * 2**20
    kept = [key for key in names if cache.get(key) is not None]
    assert names[0] in kept and kept[1:] == names[-len(kept) + 1 :] and 60 < len(kept) < 105


def test_a_smaller_size_gives_the_disk_back(tmp_path: Path) -> None:
    """Guards --cache-size that is set to less than the cache has already."""
    for size in ("4MiB", "1MiB"):
        with closing(AnswerCache(CacheConfig(str(tmp_path), size))) as cache:
            cache.put({key: os.urandom(10_000) for key in keys(300)})
    assert (tmp_path / FILE_NAME).stat().st_size < 1.3 * 2**20


def test_a_damaged_answer_is_removed(tmp_path: Path) -> None:
    """Guards rows against what a disk has changed, in the answer or in its key."""
    config, (first, second, third) = CacheConfig(str(tmp_path)), keys(3)
    with closing(AnswerCache(config)) as cache:
        cache.put({first: b"good", second: b"other", third: b"third"})
        with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
            database.execute("UPDATE answers SET data = ? WHERE key = ?", (b"evil", first))
            database.execute("DELETE FROM answers WHERE key = ?", (third,))
            database.execute("UPDATE answers SET key = ? WHERE key = ?", (third, second))
            database.commit()
        assert cache.get(first) is None and cache.get(third) is None
        with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
            assert database.execute("SELECT count(*) FROM answers").fetchone() == (0,)


def test_what_is_no_cache_is_refused_and_left_alone(tmp_path: Path) -> None:
    """Guards files of others against being overwritten, and a run against damage that Python cannot decode."""
    path = tmp_path / FILE_NAME
    AnswerCache(CacheConfig(str(tmp_path))).close()
    damaged = path.read_bytes().replace(b"INTEGER NOT NULL", b"INTEGER NOT \xc2ULL")
    path.unlink()
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE mine (a)")
        database.commit()
    for content in (path.read_bytes(), damaged, b"not a database at all" * 100):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="Remove it to start a new one"):
            AnswerCache(CacheConfig(str(tmp_path)))
        assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("folder", "size", "message"),
    [
        (__file__, "1GiB", "Cannot use"),
        (".", "5", "at least"),
        (".", "10%", "is an amount"),
        (".", "x", "not an"),
    ],
)
def test_caches_that_cannot_be_made(folder: str, size: str, message: str) -> None:
    """Guards the start of a run: one sentence."""
    with pytest.raises(ConfigError, match=message):
        AnswerCache(CacheConfig(folder, size))


def test_a_cache_that_breaks_ends_no_run(cache: AnswerCache, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards a run against a table that is damaged while it runs: one warning, and it goes on without."""
    first, second = keys(2)
    cache.put({first: b"x" * 5000})
    with closing(sqlite3.connect(tmp_path / "new" / "cache" / FILE_NAME)) as database:
        database.execute("DROP TABLE answers")
    assert cache.get(first) is None and cache.get(second) is None
    cache.put({second: b"y"})
    assert [record.message for record in caplog.records] == [
        f"The cache {tmp_path / 'new' / 'cache' / FILE_NAME} is not used any more: no such table: answers."
    ]


def test_a_cache_that_is_locked_is_used_again_later(
    cache: AnswerCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against giving a cache up because another run holds it for longer than one waits."""
    first, second = keys(2)
    assert cache._database is not None
    cache._database.execute("PRAGMA busy_timeout = 10")
    with closing(sqlite3.connect(tmp_path / "new" / "cache" / FILE_NAME)) as database:
        database.execute("BEGIN IMMEDIATE")
        cache.put({first: b"lost"})
    cache.put({second: b"kept"})
    assert cache.get(first) is None and cache.get(second) == b"kept"


def start_writer(folder: Path, rounds: int, ready: Semaphore | None = None) -> BaseProcess:
    """A process that gets and puts answers; it ends with 0 if what it has got was right."""

    def work() -> None:
        with closing(AnswerCache(CacheConfig(str(folder), "1MiB"))) as cache:
            if ready is not None:
                ready.release()
            for key in keys(40) * rounds:
                found = cache.get(key)
                assert found is None or found == key * 200, found
                cache.put({key: key * 200, os.urandom(16): os.urandom(4000)})

    process = FORK.Process(target=work)
    process.start()
    return process


def test_several_runs_use_it_at_once_and_are_killed(tmp_path: Path) -> None:
    """Guards two runs on one cache from its first moment on, and the table against SIGKILL in the middle of writes."""
    for writer in [start_writer(tmp_path, 3) for _ in range(3)]:
        writer.join(60)
        assert writer.exitcode == 0
    for wait_s in (0.0, 0.02, 0.05, 0.03):
        writer = start_writer(tmp_path, 1000, ready := FORK.Semaphore(0))
        assert ready.acquire(timeout=60)
        time.sleep(wait_s)
        writer.kill()
        writer.join(60)
        with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with closing(AnswerCache(CacheConfig(str(tmp_path), "1MiB"))) as cache:
        assert sum(cache.get(key) == key * 200 for key in keys(40)) > 20
