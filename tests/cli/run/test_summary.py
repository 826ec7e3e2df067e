"""The summary and figures of `cbatch run`: what is not whole, tries, times, the cache, the order of a template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.command import Command

ROWS: list[Any] = [{"prompt": f"row {number}", "ignore_eos": True} for number in range(24)]


def test_a_row_is_cut_off_if_one_of_its_outputs_is(command: Command) -> None:
    """Guards n > 1 against a first output that hides that another one was cut off; `text` stays the first."""
    row = {"prompt": "a", "n": 8, "temperature": 1.0, "max_tokens": 6, "stop": ["e", "a", "t", "i"]}
    rows = [row | {"seed": seed} for seed in range(8)]
    openai = {"custom_id": "a", "url": "/v1/completions", "body": row}
    assert command.answer([*rows, openai])[0] == 0
    reasons = set[tuple[str, bool]]()
    for row in command.rows()[:8]:
        ended = [choice["finish_reason"] for choice in row["choices"]]
        assert row["finish_reason"] == ("length" if "length" in ended else ended[0])
        assert row["text"] == row["choices"][0]["text"]
        reasons.add((ended[0], "length" in ended))
    assert ("stop", True) in reasons, "no row tells the difference"
    whole = sum("length" not in {one["finish_reason"] for one in row["choices"]} for row in command.rows()[:8])
    assert command.figures()["truncated"] >= 8 - whole


def test_max_truncated_stops_at_that_row(command: Command) -> None:
    """Guards --max-truncated: exit 3 with exactly N rows that were cut off, beside others; --resume continues."""
    command.write([*ROWS[:9], "{bad", {"prompt": "a", "regex": "x"}])
    for number in (1, 4):
        assert command("--overwrite", "--max-tokens", "3", "--max-truncated", number) == 3
        assert sum(row.get("finish_reason") == "length" for row in command.rows()) == number
        assert f"Stopped at truncated row {number}, as --max-truncated says." in command.said()
    assert command("--resume", "--max-tokens", "3", "--max-truncated", "9") == 1 and len(command.lines()) == 11


def test_tries_that_could_not_differ(command: Command) -> None:
    """Guards --tries at temperature 0, told at the start and the end; and answers that were cut off before valid."""
    command.write([*ROWS[:3], {"prompt": "a", "temperature": 1.0, "regex": "x"}])
    tries = ("--validate", "regex=[0-9]+", "--tries", "2", "--max-tokens", "2", "--overwrite")
    start = "a row at temperature 0 has one try"
    assert command(*tries) == 1
    said, figures = command.said(), command.figures()
    assert said.index(start) < said.index("4 failed")
    assert "invalid_answer 4, 3 of them cut off at max_tokens, 3 not tried again at temperature 0" in said
    assert (figures["invalid_truncated"], figures["not_retried"], figures["tries"]) == (3, 3, 5)
    for other in (("--temperature", "1"), ("--tell-error",)):
        assert command(*tries, *other) == 1 and start not in command.said()
        assert command.figures()["not_retried"] == 0


def test_times_begin_in_a_slot(command: Command) -> None:
    """Guards ttft_s against the wait of rows that were read ahead, in figures and in rows."""
    code, rows = command.answer(ROWS, "--max-seqs", "1", "--max-tokens", "40", "--timings")
    figures = command.figures()
    assert code == 0 and 0 < figures["ttft_s"]["p99"] < figures["elapsed_s"] / 4
    assert sum(row["elapsed_s"] for row in rows) <= figures["elapsed_s"] * 1.05
    assert all(0 < row["ttft_s"] < row["elapsed_s"] for row in rows)


def test_nothing_limits_a_run_from_the_cache(command: Command, tmp_path: Path) -> None:
    """Guards the last line against an engine that had nothing to do: all came from the cache, or was an error."""
    arguments = ("--cache", str(tmp_path / "cache"), "--max-tokens", "3")
    for is_told in (True, False):
        assert command.answer(ROWS[:3], *arguments)[0] == 0
        said = command.said()
        assert ("limited by" in said) == is_told and ("3 from the cache" in said) != is_told
    assert command.answer(["{bad"], *arguments)[0] == 1 and "limited by" not in command.said()


CONSTANT = "Answer in one word. " * 12


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{text}" + CONSTANT, True),
        ("{text} {text}", False),
        (CONSTANT + "{text}", False),
        ("{% if text %}{{ text }}{% endif %}" + CONSTANT, True),
        (CONSTANT + "{{ text }}", False),
    ],
)
def test_constant_text_behind_a_column_is_told(command: Command, template: str, told: bool) -> None:
    """Guards prompts that could share their beginning: told once, by what the template says, if little was cached."""
    command.source = command.folder / "in.csv"
    command.source.write_text("text\n" + "".join(f"{n} is a number\n" for n in range(6)))
    file = command.folder / ("t.j2" if "{%" in template or "{{" in template else "t.txt")
    file.write_text(template)
    base = ("--template", f"@{file}", "--max-tokens", "1", "--raw", "--max-seqs", "1")
    assert command(*base) == 0
    advice = f"{len(CONSTANT):,} characters that all prompts have stand behind a column"
    assert command.said().count(advice) == told
    assert command(*base, "--overwrite", "--no-prefix-cache") == 0 and advice not in command.said()
