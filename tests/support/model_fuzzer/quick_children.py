"""Child processes that start in a millisecond: they are forked from a small process that has imported what they need.

Only for commands that run a module or a script of this package. A fork is made by a process in between, which ends at
once, so that the system gives the new process to the one that asked, as if it had started it.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import socket
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

_PRELOADED = ("text.chat_template", "text.template_child", "text.tokenizer_child")
"""Modules of the engine that commands run, of those that there are."""

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
        if not isinstance(args, list) or args[:2] != [sys.executable, "-P"]:
            super()._execute_child(args, *others)  # type: ignore[misc]
            return
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = others[9:15]
        streams = [stream if stream != -1 else number for number, stream in enumerate((p2cread, c2pwrite, errwrite))]
        helper = _start_helper()
        socket.send_fds(helper, [json.dumps(args).encode()], streams)
        self.pid = int(helper.recv(100))
        self._child_created = True
        for stream in {p2cread, c2pwrite, errwrite} - {-1}:
            os.close(stream)
        del p2cwrite, c2pread, errread


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
        with suppress(ModuleNotFoundError):
            import_module(f"cbatch.engine.{name}")
    while True:
        command, streams, _, _ = socket.recv_fds(orders, 2**16, 3)
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


def _go_on(command: list[str], streams: list[int]) -> NoReturn:
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 64)
    code = 0
    try:
        if command[2] == "-c":
            sys.path[:], module, arguments = json.loads(command[4])
            import_module(module).main(*arguments)
        else:
            runpy.run_path(command[2], run_name="__main__")
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        code = 1
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
