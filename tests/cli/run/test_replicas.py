"""`cbatch run --replicas` from the outside: the same rows, figures for each replica, and what people are told."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.cli.common import console, loading
from cbatch.cli.main import run_command
from cbatch.replicas import ray_cluster
from tests.support.fake_replicas import wait_until
from tests.support.in_process_replicas import InProcessLauncher
from tests.support.rows import write_rows

ROWS: list[Any] = [
    {"id": f"row-{n}", "prompt": f"say {n}", "max_tokens": 1 + n % 7, "temperature": n % 2, "ignore_eos": True}
    for n in range(60)
] + ["{bad\n"]


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[Engine]:
    with Engine(EngineConfig(model=str(model_folder), device="cpu", dtype="float32", max_seqs=4)) as made:
        yield made
        assert made.failure is None and made.core.scheduler.pool.num_used == 0


@pytest.fixture
def launchers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[InProcessLauncher]:
    """The launchers that commands have made. The second replica of each dies once."""
    made: list[InProcessLauncher] = []

    def make(options: Any, config: EngineConfig) -> InProcessLauncher:
        made.append(InProcessLauncher(engine, options.wanted, deaths={1: 1}))
        return made[-1]

    monkeypatch.setattr(loading, "make_launcher", make)
    return made


def test_replicas_give_the_rows_of_one_engine(
    launchers: list[InProcessLauncher],
    model_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards rows, --resume, --stats, the lines of -v and the summary, while a replica dies."""
    monkeypatch.setattr(console, "LINE_SECONDS", 0)
    source, one, two, figures = (tmp_path / name for name in ("in.jsonl", "one.jsonl", "two.jsonl", "stats.json"))
    write_rows(source, ROWS)
    options = ["-m", str(model_folder), "--dtype", "float32", "--seed", "3"]
    assert run_command(["run", str(source), "-o", str(one), *options]) == 1
    rows = one.read_bytes().splitlines(keepends=True)
    capsys.readouterr()

    replicated = ["run", str(source), "-o", str(two), *options, "-v", "--stats", str(figures), "--replicas"]
    two.write_bytes(b"".join(rows[5:20]))  # what an earlier run on one engine has left
    assert run_command([*replicated, "3", "--resume"]) == 1
    assert two.read_bytes() == one.read_bytes()
    said, stats = capsys.readouterr().err, json.loads(figures.read_text())
    assert (stats["rows"], stats["rows_kept"], stats["deaths"]) == (46, 15, 1)
    assert [replica["name"] for replica in stats["replicas"]] == ["replica 1", "replica 2", "replica 3"]
    assert sum(replica["rows"] for replica in stats["replicas"]) == 46
    assert [replica["deaths"] for replica in stats["replicas"]] == [0, 1, 0]
    assert "replica 2 died: the test says so; it is started again in 1 s" in said
    assert "replica 1: " in said and "2 of 3 replicas" in said
    assert "replicas: replica 2 died: the test says so" in said
    assert "replicas: 3; the first was ready" in said and "parameters: " in said
    assert all(launcher.is_closed for launcher in launchers)


def test_rows_show_their_prompts(launchers: list[InProcessLauncher], model_folder: Path, tmp_path: Path) -> None:
    """Guards --echo-prompt: the text that was tokenized, in rows of one engine and of replicas, in tables, and keys."""
    ways: list[Any] = [
        {"prompt": "hi"},
        {"prompt": "hi", "raw": True},
        {"prompt_token_ids": [72, 105]},
        {"prompt": 1},
    ]
    api = {"custom_id": "c", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "hi"}]}}
    source = write_rows(tmp_path / "in.jsonl", [{**row, "max_tokens": 2} for row in ways] + [api])
    command = ["run", str(source), "-m", str(model_folder), "--dtype", "float32", "-q"]

    def run(name: str, *options: str) -> bytes:
        assert run_command([*command, "-o", str(tmp_path / name), *options]) == 1
        return (tmp_path / name).read_bytes()

    keys = {json.loads(line)["key"] for line in run("plain.jsonl").splitlines()}
    shown = run("one.jsonl", "--echo-prompt")
    assert run("two.jsonl", "--echo-prompt", "--replicas", "2") == shown
    chat, raw, ids, bad, body = (json.loads(line) for line in shown.splitlines())
    assert raw["prompt_text"] == "hi" and "prompt_text" not in bad
    assert "hi" in chat["prompt_text"] and chat["prompt_text"].endswith("assistant\n")
    assert body["response"]["body"]["prompt_text"] == chat["prompt_text"] and isinstance(ids["prompt_text"], str)
    assert keys.isdisjoint(row["key"] for row in (chat, raw, ids, body)) and bad["key"] in keys
    table = csv.DictReader(run("table.csv", "--echo-prompt").decode().splitlines(keepends=True))
    assert [row["prompt_text"] for row in table][:2] == [chat["prompt_text"], "hi"]


def test_quiet_replicas_say_nothing(
    launchers: list[InProcessLauncher], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards -q: a replica that dies and comes back is no error."""
    source = write_rows(tmp_path / "in.jsonl", ROWS[:20])
    assert run_command(["run", str(source), "-o", str(tmp_path / "out.jsonl"), "--replicas", "2", "-q"]) == 0
    assert capsys.readouterr().err == ""


def test_a_full_disk_ends_the_run(
    launchers: list[InProcessLauncher], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards exit code 3, and replicas that would go on although nothing can be written."""
    source = write_rows(tmp_path / "in.jsonl", ROWS)
    assert run_command(["run", str(source), "-o", "/dev/full", "-q", "--replicas", "2"]) == 3
    assert "No space left on device" in capsys.readouterr().err
    assert launchers[0].is_closed


def test_rows_of_a_pipe_are_answered_as_they_come(
    launchers: list[InProcessLauncher], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a pipeline whose writer waits for an answer before it goes on."""
    out = tmp_path / "out.jsonl"
    lines = [json.dumps(row).encode() + b"\n" for row in ROWS[:6]]
    reading, writing = os.pipe()
    answered: list[int] = []

    def write() -> None:
        with os.fdopen(writing, "wb", buffering=0) as pipe:
            for number, line in enumerate(lines):
                pipe.write(line)
                wait_until(lambda count=number + 1: out.is_file() and out.read_bytes().count(b"\n") == count)
                answered.append(number)

    with os.fdopen(reading, "rb") as stream:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=stream, isatty=lambda: False))
        writer = threading.Thread(target=write)
        writer.start()
        assert run_command(["run", "-", "-o", str(out), "-q", "--replicas", "2"]) == 0
        writer.join()
    assert answered == [*range(6)]


def test_what_cannot_be_loaded_is_said_at_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards exit code 2, and the output that is there, when options cannot be met by a replica."""

    class Refusing(InProcessLauncher):
        def start(self, number: int, config: EngineConfig) -> Any:
            raise ConfigError("There is no such device.")

    launcher = Refusing(engine, 2)
    monkeypatch.setattr(loading, "make_launcher", lambda options, config: launcher)
    source, out = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    out.write_text("earlier\n")
    assert run_command(["run", str(source), "-o", str(out), "--overwrite", "--replicas", "2"]) == 2
    assert capsys.readouterr().err == "cbatch: There is no such device.\n"
    assert out.read_text() == "earlier\n" and launcher.is_closed


def test_processes_of_this_machine(model_folder: Path, tmp_path: Path) -> None:
    """Guards the whole way with real processes, and a driver process that imports no torch."""
    source, out = write_rows(tmp_path / "in.jsonl", ROWS[:30]), tmp_path / "out.jsonl"
    command = ["run", str(source), "-o", str(out), "-m", str(model_folder), "--dtype", "float32", "--replicas", "2"]
    code = f"""if True:
        import sys
        from cbatch.cli.main import run_command
        code = run_command({[*command, "--stats", str(tmp_path / "stats.json")]!r})
        print(code, [name for name in ("torch", "transformers", "tokenizers") if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "0 []\n", done.stderr
    stats = json.loads((tmp_path / "stats.json").read_text())
    assert stats["rows"] == 30 and stats["load_s"] > 0 and len(stats["replicas"]) == 2
    assert run_command(["run", str(source), "-o", str(tmp_path / "one.jsonl"), *command[4:8], "-q"]) == 0
    assert out.read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def test_ray_has_to_be_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the sentence for a machine without the package: what is missing, and the command that installs it."""
    monkeypatch.setattr(ray_cluster, "ray", None)
    write_rows(tmp_path / "in.jsonl", ROWS)
    assert run_command(["run", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--ray", "auto"]) == 2
    assert re.search(r"--ray needs the package ray: pip install .*\[ray\]'", capsys.readouterr().err)
