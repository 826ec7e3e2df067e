"""Environments that nobody should have: the command ends with a sentence and the right exit code, or just works."""

from __future__ import annotations

from pathlib import Path

import pytest

from cbatch.cli.main import cli, run_command
from tests.support.environments import SAMPLE, Case, judge, run_case
from tests.support.faults import Panic


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.name)
def test_the_command_ends_with_a_sentence(case: Case, tmp_path: Path) -> None:
    """Guards against tracebacks, names of exceptions, megabytes of quoted values and wrong exit codes."""
    outcome = run_case(case, tmp_path)
    assert judge(case, outcome) is None, outcome


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RuntimeError("can't start new thread"), "No further thread can be started; ulimit -u may be too low"),
        (MemoryError(), "There is not enough memory"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ImportError("libx.so: failed to map segment\nat 0x1"), "cannot be loaded: libx.so: failed to map segment;"),
        (Panic("boom"), "boom"),
        (KeyError("a"), "This should not have happened: KeyError: 'a'"),
    ],
)
def test_what_ends_the_command_is_said(
    error: BaseException, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards the sentence for what a poor environment raises anywhere: threads, memory, disk, libraries, bugs."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli, "main", fail)
    assert run_command(["run"]) == 3
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1 and "finished rows are written" in said
