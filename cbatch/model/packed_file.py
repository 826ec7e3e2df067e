"""Arrays in a file that the processes of a machine share: the first one fills it, and all of them map it.

The name of the file is a hash of everything that decides its content, and begins with what that was. It gets this name
when it is complete. While one process fills it, others wait for a lock, which the system releases if the process dies.

A file is kept until others need its place, also when the machine restarts. Nobody waits for the disk: a record beside
the file holds a checksum of it, so that a file is noticed that a crash has torn, or a disk has spoiled, and is made
anew. The record also says which file was found to be whole since the machine started; only another one is read again.

Each process maps the file copy-on-write. Nothing writes to weights, so no page is copied; and numba compiles for arrays
that can be written, as those in private memory can, where read-only ones would need every kernel compiled once more. A
kernel that did write would harm nobody else.

The folder of the files keeps them from one start to the next, within bounds (see `WeightCache`).
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import logging
import mmap
import os
import stat
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.base.config import EngineConfig
from cbatch.base.units import format_bytes, parse_memory
from cbatch.base.user_folders import user_folder
from cbatch.runtime.cpu import num_threads
from cbatch.runtime.memory import count_as_taken

_log = logging.getLogger("cbatch")

Arrays = dict[str, NDArray[Any]]

WEIGHTS, RECORD, LOCK, PARTIAL = ".weights", ".record", ".lock", ".partial"
"""How names end: of a file, and, after its whole name, of what belongs to it."""

DEFAULT_LIMIT = "50%"

LEAST_BYTES = 64 * 2**20
"""Smaller weights are packed about as fast as a file is opened and checked."""

_HEADER_BYTES = 4096
_LINE = 64
"""Arrays begin with a line of the processor's cache."""

_SPARE_BYTES = 64 * 2**20
"""Room that is left on the disk."""

_HUGE_PAGE = 2 * 2**20

_CHECKED_BYTES = 2**20
"""Each piece of so many bytes has a checksum: few enough for the processor's caches."""

_MAP_FIXED, _MADV_HUGEPAGE, _MADV_COLLAPSE = 0x10, 14, 25
"""Of Linux; Python names few of them. The last (since Linux 6.1) makes huge pages of small ones, which a tmpfs has."""


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
        """The one that an engine uses, if any. That of the user is `weights` in its folder for caches."""
        if not config.weight_cache or sys.platform != "linux":
            return None
        limit = config.weight_cache_size or DEFAULT_LIMIT
        if config.weights_folder is not None:
            return cls(Path(config.weights_folder), limit)
        try:
            folder = user_folder("CACHE")
        except RuntimeError:
            _log.warning("Packed weights are not kept, since there is no home directory.")
            return None
        return cls(folder / "weights", limit, LEAST_BYTES)

    def files(self) -> list[CachedFile]:
        """All complete files, the one that was used longest ago first; none if the folder cannot be read."""
        found = []
        with suppress(OSError):
            for path in self.folder.glob("*" + WEIGHTS):
                with suppress(OSError):
                    status = path.lstat()
                    used = status.st_mtime_ns
                    with suppress(OSError):
                        used = path.with_name(path.name + RECORD).lstat().st_mtime_ns
                    found.append(CachedFile(path.name, status.st_size, used))
        return sorted(found, key=lambda file: file.used_ns)

    def describe(self) -> str:
        """Where it is and what it holds, for people."""
        files = self.files()
        size = format_bytes(sum(file.size for file in files))
        limit = f"{self.limit} of what is free" if self.limit.endswith("%") else self.limit
        return f"{size} in {self.folder}, at most {limit}"

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


def _remove(name: str, folder: int) -> None:
    """Removes a file; those that have mapped it can still read it."""
    for suffix in (RECORD, ""):
        _unlink(name + suffix, folder)


def _remove_abandoned(folder: int) -> None:
    """Removes what processes have left that died while they made a file."""
    for name in os.listdir(folder):
        if name.endswith(WEIGHTS + PARTIAL):
            lock, flags = name.removesuffix(PARTIAL) + LOCK, os.O_RDWR | os.O_CREAT
            with suppress(OSError), _opened(lock, flags, folder) as opened:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _unlink(name, folder)


def _unlink(name: str, folder: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


@contextmanager
def _opened(path: Path | str, flags: int, folder: int | None = None) -> Iterator[int]:
    file = os.open(path, flags, 0o600, dir_fd=folder)
    try:
        yield file
    finally:
        os.close(file)


Sizes = Mapping[str, tuple[int, np.dtype[Any]]]
"""How many numbers each of some arrays has, and their type."""


class PackedFile(NamedTuple):
    """A file of arrays in a folder that belongs to this user alone.

    content: what decides the numbers in the arrays, as JSON values
    """

    cache: WeightCache
    content: Mapping[str, Any]

    def arrays(self, sizes: Sizes, fill: Callable[[Arrays], None]) -> Arrays:
        """The arrays of these sizes, mapped; `fill` is called if no process has filled them yet.

        Raises OSError if the file cannot be made or must not be trusted, and what `fill` raises.
        """
        if sys.platform != "linux":
            raise OSError("that takes Linux")
        layout, path = _Layout.of(self.content, sizes), self.cache.folder
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as folder:
            if not _is_ours(folder):
                raise PermissionError(f"{path} is open to other users")
            with _opened(layout.name + LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, folder) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                mapping = _map_finished(layout, folder)
                if mapping is None:
                    self.cache.make_room(folder, layout.size)
                    _fill_file(layout, folder, fill)
                    mapping = _map_finished(layout, folder)
                if mapping is None:
                    raise OSError(f"{path / layout.name} does not hold what was written to it")
                return layout.arrays(mapping)


class _Layout(NamedTuple):
    """Where everything lies in a file of a name and size; `header` is padded to `_HEADER_BYTES`."""

    name: str
    size: int
    header: bytes
    sizes: Sizes
    offsets: Mapping[str, int]

    @classmethod
    def of(cls, content: Mapping[str, Any], sizes: Sizes) -> _Layout:
        offsets, end = {}, _HEADER_BYTES
        for name, (count, type) in sizes.items():
            offsets[name] = end
            end += -(-count * type.itemsize // _LINE) * _LINE
        size = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        arrays = {
            name: {"dtype": type.name, "shape": [count], "offset": offsets[name]}
            for name, (count, type) in sizes.items()
        }
        described = {**content, "byteorder": sys.byteorder, "size": size, "arrays": arrays}
        header = json.dumps(described, sort_keys=True).encode().ljust(_HEADER_BYTES - 1) + b"\n"
        if len(header) > _HEADER_BYTES:
            raise ValueError(f"The header of a packed file takes {len(header)} bytes.")
        name = hashlib.blake2b(header, digest_size=16).hexdigest() + WEIGHTS
        return cls(name, size, header, sizes, offsets)

    def arrays(self, mapping: _Mapping) -> Arrays:
        return {
            name: np.ndarray(count, type, mapping.memory, mapping.start + self.offsets[name])
            for name, (count, type) in self.sizes.items()
        }


class _Mapping(NamedTuple):
    """A file in memory, which begins at `start` and stays mapped as long as `memory` is there."""

    memory: mmap.mmap
    start: int
    size: int

    @classmethod
    def of(cls, file: int, size: int, flags: int) -> _Mapping:
        """Maps a file to an address where it can have huge pages.

        Linux chooses such addresses for some file systems only, and with small pages a step took up to a fifth longer.
        So the file takes the place of a part of other memory, which Python unmaps in the end.
        """
        memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = np.frombuffer(memory, np.uint8).ctypes.data
        start = -address % _HUGE_PAGE
        place = (address + start, size, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED, file, 0)
        if _system_mmap()(*place) != address + start:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        mapping = cls(memory, start, size)
        mapping.advise(_MADV_HUGEPAGE)
        return mapping

    def checksum(self) -> str:
        """A hash of the checksums of all pieces, which threads make at the speed of memory."""
        words = np.frombuffer(self.memory, np.uint64, self.size // 8, self.start)

        def check(first: int) -> int:
            piece = words[first : first + _CHECKED_BYTES // 8]
            # One sum for each place within a page: a bit that changes changes one of them.
            return zlib.crc32(piece.reshape(-1, mmap.PAGESIZE // 8).sum(axis=0))

        with ThreadPoolExecutor(num_threads(), "cbatch-check") as executor:
            found = list(executor.map(check, range(0, len(words), _CHECKED_BYTES // 8)))
        return hashlib.blake2b(np.array(found, np.uint32).tobytes(), digest_size=16).hexdigest()

    def advise(self, advice: int) -> None:
        """Asks for huge pages; a system that has none refuses."""
        with suppress(OSError):
            self.memory.madvise(advice, self.start, self.size)


@cache
def _system_mmap() -> Any:
    """`mmap` of the C library, which takes an address."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    size, number = ctypes.c_size_t, ctypes.c_int
    function.argtypes = [ctypes.c_void_p, size, number, number, number, ctypes.c_long]
    function.restype = size
    return function


def _boot() -> str:
    """Identifies the run of the operating system."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _is_ours(file: int) -> bool:
    """Whether an open file or folder belongs to this user, and nobody else may touch it."""
    status = os.fstat(file)
    is_plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return is_plain and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _map_finished(layout: _Layout, folder: int) -> _Mapping | None:
    """The file, mapped; None if there is none, or it is not as it was written. Others can use it from then on."""
    name, record = layout.name, layout.name + RECORD
    with ExitStack() as stack:
        try:
            file = stack.enter_context(_opened(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, folder))
            is_whole = _is_ours(file) and os.fstat(file).st_size == layout.size
            if not is_whole or os.pread(file, _HEADER_BYTES, 0) != layout.header:
                return None
        except OSError:
            return None
        mapping = _Mapping.of(file, layout.size, mmap.MAP_PRIVATE)
        before = _read_record(record, folder)
        now = {"boot": _boot(), "file": _identity(file)}
        if any(before.get(key) != value for key, value in now.items()):
            mapping.advise(mmap.MADV_WILLNEED)
            if mapping.checksum() != before.get("checksum"):
                _log.warning("A file of packed weights is spoiled, and made anew.")
                _unlink(record, folder)
                return None
            _write_record(record, folder, before | now)
        os.utime(record, ns=(time.time_ns(),) * 2, dir_fd=folder)  # when it was used last
        if not _is_in_memory(file):
            count_as_taken(mapping.memory, layout.size)
        return mapping


def _identity(file: int) -> list[int]:
    """The marks of a file that change when somebody writes to it or replaces it."""
    status = os.fstat(file)
    return [status.st_ino, status.st_size, status.st_mtime_ns]


def _read_record(name: str, folder: int) -> dict[str, Any]:
    """The known facts about a file; empty if there are none."""
    with (
        suppress(OSError, ValueError, RecursionError),
        _opened(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, folder) as file,
    ):
        record = json.loads(os.read(file, _HEADER_BYTES))
        return record if isinstance(record, dict) else {}
    return {}


def _write_record(name: str, folder: int, record: Mapping[str, Any]) -> None:
    partial = name + PARTIAL
    _unlink(partial, folder)
    with _opened(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, folder) as file:
        os.write(file, json.dumps(record).encode())
    os.rename(partial, name, src_dir_fd=folder, dst_dir_fd=folder)


def _fill_file(layout: _Layout, folder: int, fill: Callable[[Arrays], None]) -> None:
    """Writes the file under another name, straight from `fill` into its pages, then renames it."""
    partial = layout.name + PARTIAL
    _unlink(partial, folder)  # of a process that died; whatever it is
    with _opened(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, folder) as file:
        try:
            disk, needed = os.fstatvfs(file), layout.size + _SPARE_BYTES
            if (free := disk.f_bavail * disk.f_frsize) < needed:
                raise OSError(f"its disk has {format_bytes(free)} left, and they need {format_bytes(needed)}")
            # Writing to a mapped page that the disk has no room for would end the process.
            os.posix_fallocate(file, 0, layout.size)
            mapping = _Mapping.of(file, layout.size, mmap.MAP_SHARED)
            fill(layout.arrays(mapping))
            os.pwrite(file, layout.header, 0)
            mapping.advise(_MADV_COLLAPSE)
            record = {"boot": _boot(), "checksum": mapping.checksum(), "file": _identity(file)}
            os.rename(partial, layout.name, src_dir_fd=folder, dst_dir_fd=folder)
            _write_record(layout.name + RECORD, folder, record)
        except BaseException:
            _unlink(partial, folder)
            raise


def _is_in_memory(file: int) -> bool:
    """Whether the file is on a tmpfs, whose pages the system does not call available."""
    device = os.fstat(file).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        return any(line.split()[2] == number and " - tmpfs " in line for line in lines)
    return False
