"""The processors that the system gives to this process, read from its files, without torch.

A thread computes on each core: a core's second hardware thread adds little to kernels that keep its vector units busy.
Slower cores beside fast ones take no part, as every phase of a step would wait for them. A quota of CPU time counts as
that many cores, since threads beyond it are stopped together until the next period.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path, PurePosixPath

from cbatch.base.units import format_count

ROOT = Path("/")

_FAST = 0.6
"""The least capacity of a performance core, beside that of the fastest."""

Core = tuple[int, ...]
"""The numbers of a core's CPUs, as Linux calls its hardware threads."""


@dataclass(frozen=True, slots=True)
class Processors:
    """The processors that this process may compute on.

    nodes:    the cores of each NUMA node, by its number
    quota:    CPU time that it may take, in cores; infinite if nothing limits it
    num_cpus: all CPUs that it may use, also those whose cores take no part
    is_part:  other NUMA nodes take no part
    """

    nodes: Mapping[int, tuple[Core, ...]]
    quota: float
    num_cpus: int
    is_part: bool = False

    @property
    def cores(self) -> list[Core]:
        """All cores, those of a node beside each other."""
        return list(chain.from_iterable(self.nodes.values()))

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset(chain.from_iterable(self.cores))

    @property
    def num_threads(self) -> int:
        """Threads that compute. Half a core more than a whole number is worth a thread, which stands still at times."""
        quota = self.quota if self.quota < len(self.cores) else len(self.cores)
        return max(math.floor(quota + 0.5), 1)

    @property
    def reason(self) -> str:
        """Why there are so many threads."""
        if self.num_threads < (count := len(self.cores)):
            return f"what a quota of {round(self.quota, 2):g} of {count} cores allows"
        which = "core of a NUMA node" if self.is_part else "core" if len(self.cpus) == self.num_cpus else "fast core"
        return f"one for each {which}, of {format_count(self.num_cpus, 'CPU')} that this process may use"

    def on_one_node(self, num_bytes: int, root: Path = ROOT) -> Processors:
        """The node that offers most threads, then most free memory, alone. All nodes if it lacks room for num_bytes."""

        def offer(node: int) -> tuple[int, int]:
            return min(len(self.nodes[node]), self.num_threads), _free_bytes(root, node)

        best = max(self.nodes, key=offer)
        if len(self.nodes) == 1 or offer(best)[1] < num_bytes:
            return self
        return replace(self, nodes={best: self.nodes[best]}, is_part=True)


def read_processors(root: Path = ROOT) -> Processors:
    """The processors of this process. Files that are missing or malformed limit nothing.

    root: where the files of the system are
    """
    usable = set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    if sys.platform != "linux":
        return Processors({0: tuple(_cores_elsewhere(len(usable)))}, math.inf, len(usable))
    devices = root / "sys/devices"
    folders = (devices / "system/node").glob("node[0-9]*")
    numbers = sorted(int(name) for folder in folders if (name := folder.name.removeprefix("node")).isdecimal())
    fast = _cpus(devices / "cpu_core/cpus", usable) or _capable(devices / "system/cpu", usable)
    nodes = {number: _cpus(devices / f"system/node/node{number}/cpulist", fast) for number in numbers}
    nodes = {number: cpus for number, cpus in nodes.items() if cpus} or {0: fast}
    cores = {number: _cores(devices / "system/cpu", cpus) for number, cpus in nodes.items()}
    quota = min(map(_limit, control_groups("cpu", root)), default=math.inf)  # of its groups and of those above them
    return Processors(cores, quota, len(usable))


def _cores_elsewhere(num_cpus: int) -> Iterator[Core]:
    """Performance cores of Apple's processors, and all cores of others, whose CPUs get any numbers."""
    if sys.platform == "darwin" and (count := number_of_macos("hw.perflevel0.physicalcpu")) > 0:
        return ((cpu,) for cpu in range(count))
    import psutil

    count = min(psutil.cpu_count(logical=False) or num_cpus, num_cpus)
    return (tuple(range(core, num_cpus, count)) for core in range(count))


def number_of_macos(name: str) -> int:
    """A number that macOS knows of the machine by a name; 0 if it knows none."""
    found, size = ctypes.c_int(0), ctypes.c_size_t(4)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(found), ctypes.byref(size), None, ctypes.c_size_t(0))
    return found.value


def _cores(folder: Path, cpus: set[int]) -> tuple[Core, ...]:
    """The CPUs by their cores."""
    siblings = (_cpus(folder / f"cpu{cpu}/topology/thread_siblings_list", cpus) | {cpu} for cpu in sorted(cpus))
    return tuple(dict.fromkeys(tuple(sorted(core)) for core in siblings))


def _capable(folder: Path, usable: set[int]) -> set[int]:
    """The usable CPUs that are about as fast as the fastest of them, as Linux says it on ARM."""
    capacities = {}
    for cpu in usable:
        with suppress(OSError, ValueError):
            capacities[cpu] = int((folder / f"cpu{cpu}/cpu_capacity").read_text())
    least = _FAST * max(capacities.values(), default=0)
    return {cpu for cpu in usable if capacities.get(cpu, least) >= least}


def _cpus(path: Path, usable: set[int]) -> set[int]:
    """The usable ones of the CPUs in a file such as `0-3,8`; none if there is no such file."""
    with suppress(OSError, ValueError):
        ends = [[int(end) for end in part.split("-")] for part in path.read_text().strip().split(",")]
        return {cpu for cpu in usable if any(end[0] <= cpu <= end[-1] for end in ends)}
    return set()


def _free_bytes(root: Path, node: int) -> int:
    """Memory of a NUMA node that is free, or that holds files and can be taken from them."""
    with suppress(OSError, ValueError, KeyError):
        text = (root / f"sys/devices/system/node/node{node}/meminfo").read_text()
        kilobytes = {name: int(number) for name, number in re.findall(r"(\w+): +(\d+) kB", text)}
        return 1024 * (kilobytes["MemFree"] + kilobytes["FilePages"] - kilobytes["Shmem"])
    return 0


def control_groups(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """The folders of this process's groups for `cpu` or `memory`, and of those above, as far as they are mounted.

    A container often has only the part of the tree that begins with its own group.
    """
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, _, group = line.partition(":")
        controllers, _, path = group.partition(":")
        if number == "0" or controller in controllers.split(","):
            paths["cgroup2" if number == "0" else "cgroup"] = PurePosixPath(path)
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, system = line.partition(" - ")
        mounted, kind = mount.split(), system.split()
        if len(mounted) < 5 or not kind or kind[0] not in paths:
            continue
        if kind[0] == "cgroup" and controller not in kind[-1].split(","):
            continue
        top, point = (re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text) for text in mounted[3:5])
        below, folder = paths[kind[0]], root / point.lstrip("/")
        parts = below.relative_to(top).parts if below.is_relative_to(top) and ".." not in below.parts else ()
        yield folder
        for part in parts:
            yield (folder := folder / part)


def _lines(path: Path) -> list[str]:
    with suppress(OSError, ValueError):
        return path.read_text().splitlines()
    return []


def _limit(folder: Path) -> float:
    """A group's limit of CPU time, in cores."""
    for files in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = " ".join((folder / name).read_text() for name in files).split()
            if int(quota) > 0:  # -1 and `max` are no limit
                return int(quota) / int(period)
    return math.inf
