"""Where replicas compute: whole shares of the machine, of which no part is given twice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.isolate.worker import WorkerDied
from cbatch.replicas import local
from cbatch.replicas.local import Place, find_places
from cbatch.runtime.processors import read_processors

CPU = EngineConfig(device="cpu")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this machine look like one with such NUMA nodes, given by the threads of their cores."""
    for variable in (*local.THREAD_VARIABLES, "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CBATCH_DEVICE"):
        monkeypatch.delenv(variable, raising=False)

    def cpus_of(core: str) -> Sequence[int]:
        ends = [part.split("-") for part in core.split(",")]
        return [cpu for end in ends for cpu in range(int(end[0]), int(end[-1]) + 1)]

    def make(*nodes: Sequence[str], usable: Sequence[int] | None = None) -> None:
        folder = tmp_path / "sys/devices/system"
        for number, cores in enumerate(nodes):
            (folder / f"node/node{number}").mkdir(parents=True)
            (folder / f"node/node{number}/cpulist").write_text(",".join(cores) + "\n")
            for core in cores:
                for cpu in cpus_of(core):
                    topology = folder / f"cpu/cpu{cpu}/topology"
                    topology.mkdir(parents=True)
                    (topology / "thread_siblings_list").write_text(core + "\n")
        cpus = {cpu for cores in nodes for core in cores for cpu in cpus_of(core)}
        allowed = cpus if usable is None else set(usable)
        monkeypatch.setattr(local, "read_processors", partial(read_processors, tmp_path))
        monkeypatch.setattr(local, "_DEVICES", tmp_path / "dev")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed, raising=False)
        monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None, raising=False)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8000))

    return make


def see_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: tuple[str, int, bool] | Exception) -> list[str]:
    """Puts a sign of a GPU in place, and an answer to who asks for devices; returns the names that were asked for."""
    asked: list[str] = []

    def call(method: str, name: str, timeout_s: float) -> tuple[str, int, bool]:
        asked.append(name)
        if isinstance(answer, Exception):
            raise answer
        return answer

    (tmp_path / "dev").mkdir(exist_ok=True)
    (tmp_path / "dev/nvidia0").touch()
    monkeypatch.setattr(local, "Worker", lambda *_, **__: SimpleNamespace(call=call, kill=lambda: None))
    return asked


def devices(count: int, kind: str = "cuda", is_rocm: bool = False) -> tuple[str, int, bool]:
    return kind, count, is_rocm


def shares(places: Sequence[Place]) -> list[tuple[tuple[int, ...], str]]:
    """The cores of each place and its number of threads."""
    return [(place.cores, place.environment["OMP_NUM_THREADS"]) for place in places]


def test_cores_are_shared_out_whole_and_by_node(machine: Callable[..., None]) -> None:
    """Two replicas on one core, or one on two nodes, are slower than they need be."""
    machine(["0,8", "1,9", "2,10", "3,11"], ["4,12", "5,13", "6,14", "7,15"])
    assert shares(find_places(CPU, 2)) == [((0, 8, 1, 9, 2, 10, 3, 11), "4"), ((4, 12, 5, 13, 6, 14, 7, 15), "4")]
    assert shares(find_places(CPU, None)) == shares(find_places(CPU, 2))
    three = find_places(CPU, 3)
    assert [len(place.cores) for place in three] == [4, 6, 6]
    assert len({cpu for place in three for cpu in place.cores}) == 16
    assert shares(find_places(CPU, 16)) == [
        ((cpu,), "1") for cpu in (0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15)
    ]
    assert shares(find_places(CPU, 17)) == [((), "1")] * 17
    assert all(place.device == "cpu" for place in three)


def test_only_cores_that_this_process_may_use(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container or under taskset, binding to other cores fails."""
    machine(["0-1", "2-3"], ["4-5", "6-7"], ["8-9"], usable=[1, 4, 5, 6])
    assert shares(find_places(CPU, 2)) == [((1,), "1"), ((4, 5, 6), "2")]
    assert len(find_places(CPU, None)) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert shares(find_places(CPU, 2)) == [((1,), "1"), ((4, 5, 6), "1")]
    monkeypatch.delattr(os, "sched_setaffinity")
    assert shares(find_places(CPU, 2)) == [((), "1"), ((), "1")]


def test_replicas_share_a_quota(machine: Callable[..., None], tmp_path: Path) -> None:
    """Guards a container with a quota on a large machine: threads beyond it are stopped together in every period."""
    machine(["0", "1", "2", "3"], ["4", "5", "6", "7"])
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "proc/self/mountinfo").write_text("30 20 0:28 / /groups rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "groups").mkdir()
    (tmp_path / "groups/cpu.max").write_text("300000 100000\n")
    assert shares(find_places(CPU, 2)) == [((0, 1, 2, 3), "1"), ((4, 5, 6, 7), "2")]
    (tmp_path / "groups/cpu.max").write_text("100000 100000\n")
    assert shares(find_places(CPU, 2)) == [((0, 1, 2, 3), "1"), ((4, 5, 6, 7), "1")]
    assert len(find_places(CPU, None)) == 1


def test_replicas_take_the_memory_of_one_engine(machine: Callable[..., None]) -> None:
    """A share of what is free at the moment would be another one in each replica, and so would its limits."""
    machine(["0", "1"])

    def memory(**options: Any) -> list[str | None]:
        config = EngineConfig(device="cpu", **options)
        return [place.applied_to(config).kv_cache_memory for place in find_places(config, 2)]

    assert memory() == ["1000", "1000"]
    assert memory(kv_cache_memory="50%") == ["2000", "2000"]
    assert memory(kv_cache_memory="4GiB") == ["4GiB", "4GiB"]
    assert memory(kv_blocks=7) == [None, None]
    with pytest.raises(ConfigError, match="not an amount of memory"):
        memory(kv_cache_memory="%")


@pytest.mark.parametrize(
    ("listed", "entries"),
    [
        (None, ["0", "1", "2"]),
        ("3,1,2", ["3", "1", "2"]),
        ("GPU-5f2b, MIG-77 ,GPU-9", ["GPU-5f2b", "MIG-77", "GPU-9"]),
        ("4,5,6,-1,7", ["4", "5", "6"]),
    ],
)
def test_each_gpu_is_seen_by_one_replica(
    machine: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    listed: str | None,
    entries: list[str],
) -> None:
    """A batch system lends some GPUs by their names; the others belong to somebody else."""
    machine([str(cpu) for cpu in range(12)])
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    asked = see_gpus(monkeypatch, tmp_path, devices(3))
    places = find_places(EngineConfig(kv_cache_memory="90%"), None)
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in places] == entries
    assert [place.environment["OMP_NUM_THREADS"] for place in places] == ["4", "4", "4"]
    config = places[2].applied_to(EngineConfig(kv_cache_memory="90%"))
    assert (config.device, config.kv_cache_memory, places[2].cores) == ("cuda", "90%", ())
    assert len(find_places(EngineConfig(device="cuda"), 2)) == 2
    with pytest.raises(ConfigError, match="4 replicas were asked for, and --device cuda means 3 of them"):
        find_places(EngineConfig(device="cuda"), 4)
    assert asked == ["auto", "cuda", "cuda"]


def test_a_replica_may_have_several_gpus(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards replicas of a model that is split: each sees so many GPUs, and none of the others'."""
    machine([str(cpu) for cpu in range(8)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,1")
    see_gpus(monkeypatch, tmp_path, devices(5))
    places = find_places(EngineConfig(tensor_parallel=2), None)
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in places] == ["4,5", "6,7"]
    with pytest.raises(ConfigError, match="needs 2 GPUs of its own: 3 replicas were asked for"):
        find_places(EngineConfig(tensor_parallel=2), 3)


def test_other_accelerators(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(["0"])
    asked = see_gpus(monkeypatch, tmp_path, devices(2, is_rocm=True))
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "6,7")
    assert [place.environment.get("HIP_VISIBLE_DEVICES") for place in find_places(EngineConfig(), None)] == ["6", "7"]
    monkeypatch.setattr(local, "_probe", lambda _: devices(2, "xpu"))
    assert [place.device for place in find_places(EngineConfig(), None)] == ["xpu:0", "xpu:1"]
    assert asked == ["auto"]


@pytest.mark.parametrize("device", ["cuda:1", "mps"])
def test_device_that_is_named_is_one(machine: Callable[..., None], device: str) -> None:
    """Two engines on one GPU would each take 90% of its memory."""
    machine(["0", "1"])
    assert [place.device for place in find_places(EngineConfig(device=device), None)] == [device]
    with pytest.raises(ConfigError, match=f"2 replicas were asked for, and --device {device} means one"):
        find_places(EngineConfig(device=device), 2)


def test_devices_that_cannot_be_used(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards that a GPU's fault is said once, before replicas start, and never becomes a slow run without a word."""
    machine(["0", "1"])
    see_gpus(monkeypatch, tmp_path, ConfigError("Device 'cuda' cannot be used: no driver."))
    with pytest.raises(ConfigError, match="cannot be used: no driver"):
        find_places(EngineConfig(device="cuda"), 2)
    see_gpus(monkeypatch, tmp_path, devices(1, "cpu"))
    assert [place.device for place in find_places(EngineConfig(), 2)] == ["cpu", "cpu"]
    see_gpus(monkeypatch, tmp_path, WorkerDied("exit code 1: ImportError: x"))
    with pytest.raises(ConfigError, match=r"could not be listed: exit code 1: ImportError: x\."):
        find_places(EngineConfig(), 2)


def test_probe_says_which_devices_there_are() -> None:
    """Guards the way to the process that imports torch, and back."""
    assert local._probe("cpu") == ("cpu", 1, False)
    with pytest.raises(ConfigError, match="There is no device 'toaster'"):
        local._probe("toaster")


def test_places_are_found_without_torch() -> None:
    """It would take a second and 200 MB of a process that only reads and writes rows."""
    program = (
        "import sys; from cbatch.base.config import EngineConfig\n"
        "from cbatch.replicas import local\n"
        "local._SIGNS_OF_GPUS = ()\n"
        "print(len(local.find_places(EngineConfig(), 2)), sys.modules.keys() & {'torch', 'numpy', 'transformers'})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "2 set()\n"
