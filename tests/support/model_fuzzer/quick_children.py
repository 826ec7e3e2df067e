"""Child processes that start in a millisecond: they are forked from a small process that has imported what they need.

Only for workers of `cbatch.isolate`. A fork is made by a process in between, which ends at
once, so that the system gives the new process to the one that asked, as if it had started it.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

_PRELOADED = ("cbatch.isolate.child", "cbatch.text.template_renderer", "cbatch.text.isolated")
"""Modules that workers run."""

_SUBREAPER = 36
"""Of `prctl`: the process becomes the parent of orphans among its descendants."""

_Popen = subprocess.Popen
_helper: socket.socket | None = None


def install() -> None:
    """From now on, this process and what it forks start children in this way."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    subprocess.Popen = _QuickPopen  # type: ignore[misc]


class _QuickPopen(_Popen):  # type: ignore[type-arg]
    def _execute_child(self, args: Any, *others: Any) -> None:
        if not isinstance(args, list) or args[1] not in ("-P", "-I") or args[2] != "-c":
            super()._execute_child(args, *others)  # type: ignore[misc]
            return
        helper, kept = _start_helper(), others[3]
        socket.send_fds(helper, [json.dumps([json.loads(args[4]), *kept]).encode()], kept)
        self.pid = int(helper.recv(100))
        self._child_created = True
        while _parent_and_group(self.pid) != [os.getpid(), self.pid]:  # as if it had been started here
            time.sleep(0.0005)
        self._close_pipe_fds(*others[9:15])  # type: ignore[attr-defined]


def _parent_and_group(pid: int) -> list[int]:
    return [int(field) for field in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1:3]]


def _start_helper() -> socket.socket:
    global _helper
    if _helper is None:
        _helper, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        _Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
    return _helper


def serve(orders: socket.socket) -> None:
    for name in _PRELOADED:
        import_module(name)
    while True:
        command, streams, _, _ = socket.recv_fds(orders, 2**16, 2)
        if not command:
            return
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                orders.close()
                _go_on(json.loads(command), streams)
            os._exit(0 if orders.send(str(child).encode()) else 1)
        for stream in streams:
            os.close(stream)
        os.waitpid(between, 0)


def _go_on(command: list[Any], given: list[int]) -> NoReturn:
    os.setsid()
    for number in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    (path, module, arguments), *named = command
    spare = [os.dup2(os.dup(one), 100 + place) for place, one in enumerate(given)]
    os.closerange(3, 100)
    for one, name in zip(spare, named, strict=True):
        os.dup2(one, name)
        os.close(one)
    sys.path[:] = path
    while os.getppid() != arguments[3]:  # until the process in between has ended
        time.sleep(0.0005)
    try:
        import_module(module).main(*arguments)
    finally:
        os._exit(1)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
