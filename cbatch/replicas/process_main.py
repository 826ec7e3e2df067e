"""What runs in the process of a local replica.

It answers the calls of `process.ProcessConnection`, one after the other. It ends when the process that started it does,
whatever it is doing at that moment: also while it loads a model or compiles a kernel.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from cbatch.base.config import EngineConfig
from cbatch.base.errors import CbatchError
from cbatch.replicas.wire import Disconnected, Wire

_PR_SET_PDEATHSIG = 1
"""Of Linux's `sys/prctl.h`."""


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a replica.

    factory: `module:function`; the function takes the configuration, and returns the object whose methods are called
    cores:   numbers of the CPUs that the process may use; empty: those of its parent
    """

    factory: str
    config: EngineConfig
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a call.

    returned: `value` is what the method returned
    raised:   `value` is the CbatchError that it raised
    failed:   `value` says in a sentence, without its full stop, what else went wrong; the replica ends
    """

    kind: Literal["returned", "raised", "failed"]
    value: Any


def main(descriptor: int, lifeline: int, parent: int) -> NoReturn:
    """
    descriptor: of the socket
    lifeline:   descriptor of a pipe, whose other end only the parent has
    parent:     process id
    """
    _end_with(parent, lifeline)
    for signum in (signal.SIGINT, signal.SIGTERM):  # a batch system sends them to all; the parent ends the replicas
        signal.signal(signum, signal.SIG_IGN)
    try:
        _serve(Wire(socket.socket(fileno=descriptor)))
    except Disconnected:
        os._exit(0)
    except BaseException as error:
        print(_sentence(error), file=sys.stderr, flush=True)
        os._exit(1)


def _end_with(parent: int, lifeline: int) -> None:
    """Ends this process, and what it has started, when the parent ends.

    Linux kills it even if a library keeps the interpreter to itself for minutes. Everywhere, a thread notices that the
    lifeline is cut.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)

    def wait() -> None:
        with suppress(OSError):
            os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="cbatch-lifeline", daemon=True).start()


def _serve(wire: Wire) -> NoReturn:
    start: Start = wire.receive()
    if start.cores:
        os.sched_setaffinity(0, start.cores)
    made = _attempt(_make, start)
    while True:
        method, arguments = wire.receive()
        answer = _attempt(getattr(made.value, method), *arguments) if made.kind == "returned" else made
        wire.send(answer)
        if answer.kind == "failed":
            os._exit(1)


def _make(start: Start) -> Any:
    name, _, function = start.factory.partition(":")
    gc.disable()  # imports leave no garbage, but collections would walk over them
    module = importlib.import_module(name)
    gc.freeze()
    gc.enable()
    return getattr(module, function)(start.config)


def _attempt(function: Callable[..., Any], *arguments: Any) -> Answer:
    try:
        return Answer("returned", function(*arguments))
    except CbatchError as error:
        return Answer("raised", error)
    except BaseException as error:
        return Answer("failed", _sentence(error))


def _sentence(error: BaseException) -> str:
    """What went wrong and in which line, without a full stop."""
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{text and ': '}{text}".rstrip(".") + place
