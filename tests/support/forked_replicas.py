"""Replicas that start in a quarter of a second, since they are forked from a process that has imported everything."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from cbatch.isolate import child, worker


class ForkedProcess(subprocess.Popen[bytes]):
    """Forks this process instead of starting Python, and goes on with the module that the command names."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **_: Any) -> None:
        _, module, arguments = json.loads(command[-1])
        assert module == child.__name__
        self.args, self.returncode, self.stdin, self.stderr = command, None, None, None
        self._waitpid_lock = threading.Lock()
        self._child_created = True
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _go_on(arguments, writing, pass_fds, env)
        os.close(writing)
        while os.getpgid(self.pid) != self.pid:  # a process that was started has its group at once
            time.sleep(0.0005)
        self.stdout = os.fdopen(reading, "rb")


def _go_on(arguments: list[Any], output: int, kept: Sequence[int], env: Mapping[str, str]) -> NoReturn:
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            if int(name) > 2 and int(name) not in kept:
                with suppress(OSError):  # that of the listing
                    os.close(int(name))
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        logging.getLogger().handlers.clear()
        os.environ.clear()
        os.environ.update(env)
        child.main(*arguments)
    finally:
        os._exit(1)


@contextmanager
def forked_replicas() -> Iterator[None]:
    """Lets a LocalLauncher fork. Import and compile what replicas need before, for example by an engine."""
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "STDOUT")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "subprocess", SimpleNamespace(Popen=ForkedProcess, **names))
        yield
