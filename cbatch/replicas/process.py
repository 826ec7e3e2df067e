"""Replicas in processes of this machine."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import IO, Any

from cbatch.base.child_command import child_command
from cbatch.base.config import EngineConfig
from cbatch.replicas.launcher import ReplicaDied
from cbatch.replicas.placement import Place
from cbatch.replicas.process_main import Answer, Start
from cbatch.replicas.wire import Disconnected, InvalidMessage, Wire

FACTORY = "cbatch.replicas.replica:open_replica"

MAX_LINE_BYTES = 2000
"""Longest line of a replica's messages; longer ones are passed on in pieces."""

MAX_LINES = 500
"""Lines of messages that are passed on of one life of a replica."""

LAST_LINES, LAST_CHARACTERS = 3, 300
"""How many lines of messages are part of the reason of a death, and how much of each."""

END_SECONDS, LAST_WORDS_SECONDS = 1.0, 0.2
"""How long a process that has closed its connection may take to end, and then its messages to arrive."""

_log = logging.getLogger("cbatch")


class LocalLauncher:
    """Starts replicas as processes of this machine, each in a place of its own."""

    def __init__(self, places: Sequence[Place], factory: str = FACTORY) -> None:
        """
        factory: `module:function` that makes what is called in the process, of an EngineConfig
        """
        self.num_replicas = len(places)
        self._places = places
        self._factory = factory
        self._connections: list[ProcessConnection] = []
        self._is_closed = False
        # Linux kills a child at the end of the thread that has started it, so it is a thread that stays.
        self._starter = ThreadPoolExecutor(1, "cbatch-starter")

    def name(self, number: int) -> str:
        return f"replica {number + 1}"

    def start(self, number: int, config: EngineConfig) -> ProcessConnection:
        """Begins a life of a replica. Raises ReplicaDied if its process cannot be started."""
        try:
            starting = self._starter.submit(self._start, number, config)
        except RuntimeError:
            raise ReplicaDied("its launcher was closed") from None
        try:
            return starting.result()
        except OSError as error:
            raise ReplicaDied(f"its process could not be started: {error}") from error

    def close(self) -> None:
        """Kills all processes, and returns when they are gone. None can be started any more."""
        with suppress(RuntimeError):  # it is closed
            self._starter.submit(self._kill_all).result()
        self._starter.shutdown()

    def _start(self, number: int, config: EngineConfig) -> ProcessConnection:
        if self._is_closed:
            raise ReplicaDied("its launcher was closed")
        place = self._places[number]
        config = place.applied_to(config)
        start = Start(self._factory, config, place.cores)
        connection = ProcessConnection(self.name(number), start, place.environment)
        self._connections = [one for one in self._connections if one.is_running()] + [connection]
        return connection

    def _kill_all(self) -> None:
        self._is_closed = True
        for connection in self._connections:
            connection.send_kill()
        for connection in self._connections:
            connection.kill()


class ProcessConnection:
    """One life of a replica, in a process that ends with this one."""

    def __init__(self, name: str, start: Start, environment: Mapping[str, str]) -> None:
        """Raises OSError if the process cannot be started."""
        with ExitStack() as of_child, ExitStack() as ours:
            end, others_end = socket.socketpair()
            ours.enter_context(end)
            of_child.enter_context(others_end)
            held, self._lifeline = os.pipe()
            ours.callback(os.close, self._lifeline)
            of_child.callback(os.close, held)
            module = "cbatch.replicas.process_main"
            self._process = subprocess.Popen(
                child_command(module, others_end.fileno(), held, os.getpid()),
                pass_fds=(others_end.fileno(), held),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                start_new_session=True,
            )
            self._ends = ours.pop_all()
        assert self._process.stdout is not None
        self._messages = _Messages(name, self._process.stdout)
        self._lock = threading.Lock()
        """Held to signal the process and to reap it, so that no signal goes to another one with its number."""
        self._is_killed = False
        self._calling = threading.Lock()
        self._wire = Wire(end, self.is_running)
        with suppress(Disconnected):  # the first call says so
            self._wire.send(start)

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_running(self) -> bool:
        with self._lock:
            return self._process.poll() is None

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Calls a method of the replica; see `ReplicaConnection`."""
        with self._calling:
            answer = self._ask((method, arguments), timeout_s)
        if not isinstance(answer, Answer):
            raise ReplicaDied(f"an answer that cannot be read: {str(answer)[:100]!r}")
        if answer.kind == "raised":
            raise answer.value
        if answer.kind == "failed":
            raise ReplicaDied(answer.value)
        return answer.value

    def kill(self) -> None:
        """Kills the process, and what it has started. Returns when it is gone, and with it its memory."""
        self.send_kill()
        with self._lock:
            self._process.wait()
        self._wire.shut()
        with self._calling:
            self._ends.close()

    def send_kill(self) -> None:
        with self._lock:
            if self._process.poll() is None:
                self._is_killed = True
                os.killpg(self.pid, signal.SIGKILL)

    def _ask(self, request: object, timeout_s: float) -> object:
        try:
            self._wire.send(request, timeout_s)
            return self._wire.receive(timeout_s)
        except Disconnected:
            reason = self._end()
        except TimeoutError:
            reason = f"no answer for {timeout_s:g} s"
        except InvalidMessage as error:
            reason = f"an answer that cannot be read: {error}"
        self._wire.shut()  # a late answer must not be taken for that to the next call
        raise ReplicaDied(reason)

    def _end(self) -> str:
        """How the process ended, without a full stop."""
        deadline = time.monotonic() + END_SECONDS
        while self.is_running() and time.monotonic() < deadline:
            time.sleep(0.005)
        code = self._process.returncode
        if code is None:
            return "its connection was closed"
        if self._is_killed:
            return "killed"
        text = f"exit code {code}" if code >= 0 else f"killed by signal {-code} ({signal.strsignal(-code)})"
        if code == -signal.SIGKILL:
            text += ", which the system sends when memory runs out"
        said = self._messages.last()
        return f"{text}: {said}" if said else text


class _Messages:
    """Passes on what a process writes to stdout and stderr, line by line, with its name."""

    def __init__(self, name: str, stream: IO[bytes]) -> None:
        self._name = name
        self._stream = stream
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._thread = threading.Thread(target=self._read, name="cbatch-messages", daemon=True)
        self._thread.start()

    def last(self) -> str:
        """The last lines, after the process has ended."""
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
                    with suppress(BaseException):  # a process whose pipe nobody reads would wait for ever
                        self._show(line, num_lines)

    def _show(self, line: str, number: int) -> None:
        if number < MAX_LINES:
            _log.warning("%s: %s", self._name, line)
        elif number == MAX_LINES:
            _log.warning("%s: %s (what follows is not shown)", self._name, line)
