"""The memory that the system gives this process at most, if it runs in a container or a group with a limit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")

_FILES = {
    "": ("memory.max", "memory.current", "file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
}
"""By the controller that /proc/self/cgroup names, none in version 2: limit, what is taken, and how much of it are pages
of files, which the system drops when it needs memory (https://docs.kernel.org/admin-guide/cgroup-v2.html).
"""


def free_cgroup_bytes() -> int:
    """Bytes that are free within the narrowest limit of this process; sys.maxsize if it has none."""
    return min(_free(), default=sys.maxsize)


def _free() -> Iterator[int]:
    with suppress(OSError):
        for line in _CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for name in _FILES.keys() & set(controllers.split(",")):
                group = _ROOT / name / path.strip("/")
                for folder in (group, *group.parents):
                    with suppress(OSError, ValueError):  # no such folder here, or no limit
                        yield _free_in(folder, *_FILES[name])
                    if folder == _ROOT / name:
                        break


def _free_in(folder: Path, limit: str, taken: str, files: str) -> int:
    """Raises ValueError if there is no limit, and OSError if the folder is none of a group."""
    most, now = (int((folder / name).read_text()) for name in (limit, taken))
    statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return max(most - now + int(statistics.get(files, 0)), 0)
