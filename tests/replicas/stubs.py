"""Replicas without a model, for `LocalLauncher`: they start in a tenth of a second, since they do not import torch."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from cbatch.base.config import EngineConfig
from cbatch.base.errors import CbatchError, ConfigError
from tests.support.fake_replicas import FakeConnection, FakeLauncher

SILENCE_S = 60
"""Seconds that a replica would go on in a test that has found a fault."""


class Stub:
    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def echo(self, value: object) -> object:
        return value

    def pid(self) -> int:
        return os.getpid()

    def place(self) -> tuple[EngineConfig, set[int], dict[str, str]]:
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        return self.config, cores, dict(os.environ)

    def folder(self) -> str:
        return str(Path.cwd())

    def has_torch(self) -> bool:
        return "torch" in sys.modules

    def torch_threads(self) -> int:
        import torch

        return torch.get_num_threads()

    def raise_cbatch_error(self, error: CbatchError) -> NoReturn:
        raise error

    def raise_other(self) -> NoReturn:
        raise ValueError("two\nlines")

    def return_unpicklable(self) -> object:
        return lambda: None

    def exit(self, code: int) -> NoReturn:
        os._exit(code)

    def crash(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def sleep(self) -> None:
        time.sleep(SILENCE_S)

    def keep_interpreter(self) -> None:
        """Holds the GIL, so that no other thread of the process runs."""
        keep_interpreter()

    def write(self, data: bytes, descriptor: int = 2) -> None:
        os.write(descriptor, data)

    def write_to_sockets(self, data: bytes) -> None:
        """Writes to the socket of the messages, as a library that mixes up descriptors could."""
        for descriptor in Path("/proc/self/fd").iterdir():
            if descriptor.exists() and "socket" in str(descriptor.readlink()):
                os.write(int(descriptor.name), data)
        time.sleep(SILENCE_S)

    def start_program(self) -> int:
        return subprocess.Popen(["sleep", str(SILENCE_S)]).pid

    def fork_then_exit(self) -> NoReturn:
        """Leaves a process behind that has copies of all descriptors."""
        if os.fork() == 0:
            time.sleep(SILENCE_S)
        os._exit(7)


class Fake:
    """A replica without a model, which takes a while for each row (see `FakeConnection`)."""

    def __init__(self) -> None:
        self._connection = FakeConnection(FakeLauncher(at_once=1, step_s=0.03), 0, 1)

    def __getattr__(self, method: str) -> Callable[..., object]:
        return lambda *arguments: self._connection.call(method, *arguments, timeout_s=SILENCE_S)


def fake(config: EngineConfig) -> Fake:
    return Fake()


def keep_interpreter() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


def stub(config: EngineConfig) -> Stub:
    return Stub(config)


def refusing(config: EngineConfig) -> NoReturn:
    raise ConfigError(f"there is no model {config.model}.")


def failing(config: EngineConfig) -> NoReturn:
    raise OSError(5, "Input/output error")


def ending(config: EngineConfig) -> NoReturn:
    print("last words", file=sys.stderr, flush=True)
    os._exit(3)


def loading(config: EngineConfig) -> NoReturn:
    """A model that takes forever to load, in code that keeps the interpreter to itself."""
    keep_interpreter()
    raise AssertionError
