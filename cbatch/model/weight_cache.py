"""The folder that keeps files of packed weights from one start to the next, and how much it may hold."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cbatch.base.config import EngineConfig
from cbatch.base.units import format_bytes, parse_memory

_log = logging.getLogger("cbatch")

WEIGHTS, RECORD, LOCK, PARTIAL = ".weights", ".record", ".lock", ".partial"
"""How names end: of a file, and, after its whole name, of what belongs to it."""

DEFAULT_LIMIT = "50%"

LEAST_BYTES = 64 * 2**20
"""Smaller weights are packed about as fast as a file is opened and checked."""


class CachedFile(NamedTuple):
    """used_ns: when an engine last mapped it"""

    name: str
    size: int
    used_ns: int


@dataclass(frozen=True)
class WeightCache:
    """A folder of packed weights.

    limit:       the most that its files may take, as `20GiB` or a share of what its disk would have free without them
    least_bytes: weights that take less are not kept
    """

    folder: Path
    limit: str = DEFAULT_LIMIT
    least_bytes: int = 0

    @classmethod
    def of_config(cls, config: EngineConfig) -> WeightCache | None:
        """The one that an engine uses, if any. That of the user is `cbatch/weights` in XDG_CACHE_HOME or `~/.cache`."""
        if not config.weight_cache or sys.platform != "linux":
            return None
        limit = config.weight_cache_size or DEFAULT_LIMIT
        if config.weights_folder is not None:
            return cls(Path(config.weights_folder), limit)
        folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
        try:
            folder = folder if folder.is_absolute() else Path.home() / ".cache"
        except RuntimeError:
            _log.warning("Packed weights are not kept, since there is no home directory.")
            return None
        return cls(folder / "cbatch" / "weights", limit, LEAST_BYTES)

    def files(self) -> list[CachedFile]:
        """All complete files, the one that was used longest ago first; none if the folder cannot be read."""
        with suppress(OSError):
            return sorted(_files(self.folder), key=lambda file: file.used_ns)
        return []

    def describe(self) -> str:
        """Where it is and what it holds, for people."""
        files = self.files()
        size = format_bytes(sum(file.size for file in files))
        limit = f"{self.limit} of what is free" if self.limit.endswith("%") else self.limit
        return f"{size} in {self.folder}, at most {limit}; cbatch info --clear-weight-cache empties it"

    def clear(self) -> int:
        """Removes all files but those that are just being made; the bytes that they took.

        Engines that have mapped them keep them until they are closed. Raises OSError if a file cannot be removed.
        """
        files = self.files()
        if files:
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                for file in files:
                    _remove(file.name, folder)
                _remove_abandoned(folder)
            finally:
                os.close(folder)
        return sum(file.size for file in files)

    def make_room(self, folder: int, size: int) -> None:
        """Removes the files that were used longest ago, until one of this size may be added.

        folder: of this cache, opened

        Raises OSError if there is no room even without the others.
        """
        _remove_abandoned(folder)
        files, disk = self.files(), os.fstatvfs(folder)
        held = sum(file.size for file in files)
        most = parse_memory(self.limit, disk.f_bavail * disk.f_frsize + held)
        if size > most:
            raise OSError(f"they take {format_bytes(size)}, and it may hold {format_bytes(most)}")
        for file in files:
            if held + size <= most:
                break
            _remove(file.name, folder)
            held -= file.size


def _files(folder: Path) -> Iterator[CachedFile]:
    for path in folder.glob("*" + WEIGHTS):
        with suppress(OSError):
            status = path.lstat()
            used = status.st_mtime_ns
            with suppress(OSError):
                used = path.with_name(path.name + RECORD).lstat().st_mtime_ns
            yield CachedFile(path.name, status.st_size, used)


def _remove(name: str, folder: int) -> None:
    """Removes a file; those that have mapped it can still read it."""
    for suffix in (RECORD, ""):
        unlink(name + suffix, folder)


def _remove_abandoned(folder: int) -> None:
    """Removes what processes have left that died while they made a file."""
    for name in os.listdir(folder):
        if name.endswith(WEIGHTS + PARTIAL):
            with suppress(OSError):
                lock = os.open(name.removesuffix(PARTIAL) + LOCK, os.O_RDWR | os.O_CREAT, 0o600, dir_fd=folder)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    unlink(name, folder)
                finally:
                    os.close(lock)


def unlink(name: str, folder: int) -> None:
    """Removes a file if it is there."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
