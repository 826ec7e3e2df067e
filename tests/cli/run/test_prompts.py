"""Prompts of `cbatch run` that are not what was meant: forms of files, templates, empty cells, prompts that are cut."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import Command
from tests.support.rows import pipe_of


@pytest.fixture(autouse=True)
def in_folder(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(command.folder)
    command.options += ("--max-tokens", "2", "--echo-prompt", "--overwrite")


def prompts(command: Command) -> list[str]:
    """The prompts of the last run, as the model got them."""
    return [row["prompt_text"] for row in command.rows()]


@pytest.mark.parametrize(
    ("name", "content", "form"),
    [
        ("a.txt", b"one\n{two}\n", "text, one prompt a line; --format"),
        ("a.txt.gz", gzip.compress(b"\xef\xbb\xbfone\r\n{two}", mtime=0), "text, one prompt a line; --format"),
        ("b.txt", b'{"prompt": "one"}\n{"prompt": "{two}"}\n', "JSON Lines, as its first line is a JSON object"),
    ],
)
def test_a_file_of_text_says_how_it_is_read(command: Command, name: str, content: bytes, form: str) -> None:
    """Guards prompts.txt against an `invalid_json` for each line, and JSON Lines under that name."""
    command.source = Path(name)
    command.source.write_bytes(content)
    assert command("--raw") == 0 and prompts(command) == ["one", "{two}"]
    assert f"cbatch: {name} is read as {form}" in command.said()
    assert command("--raw", "-q") == 0 and command.said() == ""
    assert command("--raw", "--format", "text") == 0 and len(prompts(command)) == 2
    assert "is read as" not in command.said()


def test_a_template_in_a_file(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards --template @FILE: text and Jinja without their last newline, as the same text on the command line."""
    command.source = Path("in.csv")
    command.source.write_text("text\na\nb\n")
    Path("p.txt").write_text("Say: {text}\n\n")
    Path("p.j2").write_text("Say: {{ text }}\n\n")
    for template in ("Say: {text}\n", "@p.txt", "@p.j2"):
        assert command("--raw", "--template", template) == 0 and prompts(command) == ["Say: a\n", "Say: b\n"]
    assert command("--raw", "--template", "@@{text}") == 0 and prompts(command) == ["@a", "@b"]
    assert command("--raw", "--template", "Hi", "--constant-template") == 0 and prompts(command) == ["Hi", "Hi"]
    monkeypatch.setenv("CBATCH_RUN_TEMPLATE", "{text}!")
    assert command("--raw") == 0 and prompts(command) == ["a!", "b!"]


def test_empty_columns_are_told(command: Command) -> None:
    """Guards empty cells against passing as prompts: counted with their rows, also when a pipe is read twice."""
    command.source = Path("in.csv")
    command.source.write_text('text,note\na,\n"",x\n"  ",\nb,\n')
    template = ("--raw", "--template", "Say: {text}")
    told = "2 rows have nothing in a column that the prompt uses: rows 2, 3\n"
    assert command(*template) == 0 and told in command.said()
    figures = command.figures()
    assert (figures["empty_columns"], figures["first_empty_columns"]) == (2, [1, 2])
    assert command(*template, "--check") == 0
    report = command.report()
    assert (report["empty_columns"], report["first_empty_columns"], report["bad_rows"]) == (2, [1, 2], 0)
    command.out.write_bytes(command.lines()[0])
    with pipe_of(command.source.read_bytes()) as pipe:
        command.source, command.options = Path(f"/dev/fd/{pipe.fileno()}"), command.options[:-1]
        assert command(*template, "--resume", "--format", "csv") == 0 and told in command.said()


LONG = "START" + " world" * 300 + " END"
SYSTEM = {"role": "system", "content": "<|im_end|>"}
ROWS: list[Any] = [
    {"prompt": "short"},
    {"messages": [SYSTEM, {"role": "user", "content": f"<|im_end|>{LONG}"}, {"role": "user", "content": "hello"}]},
    {"prompt": LONG, "raw": True},
    {"prompt": LONG, "truncate_prompt_tokens": 40},
    {"prompt_token_ids": [5] * 400},
    {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": LONG}]}},
    {"messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "hello"}]},
    {"prompt": "hello", "truncate_prompt_tokens": 3},
]
TOO_LONG = {6, 7}


@pytest.mark.parametrize("spec", ["left", "right", "middle:60"])
@pytest.mark.parametrize("cache", [(), ("--kv-blocks", "15")])
def test_prompts_that_are_too_long_are_cut(command: Command, spec: str, cache: tuple[str, ...]) -> None:
    """Guards --truncate-prompt: the side, the template, which stays whole, room for the answer, and what is told."""
    code, rows = command.answer(ROWS, "--truncate-prompt", spec, "--max-tokens", "20", *cache)
    assert code == 1 and {row["index"] for row in rows if (row.get("error") or {}).get("code")} == TOO_LONG
    assert all(rows[index]["error"]["code"] == "prompt_too_long" for index in TOO_LONG)
    bodies = [row["response"]["body"] if "response" in row else row for row in rows[:6]]
    dropped = [body.get("dropped_prompt_tokens", 0) for body in bodies]
    assert dropped[0] == 0 and all(dropped[1:])
    room = 60 if ":" in spec else 256 - 20
    lengths = [body["usage"]["prompt_tokens"] for body in bodies]
    assert lengths[3] <= 40 and lengths[4] == room and dropped[4] == 400 - room
    assert all(room - 3 <= lengths[index] <= room for index in (1, 2, 5))
    chat, raw = bodies[1]["prompt_text"], bodies[2]["prompt_text"]
    assert chat.startswith("<|im_start|>system\n<|im_end|><|im_end|>\n<|im_start|>user\n")
    assert chat.endswith("<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    assert ("START" in raw, raw.endswith(" END"), "[…]" in raw) == {
        "left": (False, True, False), "right": (True, False, False), "middle:60": (True, True, True),
    }[spec]  # fmt: skip
    assert ("<|im_end|>START" in chat) == (spec != "left")
    figures = command.figures()
    assert (figures["cut_prompts"], figures["dropped_prompt_tokens"]) == (5, sum(dropped))
    assert f"{sum(dropped):,} dropped from 5 prompts" in command.said()


def test_a_cut_prompt_counts_in_its_key(command: Command) -> None:
    """Guards --resume against rows of another cut, and --continue-truncated against a prompt that changes."""
    command.options = command.options[:-1]
    command.write(ROWS[:3])
    assert command("--truncate-prompt", "left") == 0
    assert command("--truncate-prompt", "left", "--resume") == 0 and command.counts() == (3, 0)
    assert command("--truncate-prompt", "right", "--resume") == 2
    resumed = ("--truncate-prompt", "left", "--resume", "--continue-truncated")
    assert command(*resumed) == 2 and "does not go with --truncate-prompt" in command.said()
    assert command("--truncate-prompt", "up", "--resume") == 2 and "left, right or middle" in command.said()


def test_the_check_tells_what_is_cut(command: Command) -> None:
    """Guards --check: prompts that would be cut are no bad rows, and are counted."""
    command.write(ROWS[:5])
    assert command("--check") == 1 and command.report()["bad_rows"] == 3
    assert command("--check", "--truncate-prompt", "middle") == 0
    report = command.report()
    assert report["cut_prompts"] == 4 and report["dropped_prompt_tokens"] > 400
