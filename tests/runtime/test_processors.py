"""The processors that a system gives, as its files say it, and the threads that are chosen for them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from functools import partialmethod
from pathlib import Path

import pytest
import torch

from cbatch.runtime import cpu
from cbatch.runtime.processors import Processors, read_processors


@pytest.fixture(autouse=True)
def linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    allow(monkeypatch, range(8))


def allow(monkeypatch: pytest.MonkeyPatch, cpus: Sequence[int]) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus), raising=False)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


V2 = "28 1 0:25 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "33 31 0:30 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
OTHER_V1 = "34 31 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def v1(group: str, quota: int) -> dict[str, str]:
    folder = f"cpu,cpuacct{group}"
    return {f"{folder}/cpu.cfs_quota_us": str(quota), f"{folder}/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("own", "mounts", "limits", "quota"),
    [
        ("0::/", V2.format(top="/"), {"cpu.max": "50000 100000"}, 0.5),
        ("0::/", V2.format(top="/"), {"cpu.max": "max 100000"}, math.inf),
        ("0::/a/b", V2.format(top="/"), {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2),
        ("0::/a/b", V2.format(top="/"), {"a/cpu.max": "200000 100000", "a/b/cpu.max": "75000 50000"}, 1.5),
        ("0::/a/b", V2.format(top="/"), {"a/x/cpu.max": "100000 100000"}, math.inf),
        ("0::/docker/c/d", V2.format(top="/docker/c"), {"cpu.max": "300000 100000", "d/cpu.max": "max 1"}, 3),
        ("0::/docker/c", V2.format(top="/docker/other"), {"cpu.max": "300000 100000"}, 3),
        ("0::/../../c", V2.format(top="/"), {"cpu.max": "300000 100000"}, 3),
        ("0::/a b", V2.format(top="/a\\040b"), {"cpu.max": "300000 100000"}, 3),
        ("4:cpu,cpuacct:/a/b", V1.format(top="/"), v1("/a", 150_000) | v1("/a/b", -1), 1.5),
        ("4:cpu,cpuacct:/docker/c\n0::/", V1.format(top="/docker/c") + OTHER_V1, v1("", 50_000), 0.5),
        ("4:memory:/\n", OTHER_V1, {"memory/cpu.cfs_quota_us": "1", "memory/cpu.cfs_period_us": "100000"}, math.inf),
        ("0::/", V2.format(top="/"), {"cpu.max": "50000"}, math.inf),
        ("0::/", V2.format(top="/"), {"cpu.max": "50000 0"}, math.inf),
        ("0::/", V2.format(top="/"), {"cpu.max": "half of it"}, math.inf),
        ("0", "28\n28 1 0:25 / - \n - cgroup2\n\n", {}, math.inf),
    ],
)  # fmt: skip
def test_the_quota_is_the_least_of_all_groups_above(
    own: str, mounts: str, limits: dict[str, str], quota: float, tmp_path: Path
) -> None:
    """Guards a container on a large machine: with a thread a core it was slower than one thread, by a factor."""
    write(tmp_path, {"proc/self/cgroup": own + "\n", "proc/self/mountinfo": mounts})
    write(tmp_path, {f"sys/fs/cgroup/{name}": text + "\n" for name, text in limits.items()})
    assert read_processors(tmp_path).quota == quota


@pytest.mark.parametrize(
    ("quota", "threads"), [(0.1, 1), (0.5, 1), (1.4, 1), (1.5, 2), (2.4, 2), (2.5, 3), (3.9, 4), (8, 4), (math.inf, 4)]
)
def test_a_quota_becomes_whole_threads(quota: float, threads: int) -> None:
    """Guards quotas of parts of a core, on both sides of a half, and more than there is."""
    found = Processors({0: ((0, 4), (1, 5), (2, 6), (3, 7))}, quota, 8)
    assert found.num_threads == threads
    assert ("quota" in found.reason) == (threads < 4)


def test_hardware_threads_and_slow_cores_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards phases of a step from waiting for a slow core, or for two threads on one core."""
    siblings = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}
    topology = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": siblings.get(cpu, str(cpu)) + "\n"
        for cpu in range(8)
    }
    write(tmp_path, topology)
    assert read_processors(tmp_path).cores == [(0, 1), (2, 3), (4,), (5,), (6,), (7,)]
    write(tmp_path, {"sys/devices/cpu_core/cpus": "0-3\n", "sys/devices/cpu_atom/cpus": "4-7\n"})
    found = read_processors(tmp_path)
    assert (
        found.cores == [(0, 1), (2, 3)]
        and found.reason == "one for each fast core, of 8 CPUs that this process may use"
    )
    allow(monkeypatch, [1, 2, 5])
    assert read_processors(tmp_path).cores == [(1,), (2,)]
    allow(monkeypatch, [5, 7])
    assert read_processors(tmp_path).cores == [(5,), (7,)]


def test_the_fast_cores_of_an_arm(tmp_path: Path) -> None:
    """Guards phones and boards of cores of three sizes, of which the two large ones count."""
    capacities = [397, 397, 397, 397, 860, 860, 860, 1024]
    files = {f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity": f"{one}\n" for cpu, one in enumerate(capacities)}
    write(tmp_path, files)
    assert read_processors(tmp_path).cores == [(4,), (5,), (6,), (7,)]


def two_nodes(root: Path, *free_gib: int) -> None:
    for node, free in enumerate(free_gib):
        meminfo = (
            f"Node {node} MemFree:  {free << 20} kB\nNode {node} FilePages:  2048 kB\nNode {node} Shmem:  1024 kB\n"
        )
        folder = f"sys/devices/system/node/node{node}"
        write(root, {f"{folder}/cpulist": f"{4 * node}-{4 * node + 3}\n", f"{folder}/meminfo": meminfo})


def test_one_node_if_the_weights_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards threads from reading weights over the link of two sockets, and two engines from one node."""
    two_nodes(tmp_path, 8, 9)
    found = read_processors(tmp_path)
    assert found.num_threads == 8 and list(found.nodes) == [0, 1]
    assert found.on_one_node(9 << 30, tmp_path).cpus == {4, 5, 6, 7}
    assert found.on_one_node((9 << 30) + 2 * 2**20, tmp_path) is found
    allow(monkeypatch, range(6))
    assert read_processors(tmp_path).on_one_node(0, tmp_path).cpus == {0, 1, 2, 3}
    allow(monkeypatch, range(4))
    found = read_processors(tmp_path)
    assert found.on_one_node(0, tmp_path) is found


@pytest.mark.parametrize("junk", ["", "x", "3-", "\0", "9" * 30, "0-" + "9" * 30])
def test_files_that_say_nothing(junk: str, tmp_path: Path) -> None:
    """Guards the start on systems that hide their files, or write others into them."""
    assert read_processors(tmp_path) == Processors({0: tuple((cpu,) for cpu in range(8))}, math.inf, 8)
    system = "sys/devices/system"
    names = ["proc/self/cgroup", "proc/self/mountinfo", "sys/devices/cpu_core/cpus", f"{system}/cpu/cpu0/cpu_capacity"]
    names += [f"{system}/cpu/cpu0/topology/thread_siblings_list", f"{system}/node/node0/cpulist"]
    write(tmp_path, dict.fromkeys([*names, f"{system}/node/nodex/cpulist", f"{system}/node/node0/meminfo"], junk))
    found = read_processors(tmp_path)
    assert 1 <= found.num_threads <= 8 and found.on_one_node(1, tmp_path) is found


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_systems_without_such_files(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the start there: a question that this system does not know is no error."""
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 4)
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    found = read_processors()
    assert found.num_threads == 4 and found.reason.startswith("one for each core, of 8 CPUs")


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives torch back the number of threads that it had, and lets it count 8 cores."""
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpu, "_threads", cpu._Threads())
    monkeypatch.setattr(cpu, "read_processors", lambda: Processors({0: tuple((n,) for n in range(8))}, 2, 8))
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_what_the_user_has_set_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a number that somebody has measured to be best; and the next engine from an earlier one's number."""

    def chosen(asked: int | None = None) -> str:
        cpu.choose_threads(asked)
        assert torch.get_num_threads() == cpu.num_threads()
        return cpu.describe_threads()

    assert chosen() == "2: what a quota of 2 of 8 cores allows"
    assert chosen(5) == "5: as was asked for"
    assert chosen() == "2: what a quota of 2 of 8 cores allows"
    torch.set_num_threads(3)
    assert chosen() == chosen() == "3: as torch.set_num_threads says"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert chosen() == "3: as OMP_NUM_THREADS says"
    monkeypatch.setenv("OMP_NUM_THREADS", "0")
    assert chosen(8).startswith("8") and chosen().startswith("2: what a quota")


@pytest.mark.usefixtures("threads")
def test_an_engine_that_is_loaded_beside_a_step_gets_all_threads() -> None:
    """Guards the second model of a chat, which had one thread if the first one was in the middle of a step."""
    cpu.choose_threads(5)
    with cpu.single_threaded():
        assert torch.get_num_threads() == 1 and cpu.num_threads() == 5
        with cpu.single_threaded():
            assert cpu.num_threads() == 5
        assert torch.get_num_threads() == 1, "the inner end gave the threads back"
        cpu.choose_threads()
        assert cpu.num_threads() == 2
    assert torch.get_num_threads() == cpu.num_threads() == 2


@pytest.mark.usefixtures("threads")
def test_threads_stay_near_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards where memory is taken on two sockets, and that the caller may go anywhere again."""
    two_nodes(tmp_path, 8, 9)
    found = read_processors(tmp_path)
    monkeypatch.setattr(cpu, "read_processors", lambda: found)
    monkeypatch.setattr(Processors, "on_one_node", partialmethod(Processors.on_one_node, root=tmp_path))
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: bound.append(set(cpus)), raising=False)
    cpu.choose_threads()
    with cpu.near_weights(1 << 30):
        assert bound == [{4, 5, 6, 7}] and cpu.near_cpus() == {4, 5, 6, 7}
    assert bound[1:] == [set(range(8))]
    assert cpu.describe_threads() == "4: one for each core of a NUMA node, of 8 CPUs that this process may use"
    with cpu.near_weights(1 << 40):
        assert len(bound) == 2 and cpu.num_threads() == 8 and not cpu.near_cpus()
    cpu.choose_threads(3)
    with cpu.near_weights(1):
        assert len(bound) == 2 and cpu.num_threads() == 3
