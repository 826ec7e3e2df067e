"""`cbatch run --journal-tokens` and `--continue-truncated` from the outside: unfinished answers go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.cli.common import loading
from cbatch.cli.main import run_command
from tests.cli.run.test_resume import Case
from tests.support.in_process_replicas import InProcessLauncher
from tests.support.rows import read_rows, without_check

LONG = {"max_tokens": 200, "ignore_eos": True, "temperature": 1.0}
ROWS: list[Any] = [{"prompt": f"long {number}", **LONG} for number in range(3)]
ROWS += [{"prompt": f"short {number}", "max_tokens": 2} for number in range(15)] + ["{bad"]
JOURNAL = ("--journal-tokens", "--journal-interval", "0.01")
BROKEN_OFF = ("--max-seqs", "4", "--window", "4", "--max-errors", "1")
"""Ends at the bad row at the end, when the long ones are still there."""


@pytest.fixture
def case(tmp_path: Path, model_folder: Path) -> Case:
    made = Case(tmp_path, model_folder)
    made.rows(ROWS)
    return made


def tokens_of(case: Case) -> Path:
    return case.out.with_name(case.out.name + ".tokens")


@pytest.mark.parametrize(("name", "options"), [("out.jsonl", JOURNAL), ("out.csv", ())])
def test_unfinished_answers_go_on(
    case: Case, capfd: pytest.CaptureFixture[str], name: str, options: tuple[str, ...]
) -> None:
    """Guards a run that was broken off: --resume goes on in the middle, also without journaling itself."""
    case.out = case.out.with_name(name)
    assert case.run() == 1
    whole = case.out.read_bytes()
    assert case.run("--overwrite", *JOURNAL, *BROKEN_OFF) == 3
    first = case.figures()
    assert tokens_of(case).exists() and first["rows"] == 16
    assert case.run("--resume", *options) == 1
    assert case.out.read_bytes() == whole and not tokens_of(case).exists()
    second = case.figures()
    assert second["rows_continued"] == second["rows"] == 3 and second["rows_kept"] == 16
    assert second["reused_tokens"] >= 3 * 10 and second["output_tokens"] + second["reused_tokens"] == 3 * 200
    assert ", 3 continued" in capfd.readouterr().err


def test_a_run_without_finished_rows_goes_on(case: Case) -> None:
    """Guards the longest answers: there may be tokens and no output file yet."""
    assert case.run() == 1
    whole = case.out.read_bytes()
    assert case.run("--overwrite", *JOURNAL, *BROKEN_OFF) == 3
    case.out.unlink()
    assert case.run("--resume", *JOURNAL) == 1 and case.out.read_bytes() == whole
    assert case.figures()["rows_continued"] == 3


def test_tokens_are_not_dropped_unasked(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards hours of work against a command without --resume, and a new run against old tokens."""
    assert case.run(*JOURNAL, *BROKEN_OFF) == 3
    case.out.unlink()
    before = tokens_of(case).read_bytes()
    assert case.run() == 2 and tokens_of(case).read_bytes() == before
    assert "has unfinished answers of an earlier run; --resume continues it, --overwrite" in capfd.readouterr().err
    assert case.run("--overwrite") == 1 and case.figures()["rows_continued"] == 0 and not tokens_of(case).exists()


def test_refusals(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards against options that would do nothing, before a model is loaded; and against the file of somebody else."""
    command = ["run", str(case.source), "-m", str(case.model)]
    refused = [
        (["--journal-tokens"], "--journal-tokens needs an output file"),
        (["-o", str(case.out), "--journal-tokens", "--replicas", "2"], "does not go with --replicas"),
        (["-o", str(case.out), "--continue-truncated", "--max-tokens", "9"], "--continue-truncated needs --resume"),
        (["-o", str(case.out), "--continue-truncated", "--resume"], "--continue-truncated needs --max-tokens"),
    ]
    for options, message in refused:
        assert run_command([*command, *options]) == 2 and message in capfd.readouterr().err
    tokens_of(case).write_text("mine")
    assert case.run(*JOURNAL) == 2 and "is a file of something else" in capfd.readouterr().err
    assert case.run() == 1 and tokens_of(case).read_text() == "mine"


HOT = {"temperature": 1.0, "ignore_eos": True}
CALL = {"method": "POST", "url": "/v1/completions"}
TRUNCATED: list[Any] = [
    *({"id": number, "prompt": f"row {number}", **HOT, "stop": ["a", "e", "l"]} for number in range(12)),
    {"prompt": "several", **HOT, "n": 3, "stop": ["a"]},
    {"prompt": "own limit", **HOT, "max_tokens": 3},
    {"prompt": "scored", **HOT, "logprobs": 1},
    {"prompt": "scored and stopped", **HOT, "logprobs": 1, "stop": ["a", "e", "o", "t", " "]},
    {"prompt": "form", **HOT, "ignore_eos": False, "regex": "[ab]{9,20}"},
    CALL | {"custom_id": "c", "body": {"prompt": "call", **HOT, "stop": ["a", "e"]}},
    CALL | {"custom_id": "d", "body": {"prompt": "another call", "temperature": 1.0, "ignore_eos": True}},
    {"prompt": "x " * 400},
    "{bad",
]


@pytest.fixture
def truncated(case: Case) -> Case:
    case.rows(TRUNCATED)
    return case


def lines_of(case: Case) -> list[Any]:
    """The rows, as bytes; those with log-probabilities, whose last place may differ on this path, without these."""
    lines: list[Any] = case.out.read_bytes().splitlines()
    for number, line in enumerate(lines):
        if "logprobs" in (row := json.loads(line)):
            lines[number] = without_check(row) | {"logprobs": [one["token"] for one in row["logprobs"]["content"]]}
    return lines


def test_truncated_answers_go_on(truncated: Case, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards --continue-truncated: the bytes of a run that had the larger limit; only what is missing is generated."""
    case = truncated
    assert case.run("--max-tokens", "40", "--token-ids") == 1
    whole, total = lines_of(case), case.figures()["output_tokens"]
    assert case.run("--max-tokens", "6", "--token-ids", "--overwrite") == 1
    short = read_rows(case.out)
    ended = [row["index"] for row in short[:12] if row["finish_reason"] == "length"]
    assert 0 < len(ended) < 12, "rows of both kinds"
    assert case.run("--resume", "--continue-truncated", "--max-tokens", "40", "--token-ids") == 1
    assert lines_of(case) == whole
    stats = case.figures()
    assert stats["rows_continued"] >= len(ended) + 2 and stats["rows_kept"] >= 12 - len(ended) + 2
    assert stats["output_tokens"] <= total - 6 * stats["rows_continued"]
    assert "that --max-tokens ended go on; " in capfd.readouterr().err
    assert case.run("--resume", "--continue-truncated", "--max-tokens", "40", "--token-ids") == 1
    assert case.ran() == 0 and lines_of(case) == whole


def test_answers_without_token_ids_begin_anew(truncated: Case, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards exactness: a text does not tell its tokens. Rows that ended by themselves stay."""
    case = truncated
    assert case.run("--max-tokens", "40") == 1
    whole = lines_of(case)
    assert case.run("--max-tokens", "6", "--overwrite") == 1
    assert case.run("--resume", "--max-tokens", "40") == 2, "without the option, all rows differ"
    capfd.readouterr()
    assert case.run("--resume", "--continue-truncated", "--max-tokens", "40") == 1
    assert lines_of(case) == whole and case.figures()["rows_continued"] == 0 and case.kept() >= 3
    assert "of a run with fewer --max-tokens begin anew" in capfd.readouterr().err


def test_other_changes_are_still_refused(truncated: Case, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards keys: only a larger limit is taken over, not another temperature, seed or input, nor a smaller limit."""
    case = truncated
    assert case.run("--max-tokens", "6", "--token-ids") == 1
    before = case.out.read_bytes()
    continued = ("--resume", "--continue-truncated", "--token-ids")
    for other in (["--max-tokens", "40", "--seed", "1"], ["--max-tokens", "4"], ["--max-tokens", "40", "--top-k", "3"]):
        assert case.run(*continued, *other) == 2 and "other sampling parameters" in capfd.readouterr().err
    case.rows([{"prompt": "changed"}, *TRUNCATED[1:]])
    assert case.run(*continued, "--max-tokens", "40") == 2 and "another input" in capfd.readouterr().err
    assert case.out.read_bytes() == before


def test_truncated_answers_go_on_on_replicas(
    truncated: Case, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards lines that bring tokens to another process, and keys that it makes with other limits."""
    case = truncated
    assert case.run("--max-tokens", "40", "--token-ids") == 1
    whole = lines_of(case)
    assert case.run("--max-tokens", "6", "--token-ids", "--overwrite") == 1
    with Engine(EngineConfig(model=str(model_folder), device="cpu", dtype="float32", max_seqs=4)) as engine:
        monkeypatch.setattr(
            loading,
            "make_launcher",
            lambda options, config: InProcessLauncher(engine, options.wanted, deaths={1: 1}),
        )
        options = ("--resume", "--continue-truncated", "--max-tokens", "40", "--token-ids", "--replicas", "2")
        assert case.run(*options) == 1
    assert lines_of(case) == whole and case.figures()["rows_continued"] > 3
