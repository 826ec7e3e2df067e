"""Prompts of `cbatch run` that are not what was meant: forms of files, templates, empty cells, prompts that are cut."""

from __future__ import annotations

import gzip
from pathlib import Path

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
        ("a.txt", b"one\n{two}\n", "text, one prompt a line (--format jsonl"),
        ("a.txt.gz", gzip.compress(b"\xef\xbb\xbfone\r\n{two}"), "text, one prompt a line (--format jsonl"),
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
