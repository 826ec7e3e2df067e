"""`cbatch run --validate --tries --cache` from the outside: exit codes, resuming, figures, replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.command import Command
from tests.support.in_process_replicas import InProcessLauncher

pytestmark = pytest.mark.usefixtures("rows_written")

ROWS: list[Any] = [
    {"id": f"r{number}", "prompt": f"row {number}", "temperature": 1.0, "max_tokens": 4} for number in range(12)
] + ["{bad"]
TRIES = ("--validate", "regex=(?s).*[aeiou].*", "--tries", "3")


@pytest.fixture(scope="module")
def whole(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """A run to the end, with tries."""
    command = Command(tmp_path_factory.mktemp("whole"), model_folder, ROWS)
    assert command(*TRIES) == 1
    return command


def test_resuming_loses_no_try(command: Command, whole: Command) -> None:
    """Guards a run that was cut off, and other checks: the same bytes, or a refusal that names the option."""
    stats = whole.figures()
    done = [row for row in whole.rows() if "validation" in row]
    assert stats["rows_validated"] == len(done) == 12
    assert stats["tries"] == sum(row["validation"]["tries"] for row in done) > 12
    assert stats["error_codes"]["invalid_json"] == 1
    assert stats["error_codes"].get("invalid_answer", 0) == sum(not row["validation"]["valid"] for row in done)
    lines = whole.lines()
    for keep in (0, 5):
        command.out.write_bytes(b"".join(reversed(lines[len(lines) - keep :])) + lines[0][:30])
        assert command("--resume", "--max-seqs", "2", *TRIES) == 1
        assert command.data == whole.data and command.counts()[0] == keep
    assert "further tries" in command.said()
    assert command("--resume") == 1 and command.counts() == (len(lines), 0)
    for other in (("--tries", "1"), ("--tries", "4"), ("--validate", "regex=(?s).*")):
        assert command("--resume", *other) == 2
        assert "--validate, --tries" in command.said() and command.data == whole.data


def test_retry_errors_tries_further_seeds(command: Command) -> None:
    """Guards --retry-errors: rows that never were good get new tries, as many as --tries says, and the others stay."""
    check = ("--validate", "regex=(?s).*[aeiouy].*")
    assert command(*check) == 1
    before = command.rows()
    bad = [row["index"] for row in before if row.get("error", {}).get("code") == "invalid_answer"]
    assert 2 <= len(bad) < 12
    assert command(*check, "--resume", "--retry-errors") == 1
    assert command.counts()[1] == len(bad) + 1 and command.figures()["tries"] == len(bad), (
        "those of the first run do not count"
    )
    after = command.rows()
    assert [row for row in after if row["index"] not in bad] == [row for row in before if row["index"] not in bad]
    assert all(after[index]["validation"]["tries"] == 2 for index in bad)
    assert any("error" not in after[index] for index in bad), "another seed gives another answer"
    assert command(*check, "--overwrite", "--tries", "2") == 1
    assert [row.get("text") for row in command.rows()] == [row.get("text") for row in after]


def test_a_second_run_takes_all_from_the_cache(command: Command, whole: Command, tmp_path: Path) -> None:
    """Guards --cache: the same bytes without computing; ids and columns do not matter; only --timings shows it."""
    cached = (*TRIES, "--cache", str(tmp_path / "cache"))
    assert command(*cached) == 1 and command.data == whole.data
    first = command.figures()
    assert command("--overwrite", *cached) == 1 and command.data == whole.data
    second = command.figures()
    assert (first["rows_from_cache"], first["reused_tokens"]) == (0, 0)
    assert (second["rows_from_cache"], second["output_tokens"], second["steps"]) == (12, 0, 0)
    assert second["reused_tokens"] == first["output_tokens"] > 0 and second["prompt_tokens"] == 0
    assert command("--overwrite", *cached, "--timings", "--seed", "0") == 1
    assert all(row["from_cache"] and row["cached_tokens"] == 0 for row in command.rows()[:-1])


def test_replicas_try_and_share_a_cache(
    command: Command, whole: Command, tmp_path: Path, launchers: list[InProcessLauncher]
) -> None:
    """Guards tries that are counted on and caches on replicas, of which one dies: the rows of one engine."""
    options = (*TRIES, "--cache", str(tmp_path / "cache"))
    for _ in range(2):
        assert command("--overwrite", *options, "--replicas", "2") == 1 and command.data == whole.data
    assert command.figures()["rows_from_cache"] == 12
    assert command("--resume", "--retry-errors", *options) == 1
    alone = command.data
    command.out.write_bytes(whole.data)
    assert command("--resume", "--retry-errors", *options, "--replicas", "2") == 1 and command.data == alone
