"""`cbatch run --journal-tokens` and `--continue-truncated` from the outside: unfinished answers go on."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.command import Command
from tests.support.faults import slow_steps
from tests.support.in_process_replicas import InProcessLauncher
from tests.support.rows import parse_rows, without_check

pytestmark = pytest.mark.usefixtures("rows_written")

LONG = {"max_tokens": 200, "ignore_eos": True, "temperature": 1.0}
ROWS: list[Any] = [{"prompt": f"long {number}", **LONG} for number in range(3)]
ROWS += [{"prompt": f"short {number}", "max_tokens": 2} for number in range(15)] + ["{bad"]
JOURNAL = ("--journal-tokens", "--journal-interval", "0.01")


def break_off(command: Command) -> None:
    """Ends at the bad row at the end, when the long ones are still there."""
    with slow_steps():
        assert command(*JOURNAL, "--max-seqs", "4", "--window", "4", "--max-errors", "1") == 3


def tokens_of(command: Command) -> Path:
    return command.out.with_name(command.out.name + ".tokens")


@pytest.mark.parametrize(("name", "options"), [("out.jsonl", JOURNAL), ("out.csv", ())])
def test_unfinished_answers_go_on(command: Command, whole: bytes, name: str, options: tuple[str, ...]) -> None:
    """Guards a run that was broken off: --resume goes on in the middle, also without journaling itself."""
    command.out = command.folder / name
    break_off(command)
    first = command.figures()
    assert tokens_of(command).exists() and first["rows"] == 16
    assert command("--resume", *options) == 1 and not tokens_of(command).exists()
    if name == "out.jsonl":
        assert command.data == whole
    else:
        texts = [row["text"] or "" for row in csv.DictReader(command.out.open(newline=""))]
        assert texts == [row.get("text", "") for row in parse_rows(whole)]
    second = command.figures()
    assert second["rows_continued"] == second["rows"] == 3 and second["rows_kept"] == 16
    assert second["reused_tokens"] >= 3 * 10 and second["output_tokens"] + second["reused_tokens"] == 3 * 200
    assert ", 3 continued" in command.said()


def test_a_run_without_finished_rows_goes_on(command: Command, whole: bytes) -> None:
    """Guards the longest answers: there may be tokens and no output file yet."""
    break_off(command)
    command.out.unlink()
    assert command("--resume", *JOURNAL) == 1 and command.data == whole
    assert command.figures()["rows_continued"] == 3


def test_tokens_are_not_dropped_unasked(command: Command) -> None:
    """Guards hours of work against a command without --resume, and a new run against old tokens."""
    break_off(command)
    command.out.unlink()
    before = tokens_of(command).read_bytes()
    assert command() == 2 and tokens_of(command).read_bytes() == before
    assert "has unfinished answers of an earlier run; --resume continues it, --overwrite" in command.said()
    assert command("--overwrite") == 1 and command.figures()["rows_continued"] == 0 and not tokens_of(command).exists()


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


def comparable(command: Command) -> list[Any]:
    """The rows, as bytes; those with log-probabilities, whose last place may differ on this path, without these."""
    lines: list[Any] = command.lines()
    for number, line in enumerate(lines):
        if "logprobs" in (row := json.loads(line)):
            lines[number] = without_check(row) | {"logprobs": [one["token"] for one in row["logprobs"]["content"]]}
    return lines


class Truncated(NamedTuple):
    """Outputs for TRUNCATED, with the smaller limit and with the larger one, and the tokens of the latter."""

    short: bytes
    whole: list[Any]
    total: int


@pytest.fixture(scope="module")
def truncated(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Truncated:
    command = Command(tmp_path_factory.mktemp("truncated"), model_folder, TRUNCATED)
    assert command("--max-tokens", "6", "--token-ids") == 1
    short = command.data
    assert command("--max-tokens", "40", "--token-ids", "--overwrite") == 1
    return Truncated(short, comparable(command), command.figures()["output_tokens"])


@pytest.fixture
def short(command: Command, truncated: Truncated) -> Command:
    """The command, after a run with the smaller limit."""
    command.write(TRUNCATED)
    command.out.write_bytes(truncated.short)
    return command


CONTINUED = ("--resume", "--continue-truncated", "--token-ids")


def test_truncated_answers_go_on(short: Command, truncated: Truncated) -> None:
    """Guards --continue-truncated: the bytes of a run that had the larger limit; only what is missing is generated."""
    ended = [row["index"] for row in short.rows()[:12] if row["finish_reason"] == "length"]
    assert 0 < len(ended) < 12, "rows of both kinds"
    assert short(*CONTINUED, "--max-tokens", "40") == 1 and comparable(short) == truncated.whole
    stats = short.figures()
    assert stats["rows_continued"] >= len(ended) + 2 and stats["rows_kept"] >= 12 - len(ended) + 2
    assert stats["output_tokens"] <= truncated.total - 6 * stats["rows_continued"]
    assert "that --max-tokens ended go on; " in short.said()
    assert short(*CONTINUED, "--max-tokens", "40") == 1
    assert short.counts()[1] == 0 and comparable(short) == truncated.whole


def test_answers_without_token_ids_begin_anew(command: Command) -> None:
    """Guards exactness: a text does not tell its tokens. Rows that ended by themselves stay."""
    command.write(TRUNCATED)
    assert command("--max-tokens", "40") == 1
    whole = comparable(command)
    assert command("--max-tokens", "6", "--overwrite") == 1
    assert command("--resume", "--max-tokens", "40") == 2, "without the option, all rows differ"
    assert "--continue-truncated goes on with what 6 tokens cut off; --recompute" in command.said()
    assert command("--resume", "--continue-truncated", "--max-tokens", "40") == 1
    assert comparable(command) == whole and command.figures()["rows_continued"] == 0 and command.counts()[0] >= 3
    assert "of a run with fewer --max-tokens begin anew" in command.said()


def test_other_changes_are_still_refused(short: Command, truncated: Truncated) -> None:
    """Guards keys: only a larger limit is taken over, not another temperature, seed or input, nor a smaller limit."""
    for other in (["--max-tokens", "40", "--seed", "1"], ["--max-tokens", "4"], ["--max-tokens", "40", "--top-k", "3"]):
        assert short(*CONTINUED, *other) == 2 and "other sampling parameters" in short.said()
    short.write([{"prompt": "changed"}, *TRUNCATED[1:]])
    assert short(*CONTINUED, "--max-tokens", "40") == 2 and "another input" in short.said()
    assert short.data == truncated.short


def test_truncated_answers_go_on_on_replicas(
    short: Command, truncated: Truncated, launchers: list[InProcessLauncher]
) -> None:
    """Guards lines that bring tokens to another process, and keys that it makes with other limits."""
    assert short(*CONTINUED, "--max-tokens", "40", "--replicas", "2") == 1
    assert comparable(short) == truncated.whole and short.figures()["rows_continued"] > 3
