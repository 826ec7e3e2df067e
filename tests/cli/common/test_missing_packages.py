"""Packages of extras that are not installed: every command says so before it loads a model."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from cbatch.cli.common.console import show_progress
from cbatch.cli.main import run_command

NO_MODEL = ["-m", "/no/such/model"]
"""What is told of this is told too late."""


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("llguidance", ["run", "{rows}", "--regex", "a+"]),
        ("llguidance", ["run", "{rows}", "--json-schema", "{{}}", "--check"]),
        ("llguidance", ["run", "{rows}", "--param", 'choice=["a", "b"]']),
        ("llguidance", ["chat", "Hi", "--regex", "a+"]),
        ("pyarrow", ["run", "{rows}", "-o", "{rows}.parquet"]),
        ("pyarrow", ["bench", "{parquet}"]),
        ("jsonschema", ["run", "{rows}", "--validate", "json-schema={{}}"]),
        ("matplotlib", ["bench", "--plot", "{rows}.pictures"]),
        ("matplotlib", ["bench", "--users", "3", "--report", "{rows}.html"]),
        ("ray", ["bench", "--ray", "auto"]),
    ],
)
def test_a_missing_package_is_told_at_the_start(
    package: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Guards runs that would load a model first, or answer every row with the same error."""
    rows, parquet = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    rows.write_text('{"prompt": "Hi"}\n')
    parquet.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, package, None)
    named = [one.format(rows=rows, parquet=parquet) for one in arguments]
    assert run_command([*named, *NO_MODEL]) == 2
    told = capsys.readouterr().err
    assert f"{package}: pip install" in told and "model" not in told


def test_rows_are_counted_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards lines of progress against “1 rows”."""
    monkeypatch.setattr("cbatch.cli.common.console.LINE_SECONDS", 0.0)
    for done, total, words in ((1, None, "1 row"), (0, 1, "0/1 row"), (1, 2000, "1/2,000 rows"), (2, None, "2 rows")):
        monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
        with show_progress(total, lambda done=done: (done, "fast"), quiet=False) as tick:  # type: ignore[misc]
            tick()
        assert stderr.getvalue() == f"cbatch: {words}, fast\n"
