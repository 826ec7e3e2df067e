"""`cbatch run --replicas` from the outside: the same rows, figures for each replica, and what people are told."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from cbatch.base.errors import ConfigError
from cbatch.cli.common import console
from tests.support.command import Command
from tests.support.faults import wait_until
from tests.support.in_process_replicas import InProcessLauncher

pytestmark = pytest.mark.usefixtures("rows_written")

ROWS: list[Any] = [
    {"id": f"row-{n}", "prompt": f"say {n}", "max_tokens": 1 + n % 7, "temperature": n % 2, "ignore_eos": True}
    for n in range(60)
] + ["{bad"]


def test_replicas_give_the_rows_of_one_engine(
    launchers: list[InProcessLauncher], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards rows, --resume, --stats, the lines of -v and the summary, while a replica dies."""
    monkeypatch.setattr(console, "LINE_SECONDS", 0)
    command.options += ("--seed", "3")
    assert command() == 1
    whole, rows = command.data, command.lines()
    command.said()
    command.out.write_bytes(b"".join(rows[5:20]))  # what an earlier run on one engine has left
    assert command("-v", "--replicas", "3", "--resume") == 1 and command.data == whole
    said, stats = command.said(), command.figures()
    assert (stats["rows"], stats["rows_kept"], stats["deaths"]) == (46, 15, 1)
    assert [replica["name"] for replica in stats["replicas"]] == ["replica 1", "replica 2", "replica 3"]
    assert sum(replica["rows"] for replica in stats["replicas"]) == 46
    assert [replica["deaths"] for replica in stats["replicas"]] == [0, 1, 0]
    assert "replica 2 died: the test says so; it is started again in 1 s" in said
    assert "replica 1: " in said and "2 of 3 replicas" in said
    assert "replicas: replica 2 died: the test says so" in said
    assert "replicas: 3; the first was ready" in said and "parameters: " in said
    assert all(launcher.is_closed for launcher in launchers)


def test_rows_show_their_prompts(launchers: list[InProcessLauncher], command: Command) -> None:
    """Guards --echo-prompt: the text that was tokenized, in rows of one engine and of replicas, in tables, and keys."""
    ways: list[Any] = [{"prompt": "hi"}, {"prompt": "hi", "raw": True}, {"prompt_token_ids": [72, 105]}, {"prompt": 1}]
    body = {"messages": [{"role": "user", "content": "hi"}]}
    command.options += ("--max-tokens", "2", "-q")
    _, plain = command.answer([*ways, {"custom_id": "c", "url": "/v1/chat/completions", "body": body}])
    assert command("--overwrite", "--echo-prompt") == 1
    shown = command.data
    assert command("--overwrite", "--echo-prompt", "--replicas", "2") == 1 and command.data == shown
    keys, (chat, raw, ids, bad, api) = {row["key"] for row in plain}, command.rows()
    assert raw["prompt_text"] == "hi" and "prompt_text" not in bad
    assert "hi" in chat["prompt_text"] and chat["prompt_text"].endswith("assistant\n")
    assert api["response"]["body"]["prompt_text"] == chat["prompt_text"] and isinstance(ids["prompt_text"], str)
    assert keys.isdisjoint(row["key"] for row in (chat, raw, ids, api)) and bad["key"] in keys
    command.out = command.folder / "table.csv"
    assert command("--echo-prompt") == 1
    table = csv.DictReader(command.data.decode().splitlines(keepends=True))
    assert [row["prompt_text"] for row in table][:2] == [chat["prompt_text"], "hi"]


def test_quiet_replicas_say_nothing(launchers: list[InProcessLauncher], command: Command) -> None:
    """Guards -q: a replica that dies and comes back is no error."""
    command.write(ROWS[:20])
    assert command("--replicas", "2", "-q") == 0 and command.said() == ""


def test_a_full_disk_ends_the_run(launchers: list[InProcessLauncher], command: Command) -> None:
    """Guards exit code 3, and replicas that would go on although nothing can be written."""
    assert command("-o", "/dev/full", "-q", "--replicas", "2") == 3
    assert "No space left on device" in command.said() and launchers[0].is_closed


@pytest.mark.parametrize("options", [(), ("--replicas", "2")])
def test_rows_of_a_pipe_are_answered_as_they_come(
    launchers: list[InProcessLauncher], command: Command, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a pipeline whose writer waits for an answer before it goes on, on one engine and on replicas."""
    reading, writing = os.pipe()
    answered: list[int] = []

    def write() -> None:
        with os.fdopen(writing, "wb", buffering=0) as pipe:
            for number, row in enumerate(ROWS[:6]):
                pipe.write(json.dumps(row).encode() + b"\n")
                wait_until(lambda count=number + 1: command.out.is_file() and command.data.count(b"\n") == count)
                answered.append(number)

    command.source = Path("-")
    with os.fdopen(reading, "rb") as stream:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=stream, isatty=lambda: False))
        writer = threading.Thread(target=write)
        writer.start()
        assert command("-q", *options) == 0
        writer.join()
    assert answered == [*range(6)]


def test_what_cannot_be_loaded_is_said_at_once(
    launchers: list[InProcessLauncher], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards exit code 2, and the output that is there, when options cannot be met by a replica."""
    monkeypatch.setattr(InProcessLauncher, "start", Mock(side_effect=ConfigError("There is no such device.")))
    command.out.write_text("earlier\n")
    assert command("--overwrite", "--replicas", "2") == 2
    assert command.said() == "cbatch: There is no such device.\n"
    assert command.out.read_text() == "earlier\n" and launchers[0].is_closed


def test_processes_of_this_machine(command: Command) -> None:
    """Guards the whole way with real processes, the digits of log-probabilities in them, and a driver without torch."""
    scored = [{"prompt": "hello world", "raw": True, "choices": [" a", "b", "so on"], "score": True}]
    scored += [
        {"prompt": f"{number} said", "logprobs": 3, "prompt_logprobs": 2, "max_tokens": 9} for number in range(9)
    ]
    command.write([*ROWS[:20], *scored])
    code = f"""if True:
        import sys
        from cbatch.cli.main import run_command
        code = run_command({command.words("--replicas", "2")!r})
        print(code, {{"torch", "transformers", "tokenizers", "jinja2"}} & {{*sys.modules}} or "")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "0 \n", done.stderr
    found, stats = command.data, command.figures()
    assert stats["rows"] == 30 and stats["load_s"] > 0 and len(stats["replicas"]) == 2
    assert command("--overwrite", "-q") == 0 and command.data == found
