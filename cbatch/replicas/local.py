"""Replicas in processes of this machine, each on a GPU of its own, or on its share of the cores.

The driver process does not import torch: if there are signs of a GPU, another process is asked.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path

from cbatch.base.config import CPU_CACHE_SHARE, DEVICE_VARIABLE, EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.base.units import parse_memory
from cbatch.isolate.worker import Worker, WorkerDied
from cbatch.replicas.connection import ReplicaLauncher
from cbatch.runtime.processors import Processors, read_processors

FACTORY = "cbatch.replicas.replica:open_replica"

_DEVICES = Path("/dev")
_SIGNS_OF_GPUS = ("nvidia[0-9]*", "nvidiactl", "dxg", "kfd", "dri/renderD*")
"""Files of NVIDIA's driver, also in Windows' subsystem for Linux, of AMD's and of Intel's."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Place:
    """Where one replica computes.

    device:          as in EngineConfig
    cores:           numbers of the CPUs that its process is bound to; empty: it is not bound
    kv_cache_memory: as in EngineConfig; None: what the configuration says
    environment:     variables of its process that differ from those of the driver process
    """

    device: str
    cores: tuple[int, ...] = ()
    kv_cache_memory: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def applied_to(self, config: EngineConfig) -> EngineConfig:
        memory = self.kv_cache_memory or config.kv_cache_memory
        return replace(config, device=self.device, kv_cache_memory=memory)


class LocalLauncher(ReplicaLauncher):
    """Starts replicas as processes of this machine, each in a place of its own."""

    def __init__(self, places: Sequence[Place], factory: str = FACTORY) -> None:
        """`factory`: `module:function` that makes what is called in the process, of an EngineConfig"""
        self.num_replicas = len(places)
        self._places, self._factory = places, factory
        self._connections: list[Worker] = []
        self._is_closed = False
        # Linux kills a child at the end of the thread that has started it, so it is a thread that stays.
        self._starter = ThreadPoolExecutor(1, "cbatch-starter")

    def start(self, number: int, config: EngineConfig) -> Worker:
        try:
            starting = self._starter.submit(self._start, number, config)
        except RuntimeError:
            raise WorkerDied("its launcher was closed") from None
        try:
            return starting.result()
        except OSError as error:
            raise WorkerDied(f"its process could not be started: {error}") from error

    def close(self) -> None:
        """Kills all processes, and returns when they are gone. None can be started any more."""

        def kill_all() -> None:
            self._is_closed = True
            for connection in self._connections:
                connection.send_kill()
            for connection in self._connections:
                connection.kill()

        with suppress(RuntimeError):  # it is closed
            self._starter.submit(kill_all).result()
        self._starter.shutdown()

    def _start(self, number: int, config: EngineConfig) -> Worker:
        if self._is_closed:
            raise WorkerDied("its launcher was closed")
        place = self._places[number]
        given, name = place.applied_to(config), self.name(number)
        connection = Worker(self._factory, given, name=name, cores=place.cores, environment=place.environment)
        self._connections = [one for one in self._connections if one.is_running()] + [connection]
        return connection


def find_places(config: EngineConfig, num_replicas: int | None) -> list[Place]:
    """A place for each replica.

    num_replicas: None: as many as there are GPUs, or NUMA nodes if there is no GPU

    On a CPU, the replicas share what a single engine would take: the cores, and the percentage of free memory that is
    for the KV cache. An amount such as `4GiB` is for each of them. If there are fewer cores than replicas, each of them
    may use all cores, with one thread.

    Raises ConfigError if the devices cannot be used, or if there are fewer than replicas.
    """
    devices = _find_devices(config.device)
    if devices is None:
        processors = read_processors()
        return _on_cores(config, processors, num_replicas or min(len(processors.nodes), processors.num_threads))
    each = config.min_gpus
    number = max(len(devices) // each, 1) if num_replicas is None else num_replicas
    if number * each > len(devices):
        there = {0: "none", 1: "one"}.get(len(devices), f"{len(devices)} of them")
        raise ConfigError(
            f"Each replica needs {'a GPU' if each == 1 else f'{each} GPUs'} of its own: {number} replicas were asked "
            f"for, and --device {config.device} means {there}."
        )
    threads = _threads(max(read_processors().num_threads // number, 1))
    groups = (devices[number * each :][:each] for number in range(number))
    return [Place(group[0][0], environment=_joined(visible for _, visible in group) | threads) for group in groups]


def _joined(environments: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The environment of a process that sees the devices of all these."""
    joined: dict[str, str] = {}
    for name, value in chain.from_iterable(one.items() for one in environments):
        joined[name] = f"{joined[name]},{value}" if name in joined else value
    return joined


def _find_devices(name: str) -> list[tuple[str, dict[str, str]]] | None:
    """The names of the devices that a name means, and for each the environment of a process that sees no other one.

    None for the CPU. Raises ConfigError if there is no such device.
    """
    if name == "auto":
        name = os.environ.get(DEVICE_VARIABLE) or "auto"
    has_signs = any(path for sign in _SIGNS_OF_GPUS for path in _DEVICES.glob(sign))
    if name.partition(":")[0] == "cpu" or (name == "auto" and not has_signs):
        return None
    if ":" in name or name == "mps":
        return [(name, {})]
    kind, count, is_rocm = _probe(name)
    if kind == "cpu":
        return None
    if kind != "cuda":
        return [(f"{kind}:{number}", {}) for number in range(count)]
    # With ROCm, CUDA_VISIBLE_DEVICES counts as well, among those that its own variable has left.
    is_hip = is_rocm and "HIP_VISIBLE_DEVICES" in os.environ
    variable = "HIP_VISIBLE_DEVICES" if is_hip else "CUDA_VISIBLE_DEVICES"
    entries = os.environ.get(variable, ",".join(map(str, range(count)))).split(",")[:count]
    return [("cuda", {variable: entry.strip()}) for entry in entries]


def _probe(name: str) -> tuple[str, int, bool]:
    try:
        probe = Worker("cbatch.runtime.device:DeviceProbe", name="")
        try:
            found: tuple[str, int, bool] = probe.call("devices", name, timeout_s=math.inf)
        finally:
            probe.kill()
    except (WorkerDied, OSError) as error:
        raise ConfigError(f"The devices of this machine could not be listed: {error}.") from None
    return found


def _on_cores(config: EngineConfig, processors: Processors, number: int) -> list[Place]:
    import psutil

    asked, memory = config.kv_cache_memory or CPU_CACHE_SHARE, None
    if config.kv_blocks is None and "%" in asked:
        # An amount: the percentage of what is free when a replica starts would be another one each time, and the
        # longest sequence that fits is part of what decides a row.
        memory = str(parse_memory(asked, psutil.virtual_memory().available) // number)
    cores = processors.cores
    if len(cores) < number:
        cores = [(cpu,) for cpu in chain(*cores)]
    if len(cores) < number:
        return [Place("cpu", (), memory, _threads(1))] * number
    shares = [cores[start:end] for start, end in _shares(len(cores), number)]
    threads = [_threads(max(end - start, 1)) for start, end in _shares(min(len(cores), processors.num_threads), number)]
    can_bind = hasattr(os, "sched_setaffinity")
    cpus = [tuple(chain(*share)) if can_bind else () for share in shares]
    return [Place("cpu", cpus, memory, threads) for cpus, threads in zip(cpus, threads, strict=True)]


def _shares(total: int, number: int) -> list[tuple[int, int]]:
    """Start and end of each of so many shares, which differ by one at most."""
    return list(pairwise(total * share // number for share in range(number + 1)))


def _threads(number: int) -> dict[str, str]:
    """Variables that libraries take their number of threads from when they are loaded."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    number = min(number, max(int(limit), 1)) if limit.isdecimal() else number
    return dict.fromkeys(THREAD_VARIABLES, str(number))
