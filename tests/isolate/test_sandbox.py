"""Sandboxes: whatever runs there costs its own call only, and no more time and memory than it may have."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import NoReturn

import pytest

from cbatch.isolate.child import Limits
from cbatch.isolate.sandbox import Sandbox
from cbatch.isolate.worker import WorkerDied, WorkerFailed
from tests.isolate.test_worker import is_over
from tests.support.faults import wait_until

STUB = "tests.isolate.stubs:Stub"
LIMITS = Limits(memory=512 << 20, cpu_seconds=0.3, wall_seconds=2.0)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with closing(Sandbox(STUB, "given", limits=LIMITS)) as made:
        yield made


def test_values_arrive_as_they_are(sandbox: Sandbox) -> None:
    """Guards texts with halves of characters, and the process that is kept from call to call."""
    sandbox.call("echo")
    number, *rest = sandbox.call("echo", "é\ud800\n", {"a": [1.5, None]})
    assert number == 2 and rest == ["given", "é\ud800\n", {"a": [1.5, None]}]
    assert sandbox.call("state") == [1, True, True], "it is open to the environment, or to signals for its parent"


@pytest.mark.parametrize(
    ("method", "arguments", "reason", "dies"),
    [
        ("fail", (), "^it is wrong$", False),
        ("open_pickle", (), "not JSON serializable", False),
        ("fill", (1 << 30,), "^it takes too much memory$", False),
        ("loop", (), r"^it does not end within 0\.3 s$", True),
        ("sleep", (), "^it does not end within 2 s$", True),
        ("crash", (), r"^it takes too much memory, or breaks the interpreter \(its process ended with -11\)$", True),
        ("write", (10_000_000,), "^it takes too much memory, or breaks", True),
    ],
)
def test_a_call_that_goes_wrong_is_the_only_one(
    sandbox: Sandbox, method: str, arguments: tuple[object, ...], reason: str, dies: bool
) -> None:
    """Guards the parent against a loop that keeps the interpreter, a crash, and more bytes than it asked for."""
    with pytest.raises(WorkerFailed, match=reason) as failed:
        sandbox.call(method, *arguments, max_bytes=1 << 20)
    assert isinstance(failed.value, WorkerDied) is dies
    assert sandbox.call("echo", "next")[1:] == ["given", "next"]


def test_an_interrupted_call_leaves_no_answer_behind(sandbox: Sandbox) -> None:
    """Guards the next row against the answer to a call that Ctrl-C ended: another text under its name."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        sandbox.call("echo")
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            sandbox.call("sleep", 0.2)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert sandbox.call("echo", "next")[1:] == ["given", "next"]


def test_what_cannot_be_made_is_the_machines_fault() -> None:
    """Guards a row against being refused because a library is missing there."""
    with (
        closing(Sandbox("tests.isolate.stubs:broken", limits=LIMITS)) as broken,
        pytest.raises(OSError, match="no object"),
    ):
        broken.call("echo")


def test_closing_ends_what_runs_and_lets_nothing_start() -> None:
    """Guards the end of a run against a call that another thread waits for."""
    closed = Sandbox(STUB, limits=Limits(wall_seconds=60))
    closed.call("echo")
    assert closed.worker is not None
    pid, started = closed.worker.pid, time.monotonic()
    threading.Timer(0.1, closed.close).start()
    with pytest.raises(WorkerDied):
        closed.call("sleep")
    assert is_over(pid) and time.monotonic() - started < 20
    with pytest.raises(WorkerDied):
        closed.call("echo")


def test_nobody_is_left_behind_by_a_sandbox_that_is_forgotten() -> None:
    """Guards the machine against one process more for every engine that was garbage."""
    forgotten = Sandbox(STUB, limits=LIMITS)
    forgotten.call("echo")
    assert forgotten.worker is not None
    pid = forgotten.worker.pid
    del forgotten
    wait_until(lambda: is_over(pid))
