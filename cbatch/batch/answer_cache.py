"""Keeps answers on disk by what decides them, so that no run computes them twice: one SQLite database in a folder."""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cbatch.base.errors import ConfigError
from cbatch.base.units import parse_memory

_log = logging.getLogger("cbatch")

FILE_NAME = "answers.sqlite"
DEFAULT_CACHE_SIZE = "1GiB"
LEAST_SIZE = 2**20
APPLICATION_ID = 0x63626163
"""Tells a database of answers from others."""

BUSY_SECONDS = 5.0
"""How long a run waits for another one that writes at the moment."""

CHECK_BYTES = 8
KEEP_SHARE = 0.9
"""The share of a full cache that is left when its oldest answers were removed."""

VACUUM_SHARE = 1.25
"""Pages that are free are given back if the file is larger than this share of what it may take."""

DATABASE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""Errors of a damaged database: the message of one may hold bytes of it that are no UTF-8."""

_TABLES = """
CREATE TABLE IF NOT EXISTS answers (
    key BLOB PRIMARY KEY, used INTEGER NOT NULL, checksum BLOB NOT NULL, data BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_use ON answers (used);
"""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """folder: where the database lies; size: the most that it may take, such as `1GiB`"""

    folder: str
    size: str = DEFAULT_CACHE_SIZE

    @property
    def max_bytes(self) -> int:
        """Raises ConfigError if `size` is no amount."""
        if "%" in self.size:
            raise ConfigError(f"The size of a cache of answers is an amount such as 4GiB, not {self.size}.")
        if (size := parse_memory(self.size, 0)) < LEAST_SIZE:
            raise ConfigError(f"A cache of answers takes at least 1 MiB, and {self.size} is less.")
        return size


class AnswerCache:
    """A bounded table of answers. Those that were used longest ago leave first.

    Threads and processes may use it at once. A write is a transaction, so a kill leaves either all of it or nothing. An
    answer that was damaged is removed and computed again. A cache that fails ends no run: it is left out from then on,
    with a warning.
    """

    def __init__(self, config: CacheConfig) -> None:
        """Makes the folder, for nobody else to read, if it is not there. Raises ConfigError if it cannot be used."""
        self._max_bytes = config.max_bytes
        self._path = Path(config.folder) / FILE_NAME
        self._lock = threading.Lock()
        self._used: set[bytes] = set()
        """Keys that were found since the last write."""
        self._database: sqlite3.Connection | None = None
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileExistsError):  # opening one that is there could take away locks of this very process
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            self._database = self._open()
        except OSError as error:
            raise ConfigError(f"Cannot use {self._path} as a cache: {error.strerror}.") from error
        except DATABASE_ERRORS as error:
            raise ConfigError(f"Cannot use {self._path} as a cache: {error}. Remove it to start a new one.") from error

    @property
    def is_open(self) -> bool:
        """Whether it still gives and takes answers."""
        return self._database is not None

    def get(self, key: bytes) -> bytes | None:
        """The answer with this key, if it is there and whole."""
        with self._guarded() as database:
            if database is None:
                return None
            row = database.execute("SELECT checksum, data FROM answers WHERE key = ?", (key,)).fetchone()
            if row is None:
                return None
            checksum, data = row
            if isinstance(data, bytes) and checksum == _checksum(key, data):
                self._used.add(key)
                return data
            database.execute("DELETE FROM answers WHERE key = ?", (key,))
        return None

    def put(self, answers: Mapping[bytes, bytes]) -> None:
        """Adds answers, and removes the oldest ones if there is no room."""
        with self._guarded() as database:
            if database is None or not (answers or self._used):
                return
            now = time.time_ns()
            rows = [(key, now, _checksum(key, data), data) for key, data in answers.items()]
            with database:
                database.execute("BEGIN IMMEDIATE")
                database.executemany("UPDATE answers SET used = ? WHERE key = ?", [(now, key) for key in self._used])
                self._used.clear()
                database.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", rows)
                self._make_room(database)
            if _pages(database)[0] > self._max_bytes * VACUUM_SHARE:  # the size was set to less than it was
                database.executescript("PRAGMA incremental_vacuum")  # which `execute` would do in part

    @contextmanager
    def _guarded(self) -> Iterator[sqlite3.Connection | None]:
        """The database for one thread; None if it is not used any more, as from its first error on."""
        with self._lock:
            try:
                yield self._database
            except DATABASE_ERRORS as error:
                if not _is_busy(error):  # else the next write may find it free
                    _log.warning("The cache %s is not used any more: %s.", self._path, error)
                    self._close()

    def close(self) -> None:
        """Notes what was used, and closes the database; the cache gives and takes nothing any more."""
        self.put({})
        with self._lock:
            self._close()

    def _open(self) -> sqlite3.Connection:
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            database = sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            try:
                _prepare(database)
                return database
            except DATABASE_ERRORS as error:
                database.close()
                if not _is_busy(error) or time.monotonic() > deadline:
                    raise
            time.sleep(0.01)  # another run makes it at this moment

    def _make_room(self, database: sqlite3.Connection) -> None:
        if _pages(database)[1] <= self._max_bytes:
            return
        while _pages(database)[1] > self._max_bytes * KEEP_SHARE:
            (count,) = database.execute("SELECT count(*) FROM answers").fetchone()
            if not count:
                break
            database.execute(
                "DELETE FROM answers WHERE rowid IN (SELECT rowid FROM answers ORDER BY used LIMIT ?)",
                (max(count // 20, 1),),
            )

    def _close(self) -> None:
        if self._database is not None:
            with suppress(*DATABASE_ERRORS):
                self._database.close()
        self._database = None


def _prepare(database: sqlite3.Connection) -> None:
    """Makes the tables if they are not there. Raises sqlite3.Error for a database of something else."""
    (found,) = database.execute("PRAGMA application_id").fetchone()
    (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if found != APPLICATION_ID and tables:
        raise sqlite3.DatabaseError("it is a database of something else")
    database.execute("PRAGMA auto_vacuum = INCREMENTAL")  # counts only before the first table
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")  # a power loss may cost the latest answers
    if not tables:
        database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        database.executescript(_TABLES)


def _pages(database: sqlite3.Connection) -> tuple[int, int]:
    """Bytes of the database's pages, and of those that hold something."""
    pages, free, size = (
        database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return pages * size, (pages - free) * size


def _is_busy(error: Exception) -> bool:
    return getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _checksum(key: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(key + data, digest_size=CHECK_BYTES).digest()
