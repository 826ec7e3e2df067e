"""`cbatch run --validate --tries --cache` from the outside: exit codes, resuming, figures, replicas, refusals."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.cli.common import loading
from cbatch.cli.main import run_command
from tests.cli.run.test_resume import Case
from tests.support.in_process_replicas import InProcessLauncher
from tests.support.rows import read_rows

ROWS: list[Any] = [
    {"id": f"r{number}", "prompt": f"row {number}", "temperature": 1.0, "max_tokens": 4} for number in range(12)
] + ["{bad"]
TRIES = ("--validate", "regex=(?s).*[aeiou].*", "--tries", "3")


@pytest.fixture
def case(tmp_path: Path, model_folder: Path) -> Case:
    made = Case(tmp_path, model_folder)
    made.rows(ROWS)
    return made


def test_resuming_loses_no_try(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards a run that was cut off, and other checks: the same bytes, or a refusal that names the option."""
    assert case.run(*TRIES) == 1
    assert "further tries" in capfd.readouterr().err
    whole = case.out.read_bytes()
    stats = case.figures()
    done = [row for row in read_rows(case.out) if "validation" in row]
    assert stats["rows_validated"] == len(done) == 12
    assert stats["tries"] == sum(row["validation"]["tries"] for row in done) > 12
    assert stats["error_codes"]["invalid_json"] == 1
    assert stats["error_codes"].get("invalid_answer", 0) == sum(not row["validation"]["valid"] for row in done)
    lines = whole.splitlines(keepends=True)
    for keep in (0, 5):
        case.out.write_bytes(b"".join(reversed(lines[len(lines) - keep :])) + lines[0][:30])
        assert case.run("--resume", "--max-seqs", "2", *TRIES) == 1
        assert case.out.read_bytes() == whole and case.kept() == keep
    for other in ((), TRIES[:2], (*TRIES[:2], "--tries", "4"), ("--validate", "regex=(?s).*", *TRIES[2:])):
        assert case.run("--resume", *other) == 2
        assert "--validate, --tries" in capfd.readouterr().err and case.out.read_bytes() == whole


def test_retry_errors_tries_further_seeds(case: Case) -> None:
    """Guards --retry-errors: rows that never were good get new tries, as many as --tries says, and the others stay."""
    check = ("--validate", "regex=(?s).*[aeiouy].*")
    assert case.run(*check) == 1
    before = read_rows(case.out)
    bad = [row["index"] for row in before if row.get("error", {}).get("code") == "invalid_answer"]
    assert 2 <= len(bad) < 12
    assert case.run(*check, "--resume", "--retry-errors") == 1
    assert case.ran() == len(bad) + 1 and case.figures()["tries"] == len(bad), "those of the first run do not count"
    after = read_rows(case.out)
    assert [row for row in after if row["index"] not in bad] == [row for row in before if row["index"] not in bad]
    assert all(after[index]["validation"]["tries"] == 2 for index in bad)
    assert any("error" not in after[index] for index in bad), "another seed gives another answer"
    assert case.run(*check, "--overwrite", "--tries", "2") == 1
    assert [row.get("text") for row in read_rows(case.out)] == [row.get("text") for row in after]


def test_a_second_run_takes_all_from_the_cache(case: Case, tmp_path: Path) -> None:
    """Guards --cache: the same bytes without computing; ids and columns do not matter; only --timings shows it."""
    cached = (*TRIES, "--cache", str(tmp_path / "cache"))
    assert case.run(*TRIES) == 1
    plain = case.out.read_bytes()
    assert case.run("--overwrite", *cached) == 1 and case.out.read_bytes() == plain
    first = case.figures()
    assert case.run("--overwrite", *cached) == 1 and case.out.read_bytes() == plain
    second = case.figures()
    assert (first["rows_from_cache"], first["reused_tokens"]) == (0, 0)
    assert (second["rows_from_cache"], second["output_tokens"], second["steps"]) == (12, 0, 0)
    assert second["reused_tokens"] == first["output_tokens"] > 0 and second["prompt_tokens"] == 0
    assert case.run("--overwrite", *cached, "--timings", "--seed", "0") == 1
    timed = read_rows(case.out)
    assert all(row["from_cache"] and row["cached_tokens"] == 0 for row in timed[:-1])


@pytest.fixture
def replicas(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs with --replicas use several front ends on one engine; the second of them dies once."""
    with Engine(EngineConfig(model=str(model_folder), device="cpu", dtype="float32", max_seqs=4)) as engine:
        monkeypatch.setattr(
            loading,
            "make_launcher",
            lambda options, config: InProcessLauncher(engine, options.wanted, deaths={1: 1}),
        )
        yield


def test_replicas_try_and_share_a_cache(case: Case, tmp_path: Path, replicas: None) -> None:
    """Guards tries that are counted on and caches on replicas, of which one dies: the rows of one engine."""
    options = (*TRIES, "--cache", str(tmp_path / "cache"))
    assert case.run(*TRIES) == 1
    plain = case.out.read_bytes()
    for _ in range(2):
        assert case.run("--overwrite", *options, "--replicas", "2") == 1
        assert case.out.read_bytes() == plain
    assert case.figures()["rows_from_cache"] == 12
    assert case.run("--resume", "--retry-errors", *options) == 1
    alone = case.out.read_bytes()
    case.out.write_bytes(plain)
    assert case.run("--resume", "--retry-errors", *options, "--replicas", "2") == 1
    assert case.out.read_bytes() == alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tries", "2"], "--tries and --tell-error need --validate"),
        (["--validate", "regex=a", "--tell-error"], "--tell-error needs --tries"),
        (["--validate", "schema.json"], "is no check; give json-schema=FILE"),
        (["--validate", "regex=a", "--validate-timeout", "0"], "--validate-timeout"),
        (["--cache", "{here}"], "Cannot use"),
        (["--cache", "{cache}", "--cache-size", "50%"], "is an amount such as 4GiB"),
        (["--cache", "{cache}", "--ray", "auto"], "--cache is a folder of this machine"),
    ],
)
def test_options_that_cannot_be_met_are_refused_before_a_model_is_loaded(
    case: Case,
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Guards exit code 2, at once."""
    monkeypatch.setattr("cbatch.cli.run.command.open_engine", SimpleNamespace)
    names = {"here": str(case.source), "cache": str(tmp_path / "cache")}
    made = [option.format(**names) if option.startswith("{") else option for option in options]
    files = [str(case.source), "-o", str(case.out)]
    assert run_command(["run", *files, "-m", str(case.model), *made]) == 2
    assert message in capfd.readouterr().err
