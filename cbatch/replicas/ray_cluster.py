"""Replicas as actors of a Ray cluster.

Ray restarts no actor and repeats no call here: the driver of the replicas does both, as for those of one machine.
"""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

from cbatch.base.config import EngineConfig
from cbatch.base.errors import CbatchError, ConfigError, first_line
from cbatch.extras import missing_package
from cbatch.isolate.child import make
from cbatch.isolate.worker import WorkerDied
from cbatch.replicas.connection import ReplicaLauncher
from cbatch.replicas.local import FACTORY, THREAD_VARIABLES

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
except ImportError:  # of which `RayLauncher` tells
    ray = None

NOTICE_SECONDS = 20.0
"""How long a replica waits for its resources before the user is told."""

CONNECT_SECONDS = 5.0

KILL_SECONDS = 0.5
"""Longest wait for the end of an actor that was killed."""

_log = logging.getLogger("cbatch")


class ReplicaActor:
    """Makes a replica in the process of an actor, and calls its methods. What they raise comes back as a value.

    Ray would wrap an exception in one of its own, with a traceback of the other machine as its message.
    """

    def __init__(self, factory: str, config: EngineConfig, num_threads: int, folder: str) -> None:
        with suppress(OSError):  # of a node that has not the folder which relative paths begin in
            os.chdir(folder)
        os.environ |= dict.fromkeys(THREAD_VARIABLES, str(num_threads))
        self._replica: Any = None
        self._open = factory, config

    def call(self, method: str, arguments: tuple[Any, ...]) -> tuple[Any, CbatchError | None]:
        """The result of a method, or the CbatchError that it raised."""
        try:
            if self._replica is None:  # not in the constructor, whose errors Ray does not tell apart from deaths
                factory, config = self._open
                self._replica = make(factory, (config,))
            return getattr(self._replica, method)(*arguments), None
        except CbatchError as error:
            return None, error


class RayLauncher(ReplicaLauncher):
    """Starts replicas as actors of a cluster, wherever it has the resources for one."""

    least_load_s = 3600.0  # it may wait for a place, and its machine may have to download the model

    def __init__(
        self,
        address: str,
        num_replicas: int | None = None,
        resources: Mapping[str, float] | None = None,
        factory: str = FACTORY,
        *,
        num_gpus: int = 1,
    ) -> None:
        """Connects to a cluster.

        address:      `auto` for the cluster that this machine is a node of, or `host:port`
        num_replicas: None: as many as the cluster has resources for now
        resources:    what a replica needs: `num_cpus`, `num_gpus`, and resources by the names that the cluster gives
                      them; None: `num_gpus`, or the CPUs of the smallest node if the cluster has no GPU
        factory:      `module:function` that makes a replica of a configuration, in the actor's process

        Raises ConfigError if the package ray is missing, there is no cluster at the address, or none of its nodes has
        the resources of one replica.
        """
        if ray is None:
            raise ConfigError(missing_package("ray"))
        self._factory = factory
        self._is_own = not ray.is_initialized()
        self._stdout = _Stdout(sys.stdout)
        sys.stdout = cast(TextIO, self._stdout)
        try:
            if self._is_own:
                _connect(address)
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            self._resources = dict(resources) if resources else _default_resources(nodes, num_gpus)
            self._needs = ", ".join(f"{name} {amount:g}" for name, amount in self._resources.items())
            fitting = _num_fitting(nodes, self._resources)
            if fitting < 1:
                raise ConfigError(f"No node of the Ray cluster has what a replica needs: {self._needs}.")
            self.num_replicas = num_replicas or fitting
            if self.num_replicas > fitting:
                _log.warning(
                    f"the cluster has resources for {fitting} replicas now; the other {self.num_replicas - fitting} "
                    "start when nodes join"
                )
        except BaseException:
            self.close()
            raise

    def start(self, number: int, config: EngineConfig) -> RayConnection:
        """Asks the cluster for an actor, which loads its model once there is a place for it."""
        own = dict(self._resources)
        num_cpus, num_gpus = own.pop("num_cpus", 1), own.pop("num_gpus", None)
        options = ray.remote(ReplicaActor).options(
            num_cpus=num_cpus, num_gpus=num_gpus, resources=own, max_restarts=0, max_task_retries=0
        )
        try:
            actor = options.remote(self._factory, config, max(int(num_cpus), 1), str(Path.cwd()))
        except RayError as error:
            raise WorkerDied(first_line(error).rstrip(".:")) from error
        return RayConnection(actor, self.name(number), self._needs)

    def close(self) -> None:
        """Leaves the cluster, which ends all actors of this process."""
        if self._is_own:
            self._stdout.rays_thread = threading.current_thread()  # Ray prints here what it still has to say
            with suppress(RayError):
                ray.shutdown()
            self._stdout.rays_thread = None
        if sys.stdout is self._stdout:
            sys.stdout = self._stdout.stream


class RayConnection:
    """One life of an actor."""

    def __init__(self, actor: Any, name: str, needs: str) -> None:
        self._actor, self._name, self._needs = actor, name, needs
        self._is_ready = False

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        try:
            if not self._is_ready:
                self._wait_for_place(deadline)
            value, error = ray.get(self._actor.call.remote(method, arguments), timeout=_left(deadline))
        except GetTimeoutError:
            raise WorkerDied(f"it has not answered for {timeout_s:,.0f} s") from None
        except RayActorError as failure:
            # Ray's sentence on a dead actor, without its list of names and numbers.
            lines = [line for line in str(failure).splitlines() if line.strip() and not re.match(r"\s+\w+: ", line)]
            reason = " ".join(line.strip() for line in lines[:2]).rstrip(".")[:300] or type(failure).__name__
            raise WorkerDied(reason) from failure
        except (RayError, OSError) as failure:
            cause = failure.cause if isinstance(failure, RayTaskError) else failure
            raise WorkerDied(first_line(cause).rstrip(".:")) from failure
        if error is not None:
            raise error
        return value

    def kill(self) -> None:
        """Ends the actor at once. Returns when its process is gone, or its node is."""
        with suppress(RayError, OSError):
            ray.kill(self._actor)
            ray.get(self._actor.__ray_ready__.remote(), timeout=KILL_SECONDS)

    def _wait_for_place(self, deadline: float) -> None:
        """Waits until the actor runs on a node, and tells the user if that takes long."""
        ready = self._actor.__ray_ready__.remote()
        if not ray.wait([ready], timeout=min(NOTICE_SECONDS, _left(deadline) or math.inf))[0]:
            _log.warning(f"{self._name} waits until a node of the cluster has free what it needs: {self._needs}")
        ray.get(ready, timeout=_left(deadline))
        self._is_ready = True


class _Stdout:
    """Standard output without what Ray prints: what goes wrong in a cluster, with pages of its logs.

    rays_thread: a thread that runs Ray's code for the moment, beside those of Ray's own
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.rays_thread: threading.Thread | None = None

    def write(self, text: str) -> int:
        thread = threading.current_thread()
        return len(text) if thread is self.rays_thread or thread.name.startswith("ray_") else self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _connect(address: str) -> None:
    if address != "auto":
        host, separator, port = address.rpartition(":")
        if not separator or "/" in host or not port.isdecimal():
            raise ConfigError(f"--ray must be auto or HOST:PORT, such as 10.0.0.1:6379, not {address}.")
        try:  # Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"No Ray cluster answers at {address} ({error.args[-1]}). Its head prints the address when it starts; "
                "on a machine of the cluster, --ray auto finds it."
            ) from error
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError, RayError) as error:
        raise ConfigError(f"Cannot connect to the Ray cluster {address}: {first_line(error).rstrip('.:')}.") from error


def _default_resources(nodes: list[dict[str, float]], num_gpus: int) -> dict[str, float]:
    """GPUs if the cluster has any, else the CPUs of its smallest node that has some."""
    if any(node.get("GPU") for node in nodes):
        return {"num_gpus": num_gpus}
    return {"num_cpus": min((node["CPU"] for node in nodes if node.get("CPU")), default=1)}


def _num_fitting(nodes: list[dict[str, float]], resources: Mapping[str, float]) -> int:
    """Number of replicas that the cluster's nodes have resources for, if nobody else uses them."""
    names = {"num_cpus": "CPU", "num_gpus": "GPU"}
    needed = {names.get(name, name): amount for name, amount in resources.items() if amount > 0}
    if not needed:
        return len(nodes)
    return sum(int(min(node.get(name, 0) / amount for name, amount in needed.items())) for node in nodes)


def _left(deadline: float) -> float | None:
    return None if math.isinf(deadline) else max(deadline - time.monotonic(), 0.0)
