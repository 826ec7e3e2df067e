"""The options of a run beside its output: what resuming and verifying it take from there."""

from __future__ import annotations

import json
import sys
from io import StringIO
from pathlib import Path

import pytest

from cbatch.cli.main import run_command
from tests.support.command import Command


@pytest.fixture
def cut(command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command, after a run of which the last row is lost."""
    monkeypatch.chdir(command.folder)
    command.write([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}])
    Path("schema.json").write_text('{"type": "integer"}')
    options = ["--max-tokens", "5", "--temperature", "0.7", "--no-prefix-cache", "--stop", "-x", "--stop", "y z"]
    words = ["-m", command.model.name, *options, "--json-schema", "schema.json", "--param", "top_k=7"]
    monkeypatch.chdir(command.model.parent)
    Path(command.folder, "schema.json").replace("schema.json")
    assert run_command(["run", str(command.source), "-o", str(command.out), *words]) == 0
    Path(f"{command.out}.whole").write_bytes(command.data)
    command.out.write_bytes(b"".join(command.lines()[:2]))
    monkeypatch.chdir("/")
    command.said()
    return command


def test_resume_needs_no_options(cut: Command) -> None:
    """Guards a run that goes on, from another folder, with the input and options of the first."""
    assert run_command(["run", "--resume", "-o", str(cut.out)]) == 0
    said = cut.said()
    assert "2 rows are kept" in said and "--temperature=0.7" in said
    assert cut.data == Path(f"{cut.out}.whole").read_bytes()


def test_an_option_given_again_wins(cut: Command) -> None:
    """Guards against rows of two temperatures in one file, and against saved options that cannot be changed."""
    again = ["run", "--resume", "-o", str(cut.out), "--temperature", "0.8"]
    assert run_command(again) == 2
    assert "different --temperature (0.7 then, 0.8 now)" in cut.said() and len(cut.lines()) == 2
    assert run_command([*again, "--recompute-changed"]) == 0
    assert run_command(["run", "--resume", "-o", str(cut.out)]) == 0
    assert "3 rows are there" in cut.said()


def test_verify_needs_no_options(cut: Command) -> None:
    """Guards a check of a file whose options nobody remembers."""
    assert run_command(["verify", str(cut.out), "--sample", "100%"]) == 0
    assert "2 rows of 2 run again, alone and together: all as in the file" in cut.said()


def test_a_new_run_takes_nothing(cut: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a new output that has the name of a removed one, and input that is named as a pipe."""
    saved = cut.folder / ".out.jsonl.cbatch-run"
    cut.out.unlink()
    assert cut("--resume") == 0 and json.loads(saved.read_text())["options"].keys() == {
        "input",
        "model",
        "dtype",
        "stats",
    }
    monkeypatch.setattr(sys, "stdin", StringIO())
    sys.stdin.buffer = open("/dev/null", "rb")  # type: ignore[misc]  # noqa: SIM115, PTH123
    assert run_command(["run", "-", "--resume", "-o", str(cut.out)]) == 2
    assert "lines that the input does not have" in cut.said()


def test_damaged_options_are_told(cut: Command) -> None:
    """Guards against a run with half of its options."""
    (cut.folder / ".out.jsonl.cbatch-run").write_text('{"input": "a')
    assert run_command(["run", "--resume", "-o", str(cut.out)]) == 2
    assert "is damaged; remove it" in cut.said()
