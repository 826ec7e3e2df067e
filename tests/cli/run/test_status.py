"""The display of a run while it goes on: on a terminal, in the file of --status-file, and after SIGUSR1."""

from __future__ import annotations

import gc
import json
import os
import pty
import signal
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyte
import pytest
from pexpect import EOF, TIMEOUT
from pexpect.fdpexpect import fdspawn

from cbatch.batch.row import RowOutcome
from cbatch.cli import main
from cbatch.cli.chat.background_run import parse_run_options
from cbatch.cli.common.exits import SIGNALS, UserError
from cbatch.cli.run.stats import RunStats
from cbatch.cli.run.status import RunStatus
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


def test_the_status_file_and_the_signal_tell_the_same(runs: ForkServer, command: Command) -> None:
    """Guards programs that watch a run: whole JSON at every moment, on stderr when asked, and the end."""
    command.write(LONG)
    status, stderr = command.folder / "status.json", command.folder / "stderr"
    run = runs.start(*command.words(*SLOW, "--status-file", status), stderr=str(stderr))

    def state() -> Any:
        return json.loads(status.read_text()) if status.exists() else {}

    first = until(lambda: found if (found := state()).get("prompt_tokens_per_s") else None)
    assert first["state"] == "running" and first["slots"] == 4 and first["prompt_tokens_left"] > 0
    run.send(signal.SIGUSR1)
    told = until(lambda: [line for line in stderr.read_text().splitlines() if line.startswith("{")])
    assert json.loads(told[0]).keys() == first.keys()
    run.send(signal.SIGINT)
    assert run.code() == 130 and state()["state"] == "ended"


def test_the_signal_before_a_run_can_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a run that is asked while its command is still being imported: it goes on."""
    handlers = {signum: signal.getsignal(signum) for signum in (*SIGNALS, signal.SIGUSR1)}
    monkeypatch.setattr(main, "run_command", lambda: signal.raise_signal(signal.SIGUSR1) or 0)
    monkeypatch.setattr(main.os, "_exit", lambda code: codes.append(code))
    codes = list[int]()
    try:
        main.main()
    finally:
        gc.enable()
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    assert codes == [0]


def test_the_range_of_the_time_left() -> None:
    """Guards a range that shrinks with more rows, and none if all rows are alike."""
    stats = RunStats()
    stats.rows, stats.sum, stats._squares = 4, RowOutcome(completion_tokens=40), 400
    assert stats.spread(10) == 0
    stats._squares = 600
    few = stats.spread(100)
    stats.rows, stats.sum, stats._squares = 400, RowOutcome(completion_tokens=4000), 60000
    assert 0 < stats.spread(100) < few < 1 and stats.spread(0) == 0


def test_a_status_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards a run against the loss of its status: it is told once, and the run goes on."""
    folder = tmp_path / "folder"
    folder.mkdir()
    with RunStatus(str(folder / "status.json")) as status:
        (folder / "status.json").unlink()
        folder.rmdir()
        status.show(lambda: {"rows": 1}, is_last=True)
        status.show(lambda: {"rows": 2}, is_last=True)
    assert capsys.readouterr().err.count("Cannot write") == 1


def test_a_run_in_a_chat_has_no_status_file() -> None:
    """Guards against an option that a chat would ignore."""
    with pytest.raises(UserError, match="--status-file only works in the shell"):
        parse_run_options("in.jsonl -o out.jsonl --status-file status.json")
