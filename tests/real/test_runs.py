"""`cbatch run` on a real model: killed and resumed, and on two replicas, it writes the same bytes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from scripts.real_model import SMOLLM2
from tests.support.command import Command
from tests.support.faults import TIMEOUT_S, wait_until
from tests.support.fork_server import ForkServer
from tests.support.real_models import need

pytestmark = [pytest.mark.real, pytest.mark.slow]

ROWS = [
    *({"id": name, "prompt": f"What is the capital of {name}?"} for name in ("France", "Japan", "Spain", "Egypt")),
    {"id": "story", "prompt": "Tell a story about a lamp.", "max_tokens": 48},
    {"id": "warm", "prompt": "Name an animal.", "temperature": 0.8, "n": 3},
    {"id": "raw", "prompt": "Once upon a time", "raw": True},
    {"id": "bad", "prompt": 3},
]
OPTIONS = ("--max-tokens", "12", "--max-seqs", "3", "--no-weight-cache")


def command_in(folder: Path) -> Command:
    folder.mkdir(exist_ok=True)
    made = Command(folder, need(SMOLLM2.folder), [*ROWS])
    made.options = OPTIONS
    return made


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The output of a run in this process that nothing broke off, without drafts."""
    command = command_in(tmp_path_factory.mktemp("whole"))
    assert command("--speculate", "off", "-q") == 1
    assert [row["id"] for row in command.rows()] == [row["id"] for row in ROWS]
    assert "Paris" in command.rows()[0]["text"] and "Tokyo" in command.rows()[1]["text"]
    return command.data


def test_killed_and_resumed(runs: ForkServer, whole: bytes, tmp_path: Path) -> None:
    """Guards a night's work: what is finished is kept, and the rest is what an undisturbed run gives."""
    command = command_in(tmp_path)
    killed = runs.start(*command.words("--journal-tokens"))
    wait_until(lambda: killed.is_over() or (command.out.exists() and len(command.lines()) >= 3), TIMEOUT_S)
    killed.send(signal.SIGKILL)
    assert killed.code() == -signal.SIGKILL and 3 <= len(command.lines()) < len(ROWS)
    assert runs.start(*command.words("--resume")).code() == 1
    kept, ran = command.counts()
    assert kept >= 3 and kept + ran == len(ROWS) and command.data == whole


def test_replicas(runs: ForkServer, whole: bytes, tmp_path: Path) -> None:
    """Guards two engines that share the rows: the bytes are those of one."""
    command = command_in(tmp_path)
    assert runs.start(*command.words("--replicas", "2")).code() == 1
    assert command.data == whole
    assert sum(replica["rows"] for replica in command.figures()["replicas"]) == len(ROWS)
