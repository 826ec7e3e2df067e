"""Guards a command's output against what libraries print on stdout."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken

from cbatch.base.errors import ConfigError
from cbatch.cli.common.stdout import own_stdout, without_library_output
from tests.support.fork_server import ForkServer
from tests.support.rows import write_rows


@pytest.fixture
def talking_model(model_folder: Path, tmp_path: Path) -> Path:
    """The tokenizers library prints a line on stdout, from Rust, for each option of a token that it does not know."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "special_tokens_map.json").write_text('{"": {"": {"": []}}}')
    return folder


@pytest.mark.parametrize("command", ["run", "info", "chat"])
def test_stdout_holds_only_what_the_command_writes(
    command: str, runs: ForkServer, talking_model: Path, tmp_path: Path
) -> None:
    """Guards `cbatch run IN | jq` against a library that prints while the model is loaded."""
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    stdout, stderr = tmp_path / "stdout", tmp_path / "stderr"
    given = {"run": [source], "info": ["--json"], "chat": ["--json", "hello"]}[command]
    run = runs.start(command, *given, "-m", talking_model, stdout=str(stdout), stderr=str(stderr))
    assert run.code() == 0, stderr.read_text()
    assert json.loads(stdout.read_text())
    assert all(line.startswith("cbatch: ") for line in stderr.read_text().splitlines())


def test_a_stdout_that_is_no_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards programs that have replaced stdout, such as a notebook: they are told where rows can go."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with pytest.raises(ConfigError, match="name one with -o"):
        own_stdout()


def test_stdout_comes_back(capfd: pytest.CaptureFixture[str]) -> None:
    """Guards what a command prints after it has loaded a model, also if two are loaded at once."""
    with without_library_output():
        with without_library_output():
            os.write(1, b"library\n")
        os.write(1, b"library\n")
    os.write(1, b"command\n")
    assert capfd.readouterr() == ("command\n", "")


def test_the_library_still_prints(capfd: pytest.CaptureFixture[str]) -> None:
    """Guards the test of commands: if it does not print any more, that test needs another library."""
    AddedToken("a", **{"no-such": 1})
    assert capfd.readouterr().out
