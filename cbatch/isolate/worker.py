"""Processes of this machine that do something for this one, and end with it."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import IO, Any

from cbatch.isolate.channel import MAX_BYTES, Channel, Disconnected, InvalidMessage
from cbatch.isolate.child import Limits

MAX_LINE_BYTES = 2000
"""Longest line of a worker's messages; longer ones are passed on in pieces."""

MAX_LINES = 500
"""Lines of messages that are passed on of one worker."""

LAST_LINES, LAST_CHARACTERS = 3, 300
"""How many lines of messages are part of the reason of a death, and how much of each."""

END_SECONDS, LAST_WORDS_SECONDS = 1.0, 0.2
"""How long a process that has closed its connection may take to end, and then its messages to arrive."""

_log = logging.getLogger("cbatch")

# Imports what its parent would, also from a folder that only the parent's command line or code has named.
_RUN = """
import json, sys
from importlib import import_module
sys.path[:], module, arguments = json.loads(sys.argv[1])
import_module(module).main(*arguments)
"""


class WorkerFailed(Exception):
    """A worker could not do what it was asked to. The message says why, without a full stop."""


class WorkerDied(WorkerFailed):
    """A worker is gone, does not answer in time, or sent nonsense.

    code:    how its process has ended, as in `subprocess`; None if that is not known
    is_late: whether it took more time than it had
    """

    def __init__(self, reason: str, code: int | None = None, *, is_late: bool = False) -> None:
        super().__init__(reason)
        self.code = code
        self.is_late = is_late or code in (-signal.SIGPROF, -signal.SIGALRM)


class Worker:
    """A process with an object whose methods are called, one at a time.

    Whatever it has started ends with it, and all of that with this process.
    """

    def __init__(
        self,
        target: str,
        *arguments: Any,
        name: str | None = None,
        limits: Limits | None = None,
        cores: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the process, which makes the object. Raises OSError if it cannot be started.

        target:      `module:function` that makes the object
        arguments:   of the function
        name:        stands before each line that the process writes, which are logged. None: they are lost
        limits:      bounds what runs there, which is not trusted: its answers are JSON. None: they are pickles, and on
                     Linux the process ends with the thread that has made this
        cores:       numbers of the CPUs that it may use; empty: those of this process
        environment: variables that differ from those of this process
        """
        with ExitStack() as of_child, ExitStack() as ours:
            end, others_end = socket.socketpair()
            ours.enter_context(end)
            of_child.enter_context(others_end)
            held, self._lifeline = os.pipe()
            ours.callback(os.close, self._lifeline)
            of_child.callback(os.close, held)
            self._process = subprocess.Popen(
                child_command(target, others_end.fileno(), held, os.getpid(), list(cores), limits),
                pass_fds=(others_end.fileno(), held),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if name is None else subprocess.PIPE,
                stderr=subprocess.DEVNULL if name is None else subprocess.STDOUT,
                env=os.environ | (environment or {}),
                start_new_session=True,
            )
            self._ends = ours.pop_all()
        self.pid = self._process.pid
        self._finalizer = weakref.finalize(self, _end, self._process, self._ends)
        stream = self._process.stdout
        self._messages = None if name is None or stream is None else _Messages(name, stream)
        self._is_trusted = limits is None
        self._lock = threading.Lock()
        """Held to signal the process and to reap it, so that no signal goes to another one with its number."""
        self._is_killed = False
        self._calling = threading.RLock()
        # Not a method of this object, which would never be garbage then.
        self._channel = Channel(end, partial(_is_running, self._process, self._lock))
        with suppress(Disconnected):  # the first call says so
            self._channel.send(pickle.dumps(arguments, pickle.HIGHEST_PROTOCOL))

    def is_running(self) -> bool:
        return _is_running(self._process, self._lock)

    def call(self, method: str, *arguments: Any, timeout_s: float, max_bytes: int = MAX_BYTES) -> Any:
        """The result of a method. One thread calls at a time.

        timeout_s: may be infinite
        max_bytes: of the answer

        Raises WorkerDied if there is no answer for any reason, among them `kill` on another thread meanwhile; after it
        nothing is called any more but `kill`. If the worker is trusted, raises the CbatchError that the method, or the
        function that makes the object, has raised. Otherwise raises WorkerFailed for anything that the method raises,
        and OSError if there is no object.
        """
        with self._calling:
            self.send(method, *arguments, timeout_s=timeout_s)
            return self.receive(timeout_s, max_bytes)

    def send(self, method: str, *arguments: Any, timeout_s: float) -> None:
        """The first half of a call."""
        with self._calling, self._deaths(timeout_s):
            self._channel.send(pickle.dumps((method, arguments), pickle.HIGHEST_PROTOCOL), timeout_s)

    def receive(self, timeout_s: float, max_bytes: int = MAX_BYTES) -> Any:
        """The second half of a call."""
        with self._calling, self._deaths(timeout_s):
            kind, value = self._read(self._channel.receive(timeout_s, max_bytes))
        match kind:
            case "returned":
                return value
            case "raised":
                raise value
            case "unmade":
                raise OSError(value)
        raise WorkerDied(value) if self._is_trusted else WorkerFailed(value)

    def kill(self) -> None:
        """Kills the process, and what it has started. Returns when it is gone, and with it its memory.

        May be called on any thread, also while another one waits in `call`, and twice.
        """
        self.send_kill()
        with self._lock:
            self._process.wait()
        self._channel.shut()
        with self._calling:
            self._ends.close()

    def send_kill(self) -> None:
        """The same, without waiting for the end."""
        with self._lock:
            if self._process.poll() is None:
                self._is_killed = True
                os.killpg(self.pid, signal.SIGKILL)

    @contextmanager
    def _deaths(self, timeout_s: float) -> Iterator[None]:
        """Says of each failure of the channel how the process has died; it is closed, as an answer may come late."""
        try:
            yield
        except Disconnected:
            raise self._death() from None
        except TimeoutError:
            self._channel.shut()
            raise WorkerDied(f"no answer for {timeout_s:g} s", is_late=True) from None
        except InvalidMessage as error:
            self._channel.shut()
            raise WorkerDied(f"an answer that cannot be read: {error}") from error

    def _read(self, data: bytearray) -> tuple[str, Any]:
        try:
            answer = pickle.loads(data) if self._is_trusted else json.loads(data.decode("utf-8", "surrogatepass"))
        except Exception as error:  # pickle raises many kinds
            raise InvalidMessage(str(error)) from error
        kinds = ("returned", "failed", "raised" if self._is_trusted else "unmade")
        if isinstance(answer, tuple | list) and len(answer) == 2 and answer[0] in kinds:
            return answer[0], answer[1]
        raise InvalidMessage(f"{str(answer)[:100]!r}")

    def _death(self) -> WorkerDied:
        deadline = time.monotonic() + END_SECONDS
        while self.is_running() and time.monotonic() < deadline:
            time.sleep(0.005)
        self._channel.shut()
        code = self._process.returncode
        if code is None or self._is_killed:
            return WorkerDied("its connection was closed" if code is None else "killed", code)
        text = f"exit code {code}" if code >= 0 else f"killed by signal {-code} ({signal.strsignal(-code)})"
        if code == -signal.SIGKILL:
            text += ", which the system sends when memory runs out"
        said = self._messages.last() if self._messages is not None else ""
        return WorkerDied(f"{text}: {said}" if said else text, code)


def child_command(
    target: str, descriptor: int, lifeline: int, parent: int, cores: list[int], limits: Limits | None
) -> list[str]:
    """The command of a process that calls `child.main` with these arguments."""
    path = [folder for folder in sys.path if isinstance(folder, str)]
    run = [path, "cbatch.isolate.child", [target, descriptor, lifeline, parent, cores, limits]]
    # -P: a file in the working folder must not be imported as json. -I also ignores Python's variables.
    return [sys.executable, "-P" if limits is None else "-I", "-c", _RUN, json.dumps(run)]


def _is_running(process: subprocess.Popen[bytes], lock: threading.Lock) -> bool:
    with lock:
        return process.poll() is None


def _end(process: subprocess.Popen[bytes], ends: ExitStack) -> None:
    """The end of a worker that nobody has any more, as by `kill`."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    ends.close()


class _Messages:
    """Passes on what a process writes to stdout and stderr, line by line, with its name."""

    def __init__(self, name: str, stream: IO[bytes]) -> None:
        self._prefix = f"{name}: " if name else ""
        self._stream = stream
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._thread = threading.Thread(target=self._read, name="cbatch-messages", daemon=True)
        self._thread.start()

    def last(self) -> str:
        self._thread.join(LAST_WORDS_SECONDS)
        return " / ".join(line[:LAST_CHARACTERS] for line in self._last)

    def _read(self) -> None:
        num_lines = 0
        with self._stream:
            for data in iter(lambda: self._stream.readline(MAX_LINE_BYTES), b""):
                # What a terminal would show of a progress bar.
                text = data.rstrip(b"\r\n").rpartition(b"\r")[2].decode(errors="replace").replace("\t", " ")
                if line := "".join(filter(str.isprintable, text)).strip():
                    num_lines += 1
                    self._last.append(line)
                    more = " (what follows is not shown)" if num_lines == MAX_LINES else ""
                    if num_lines <= MAX_LINES:
                        with suppress(BaseException):  # a process whose pipe nobody reads would wait for ever
                            _log.warning("%s%s%s", self._prefix, line, more)
