"""Workers: what is said to them arrives, and none of them outlives what it may."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from cbatch.base.config import EngineConfig
from cbatch.base.errors import CbatchError, ConfigError, RequestError
from cbatch.base.model_files import InvalidFile
from cbatch.isolate import channel, worker
from cbatch.isolate.channel import Channel
from cbatch.isolate.worker import Worker, WorkerDied, child_command
from tests.support.faults import wait_until

SOON_S = 20.0
"""More than anything here takes on a machine that is busy, and less than a stub stays silent."""


def start() -> Worker:
    return Worker("tests.replicas.stubs:stub", EngineConfig(), name="replica 1")


@pytest.fixture
def replica() -> Iterator[Worker]:
    replica = start()
    yield replica
    replica.kill()


def is_over(pid: int) -> bool:
    """Whether a process is gone, or only waits to be reaped."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def died(replica: Worker, method: str, *arguments: object, timeout_s: float = SOON_S) -> str:
    with pytest.raises(WorkerDied) as raised:
        replica.call(method, *arguments, timeout_s=timeout_s)
    return str(raised.value)


def subclasses(kind: type[CbatchError]) -> Iterator[type[CbatchError]]:
    for one in kind.__subclasses__():
        yield one
        yield from subclasses(one)


def test_values_and_errors_arrive_as_they_are(replica: Worker) -> None:
    """A large message comes in pieces; an error that pickle cannot make again would look like a death."""
    values: list[object] = [None, {"a": [1.5, "é"]}, os.urandom(3 << 20), EngineConfig(max_seqs=3)]
    assert [replica.call("echo", value, timeout_s=SOON_S) for value in values] == values
    kinds = [kind for kind in subclasses(CbatchError) if kind.__module__.startswith("cbatch.")]
    assert {ConfigError, RequestError, InvalidFile} <= set(kinds)
    for kind in kinds:
        has_code = kind.__init__ is RequestError.__init__
        error = kind("prompt_too_long", "A long one.") if has_code else kind("A sentence.")
        with pytest.raises(CbatchError) as raised:
            replica.call("raise_cbatch_error", error, timeout_s=SOON_S)
        assert (type(raised.value), str(raised.value), vars(raised.value)) == (kind, str(error), vars(error))
    assert replica.call("echo", "still there", timeout_s=SOON_S) == "still there"


def test_process_imports_what_its_parent_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the folder of the data could stand in for a module of Python."""
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder] + [Path("ignored")])
    (tmp_path / "json.py").write_text("raise SystemExit(5)")
    monkeypatch.chdir(tmp_path)
    replica = start()
    assert replica.call("echo", 1, timeout_s=SOON_S) == 1
    replica.kill()


@pytest.mark.parametrize(
    ("method", "arguments", "reason"),
    [
        ("exit", (4,), "exit code 4"),
        ("crash", (), r"killed by signal 11 \(Segmentation fault\)$"),
        ("raise_other", (), r"ValueError: two lines \(stubs.py, line \d+\)"),
        ("return_unpicklable", (), "exit code 1: .*pickle"),
        ("write_to_sockets", (b"Hello, world",), "an answer that cannot be read: it would be .* bytes long"),
        ("write_to_sockets", (b"\x04" + bytes(7) + b"junk",), "an answer that cannot be read: "),
        ("write_to_sockets", (b"\x03" + bytes(7) + b"I1\n",), "an answer that cannot be read: "),
        ("write_to_sockets", (b"\x04" + bytes(7) + b"I1\n.",), "an answer that cannot be read: '1'"),
    ],
)
def test_death_says_why(replica: Worker, method: str, arguments: tuple[object, ...], reason: str) -> None:
    assert re.match(reason, died(replica, method, *arguments))


def test_other_process_with_the_same_descriptors_hides_no_death(replica: Worker) -> None:
    """A library that forks leaves the socket open in its child; the call would wait for the timeout."""
    started = time.monotonic()
    assert died(replica, "fork_then_exit", timeout_s=SOON_S) == "exit code 7"
    assert time.monotonic() - started < SOON_S / 2


def test_replica_that_hangs_is_killed_with_what_it_has_started(replica: Worker) -> None:
    """A process that is stopped does not react to SIGTERM; a program that it started could hold the GPU."""
    program = replica.call("start_program", timeout_s=SOON_S)
    os.kill(replica.pid, signal.SIGSTOP)
    assert died(replica, "echo", 1, timeout_s=0.05) == "no answer for 0.05 s"
    replica.kill()
    assert not psutil.pid_exists(replica.pid)
    wait_until(lambda: is_over(program))
    replica.kill()
    assert died(replica, "echo", 1)


def test_message_that_nobody_reads_does_not_block_for_ever(replica: Worker) -> None:
    replica.call("echo", 1, timeout_s=SOON_S)
    os.kill(replica.pid, signal.SIGSTOP)
    assert died(replica, "echo", bytes(8 << 20), timeout_s=0.1) == "no answer for 0.1 s"


def test_time_in_which_this_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards replicas against Ctrl-Z of their parent: what they have answered meanwhile is taken."""
    now = 0.0

    class StoppedEnd(socket.socket):
        def recv_into(self, *arguments: Any) -> int:
            nonlocal now
            now += 1000.0
            return super().recv_into(*arguments)

    monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=lambda: now))
    ours, others = socket.socketpair()
    with StoppedEnd(fileno=ours.detach()) as end, others:
        Channel(others).send(b"the answer")
        assert Channel(end).receive(timeout_s=300) == b"the answer"


def test_signals_to_all_are_for_the_parent(replica: Worker) -> None:
    """Ctrl-C and a batch system's SIGTERM reach every process; replicas that end would lose what is finished."""
    replica.call("echo", 1, timeout_s=SOON_S)
    for signum in (signal.SIGINT, signal.SIGTERM):
        os.kill(replica.pid, signum)
    assert replica.call("echo", 2, timeout_s=SOON_S) == 2
    assert os.getpgid(replica.pid) == os.getsid(replica.pid) == replica.pid


def test_messages_come_line_by_line_with_the_name(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against output that controls the terminal, fills it, or mixes with answers."""
    monkeypatch.setattr(worker, "MAX_LINES", 6)
    monkeypatch.setattr(worker, "MAX_LINE_BYTES", 10)
    with caplog.at_level(logging.WARNING, "cbatch"):
        replica = start()
        replica.call("write", b"\x1b[31mred\x07\n\n50%\r100%\r\n", timeout_s=SOON_S)
        replica.call("write", b"to stdout\n", 1, timeout_s=SOON_S)
        replica.call("write", b"0123456789ab\n", timeout_s=SOON_S)
        replica.call("write", b"\xff\xe2\x80\xae\n" + b"x\n" * 10_000, timeout_s=SOON_S)
        assert "x" in died(replica, "exit", 1)
    assert [record.getMessage().removeprefix("replica 1: ") for record in caplog.records] == [
        "[31mred",
        "100%",
        "to stdout",
        "0123456789",
        "ab",
        "\ufffd (what follows is not shown)",
    ]
    assert all(record.getMessage().startswith("replica 1: ") for record in caplog.records)


def test_replica_whose_parent_ended_before_it_began_ends() -> None:
    """Linux tells only of deaths that come later."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = child_command("json:loads", theirs.fileno(), theirs.fileno(), 1, [], None)
        assert subprocess.run(command, pass_fds=[theirs.fileno()], timeout=SOON_S).returncode == 1


def test_cut_lifeline_ends_a_replica_and_its_programs_alone() -> None:
    """Where Linux does not tell, a replica notices by its lifeline, which neither its siblings nor programs hold."""
    first, second = start(), start()
    program = first.call("start_program", timeout_s=SOON_S)
    second.call("start_program", timeout_s=SOON_S)
    os.dup2(os.open(os.devnull, os.O_RDONLY), first._lifeline)
    wait_until(lambda: not first.is_running() and is_over(program))
    assert second.call("echo", 1, timeout_s=SOON_S) == 1
    first.kill()
    second.kill()
