"""The table of answers on disk: bounded, private, safe under several runs, kills and damage."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cbatch.base.errors import ConfigError
from cbatch.batch.answer_cache import FILE_NAME, AnswerCache, CacheConfig


def keys(count: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in range(count)]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[AnswerCache]:
    with closing(AnswerCache(CacheConfig(str(tmp_path / "new" / "cache"), "1MiB"))) as made:
        yield made


def test_answers_outlive_their_run(tmp_path: Path) -> None:
    """Guards the whole point: what one run has put, a later one gets, and nothing else."""
    config = CacheConfig(str(tmp_path))
    first, second, third = keys(3)
    with closing(AnswerCache(config)) as cache:
        cache.put({first: b"one", second: b"two"})
        cache.put({second: b"2"})
    assert cache.get(first) is None, "it is closed"
    with closing(AnswerCache(config)) as cache:
        assert (cache.get(first), cache.get(second), cache.get(third)) == (b"one", b"2", None)


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


def test_damage_that_sqlite_cannot_name_is_refused(tmp_path: Path) -> None:
    """Guards a run against the message of an error with damaged bytes in it, which Python cannot decode."""
    AnswerCache(CacheConfig(str(tmp_path))).close()
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes().replace(b"INTEGER NOT NULL", b"INTEGER NOT \xc2ULL"))
    with pytest.raises(ConfigError, match="Remove it to start a new one"):
        AnswerCache(CacheConfig(str(tmp_path)))


def test_what_is_no_cache_is_refused_and_left_alone(tmp_path: Path) -> None:
    """Guards files of others, and a cache that cannot be read, against being overwritten or taken silently."""
    path = tmp_path / FILE_NAME
    for content in (b"not a database at all" * 100, None):
        path.unlink(missing_ok=True)
        if content is None:
            with closing(sqlite3.connect(path)) as database:
                database.execute("CREATE TABLE mine (a)")
                database.commit()
        else:
            path.write_bytes(content)
        before = path.read_bytes()
        with pytest.raises(ConfigError, match="Remove it to start a new one"):
            AnswerCache(CacheConfig(str(tmp_path)))
        assert path.read_bytes() == before
    with pytest.raises(ConfigError, match="Cannot use"):
        AnswerCache(CacheConfig(str(path / "below a file")))
    for size, message in (("5", "at least 1 MiB"), ("10%", "is an amount"), ("much", "not an amount")):
        with pytest.raises(ConfigError, match=message):
            AnswerCache(CacheConfig(str(tmp_path), size))


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


WRITER = """
import os, sys
from contextlib import closing
from cbatch.batch.answer_cache import AnswerCache, CacheConfig

with closing(AnswerCache(CacheConfig(sys.argv[1], "1MiB"))) as cache:
    print("ready", flush=True)
    for round in range(int(sys.argv[2])):
        for number in range(40):
            key = number.to_bytes(16, "little")
            found = cache.get(key)
            assert found is None or found == key * 200, found
            cache.put({key: key * 200, os.urandom(16): os.urandom(4000)})
"""


def start_writer(folder: Path, rounds: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(rounds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_several_runs_use_it_at_once_and_are_killed(tmp_path: Path) -> None:
    """Guards two runs on one cache from its first moment on, and the table against SIGKILL in the middle of writes."""
    writers = [start_writer(tmp_path, 3) for _ in range(3)]
    for writer in writers:
        assert writer.communicate(timeout=60)[1] == "" and writer.returncode == 0
    for wait_s in (0.0, 0.02, 0.05, 0.03):
        writer = start_writer(tmp_path, 1000)
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        time.sleep(wait_s)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with closing(AnswerCache(CacheConfig(str(tmp_path), "1MiB"))) as cache:
        found = [cache.get(key) == key * 200 for key in keys(40)]
        assert sum(found) > 20
