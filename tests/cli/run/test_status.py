"""The display of a run while it goes on, on a terminal."""

from __future__ import annotations

import os
import pty
import signal
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pyte
from pexpect import EOF, TIMEOUT
from pexpect.fdpexpect import fdspawn

from cbatch.batch.row import RowOutcome
from cbatch.cli.run.stats import RunStats
from tests.support.command import Command
from tests.support.fork_server import ForkServer

LONG = [{"prompt": f"{number} " * 60, "max_tokens": 100, "ignore_eos": True} for number in range(3000)]
SLOW = ("--max-batch-tokens", "4", "--max-seqs", "4", "--speculate", "off")


def until(is_done: Callable[[], Any], patience_s: float = 60.0) -> Any:
    end = time.monotonic() + patience_s
    while not (found := is_done()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)
    return found


def test_a_terminal_shows_prompts_and_the_last_row(runs: ForkServer, command: Command) -> None:
    """Guards against a view of 80 columns that says nothing while prompts are computed."""
    command.write(LONG)
    master, slave = pty.openpty()
    screen = pyte.Screen(80, 24)
    stream, child = pyte.ByteStream(screen), fdspawn(master)
    termios.tcsetwinsize(slave, (24, 80))
    run = runs.start(*command.words(*SLOW), stderr=os.ttyname(slave))
    os.close(slave)

    def shows(*words: str) -> bool:
        with suppress(TIMEOUT, EOF, OSError):
            stream.feed(child.read_nonblocking(65536, timeout=0.1))
        return all(any(word in line for line in screen.display) for word in words)

    until(lambda: shows("prompts ", " to go, 4/4 slots", "KV ", " tok/s", "/3000 rows"))
    until(lambda: shows("row ", " tokens: ", " left"))
    run.send(signal.SIGKILL)
    run.code()
    os.close(master)


def test_the_range_of_the_time_left() -> None:
    """Guards a range that shrinks with more rows, and none if all rows are alike."""
    stats = RunStats()
    stats.rows, stats.sum, stats._squares = 4, RowOutcome(completion_tokens=40), 400
    assert stats.spread(10) == 0
    stats._squares = 600
    few = stats.spread(100)
    stats.rows, stats.sum, stats._squares = 400, RowOutcome(completion_tokens=4000), 60000
    assert 0 < stats.spread(100) < few < 1 and stats.spread(0) == 0
