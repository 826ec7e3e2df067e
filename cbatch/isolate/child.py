"""The process of a worker: makes an object, and calls its methods one after the other.

It ends when the process that has started it does, whatever it is doing at that moment.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from cbatch.base.errors import CbatchError, as_error
from cbatch.isolate.channel import Channel, Disconnected

_PR_SET_PDEATHSIG = 1
"""Of Linux's `sys/prctl.h`."""

MAX_REASON_CHARACTERS = 500
TOO_LARGE = "it takes too much memory"


class Limits(NamedTuple):
    """Bounds on what is not trusted, in force before the worker reads any of it.

    memory:             bytes of data of the process; None: any number
    cpu_seconds:        processor time of a call; None: any
    cpu_seconds_per_mb: further time for a million bytes of arguments
    wall_seconds:       time of a call, for one that waits for something
    """

    memory: int | None = None
    cpu_seconds: float | None = None
    cpu_seconds_per_mb: float = 0.0
    wall_seconds: float = 60.0


def main(
    target: str, descriptor: int, lifeline: int, parent: int, cores: list[int], limits: list[Any] | None
) -> NoReturn:
    """
    target:     `module:function`, which makes the object of the arguments that are the first message
    descriptor: of the socket
    lifeline:   descriptor of a pipe, whose other end only the parent has
    parent:     process id
    cores:      numbers of the CPUs that the process may use; empty: those of its parent
    limits:     fields of Limits. None: what runs is trusted, may take any time, and answers in pickles
    """
    _end_with(parent, lifeline, is_trusted=limits is None)
    for signum in (signal.SIGINT, signal.SIGTERM):  # a batch system sends them to all; the parent ends its workers
        signal.signal(signum, signal.SIG_IGN)
    if cores:
        os.sched_setaffinity(0, cores)
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        if limits is None:
            _serve_trusted(channel, target)
        _serve_limited(channel, target, Limits(*limits))
    except Disconnected:
        os._exit(0)
    except BaseException as error:
        print(_sentence(error), file=sys.stderr, flush=True)
        os._exit(1)


def make(target: str, arguments: tuple[Any, ...]) -> Any:
    """The object that `module:function` makes of its arguments."""
    name, _, function = target.partition(":")
    gc.disable()  # imports leave no garbage, but collections would walk over them
    module = importlib.import_module(name)
    gc.freeze()
    gc.enable()
    return getattr(module, function)(*arguments)


def _end_with(parent: int, lifeline: int, is_trusted: bool) -> None:
    """Ends this process, and what it has started, when the parent ends.

    Everywhere, a thread notices that the lifeline is cut. Linux kills it even if a library keeps the interpreter to
    itself for minutes; what is not trusted has less time anyway, and may be started by a thread that ends.
    """
    if sys.platform == "linux" and is_trusted:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)

    def wait() -> None:
        with suppress(OSError):
            os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="cbatch-lifeline", daemon=True).start()


def _serve_trusted(channel: Channel, target: str) -> NoReturn:
    """Answers `(kind, value)`. What raises another error than those of this package ends the process."""

    def attempt(function: Callable[..., Any], *arguments: Any) -> tuple[str, Any]:
        try:
            return "returned", function(*arguments)
        except CbatchError as error:
            return "raised", error
        except BaseException as error:
            return "failed", _sentence(error)

    made = attempt(make, target, pickle.loads(channel.receive()))
    while True:
        method, arguments = pickle.loads(channel.receive())
        answer = attempt(getattr(made[1], method), *arguments) if made[0] == "returned" else made
        channel.send(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))
        if answer[0] == "failed":
            os._exit(1)


def _serve_limited(channel: Channel, target: str, limits: Limits) -> NoReturn:
    """Answers `[kind, value]` in JSON. What runs out of time ends the process by a signal."""
    import resource

    if limits.memory is not None:
        with suppress(OSError, ValueError):  # a system without these limits
            resource.setrlimit(resource.RLIMIT_DATA, (limits.memory, limits.memory))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    started, failure = pickle.loads(channel.receive()), ""
    try:
        made = make(target, started)
    except Exception as error:
        failure = _sentence(error)
    while True:
        data = channel.receive()
        answer: tuple[str, Any]
        if limits.cpu_seconds is not None:
            signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds + limits.cpu_seconds_per_mb * len(data) / 1e6)
        signal.setitimer(signal.ITIMER_REAL, limits.wall_seconds)
        try:
            method, arguments = pickle.loads(data)
            answer = ("unmade", failure) if failure else ("returned", getattr(made, method)(*arguments))
            message = _as_json(answer)
        except MemoryError:
            message = _as_json(("failed", TOO_LARGE))
        except BaseException as raised:  # a model's program may raise anything, and a library may panic
            reason = getattr(raised, "reason", None) or str(as_error(raised)) or type(raised).__name__
            message = _as_json(("failed", reason[:MAX_REASON_CHARACTERS]))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        data, arguments = bytearray(), ()  # so that the next call has all the memory
        channel.send(message)


def _as_json(answer: tuple[str, Any]) -> bytes:
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{text and ': '}{text}".rstrip(".") + place
