"""Replicas in processes of this machine: where they compute, why they do not start, and how they end."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.isolate import worker
from cbatch.isolate.worker import WorkerDied
from cbatch.replicas.local import LocalLauncher, Place
from tests.isolate.test_worker import is_over
from tests.support.faults import wait_until
from tests.support.fork_server import ROOT

SOON_S = 20.0
is_linux = sys.platform == "linux"
STUBS = "tests.replicas.stubs"


def launcher_of(factory: str, num_replicas: int = 1, **place: Any) -> LocalLauncher:
    return LocalLauncher([Place("cpu", **place)] * num_replicas, f"{STUBS}:{factory}")


def test_process_has_its_share_of_the_machine_before_anything_is_loaded(tmp_path: Path) -> None:
    """Libraries read their number of threads once, when they are imported."""
    cores = min(os.sched_getaffinity(0)) if is_linux else 0
    launcher = launcher_of(
        "stub",
        cores=(cores,) if is_linux else (),
        kv_cache_memory="12345",
        environment={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "GPU-7"},
    )
    with closing(launcher):
        replica = launcher.start(0, EngineConfig(model="m", device="auto"))
        assert replica.call("has_torch", timeout_s=SOON_S) is False
        config, bound_to, environment = replica.call("place", timeout_s=SOON_S)
        assert config == EngineConfig(model="m", device="cpu", kv_cache_memory="12345")
        assert not is_linux or bound_to == {cores}
        assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-7"
        assert environment.items() >= {key: os.environ[key] for key in ("PATH", "HF_HUB_OFFLINE")}.items()
        assert replica.call("torch_threads", timeout_s=60) == 1


@pytest.mark.parametrize(
    ("factory", "kind", "message"),
    [
        ("refusing", ConfigError, "there is no model nowhere."),
        ("failing", WorkerDied, "OSError: .*Input/output error"),
        ("ending", WorkerDied, "exit code 3: last words"),
        ("no_such_function", WorkerDied, "AttributeError: .*no_such_function"),
    ],
)
def test_failing_start_says_why(factory: str, kind: type[Exception], message: str) -> None:
    with closing(launcher_of(factory)) as launcher:
        replica = launcher.start(0, EngineConfig(model="nowhere"))
        with pytest.raises(kind, match=message):
            replica.call("info", timeout_s=SOON_S)


def test_program_that_cannot_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many processes or little memory make a start fail that succeeds later; no descriptor is left behind."""
    with closing(launcher_of("stub")) as launcher:
        monkeypatch.setattr(worker, "child_command", lambda *_: ["/no/such/python"])
        before = psutil.Process().num_fds()
        with pytest.raises(WorkerDied, match=r"could not be started: .*No such file"):
            launcher.start(0, EngineConfig())
        assert psutil.Process().num_fds() <= before  # those of earlier tests may be closed meanwhile


PARENT = """
import sys, threading, time
from cbatch.base.config import EngineConfig
from cbatch.replicas.local import Place
from cbatch.replicas.local import LocalLauncher

launcher = LocalLauncher([Place("cpu")] * 2, sys.argv[1])
replicas = []

def start(number):
    replicas.append(launcher.start(number, EngineConfig()))
    if sys.argv[1].endswith(":stub"):
        replicas[number].call("start_program", timeout_s=20)

for number in range(2):
    thread = threading.Thread(target=start, args=(number,))
    thread.start()
    thread.join()
time.sleep(0.1)
print(*[replica.pid for replica in replicas], "torch" in sys.modules, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("factory", ["stub", "loading"])
def test_no_orphan_is_left_when_the_parent_is_killed(factory: str) -> None:
    """Also while a library keeps the interpreter to itself, when no thread can notice anything."""
    if factory == "loading" and not is_linux:
        pytest.skip("only Linux tells a process that its parent has died")
    command = [sys.executable, "-c", PARENT, f"{STUBS}:{factory}"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    *pids, has_torch = parent.stdout.readline().split()
    assert has_torch == "False"
    assert len(pids) == 2 and not any(is_over(int(pid)) for pid in pids)  # the threads that started them have ended
    parent.kill()
    parent.wait()
    wait_until(lambda: all(is_over(int(pid)) for pid in pids))
    parent.stdout.close()


def test_closed_launcher_has_killed_all_and_starts_none() -> None:
    launcher = launcher_of("stub", 2)
    replicas = [launcher.start(number, EngineConfig()) for number in range(2)]
    replicas[0].call("echo", 1, timeout_s=SOON_S)
    launcher.close()
    assert not any(psutil.pid_exists(replica.pid) for replica in replicas)
    with pytest.raises(WorkerDied):
        launcher._start(0, EngineConfig())  # one that was waiting until the others were killed
    with pytest.raises(WorkerDied):
        launcher.start(0, EngineConfig())
    launcher.close()
