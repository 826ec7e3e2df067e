"""`cbatch run` on a model folder: an input, an output, and the command between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cbatch.cli.main import run_command
from tests.support.rows import read_rows


class Command:
    """Runs in this process, or tells another one with `words` to run.

    options: those of every run
    printed: what tells what runs in this process print
    """

    printed: pytest.CaptureFixture[str]

    def __init__(self, folder: Path, model: Path, rows: list[Any] | None = None) -> None:
        self.folder, self.model = folder, model
        self.source, self.out, self.stats = folder / "in.jsonl", folder / "out.jsonl", folder / "stats.json"
        self.options: tuple[object, ...] = ("--dtype", "float32")
        self.write(rows or [])

    def write(self, rows: list[Any]) -> None:
        """Writes the input; text is a line as it is."""
        lines = (row.removesuffix("\n") if isinstance(row, str) else json.dumps(row) for row in rows)
        self.source.write_text("".join(line + "\n" for line in lines))

    def words(self, *arguments: object) -> list[str]:
        files = [self.source, "-o", self.out, "--stats", self.stats, "-m", self.model]
        return ["run", *map(str, [*files, *self.options, *arguments])]

    def __call__(self, *arguments: object) -> int:
        return run_command(self.words(*arguments))

    def answer(self, rows: list[Any], *arguments: object) -> tuple[int, list[dict[str, Any]]]:
        """The exit code for these rows, and the rows of the output."""
        self.write(rows)
        code = self("--overwrite", *arguments)
        return code, self.rows() if self.out.exists() else []

    def said(self) -> str:
        """All that was written to stderr since the last question."""
        return self.printed.readouterr().err

    def report(self) -> Any:
        """The JSON that was written to stdout since the last question."""
        return json.loads(self.printed.readouterr().out)

    @property
    def data(self) -> bytes:
        """The bytes of the output."""
        return self.out.read_bytes()

    def lines(self) -> list[bytes]:
        return self.data.splitlines(keepends=True)

    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.out)

    def figures(self) -> dict[str, Any]:
        """Those of the last run."""
        found: dict[str, Any] = json.loads(self.stats.read_text())
        return found

    def counts(self) -> tuple[int, int]:
        """How many rows the last run kept, and how many it ran."""
        figures = self.figures()
        return figures["rows_kept"], figures["rows"]
