"""`cbatch verify --offline`: what a file tells without a model."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cbatch.batch.row import format_result, format_row
from cbatch.cli.main import run_command


class Found(NamedTuple):
    code: int
    report: dict[str, Any]
    sentences: str


Verify = Callable[..., Found]


def row_of(index: int, **more: Any) -> dict[str, Any]:
    return {"index": index, "id": None, "text": f"answer {index}", "key": f"{index:032x}"} | more


ROWS = [format_result(row_of(index)) for index in range(6)]


@pytest.fixture
def verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Verify:
    def call(content: bytes, *arguments: str, name: str = "out.jsonl") -> Found:
        (tmp_path / name).write_bytes(content)
        code = run_command(["verify", str(tmp_path / name), "--offline", *arguments])
        printed = capsys.readouterr()
        return Found(code, json.loads(printed.out or "{}"), printed.err.replace(str(tmp_path / name), name))

    return call


@pytest.fixture
def prompts(tmp_path: Path) -> list[str]:
    """The option for an input of six lines, of which the fifth is blank."""
    (tmp_path / "in.jsonl").write_text("".join('{"prompt": "a"}\n' if n != 4 else "\n" for n in range(6)))
    return ["--prompts", str(tmp_path / "in.jsonl")]


def test_a_whole_file(verify: Verify, prompts: list[str]) -> None:
    """Guards exit code 0: finished files, compressed ones, and those that a run is writing."""
    five = b"".join(ROWS[:4]) + ROWS[5]
    nothing = {"damaged": 0, "doubled": 0, "missing": 0, "superfluous": 0, "torn_bytes": 0, "without_check": 0}
    for content in (five, gzip.compress(five), b"".join(reversed(five.splitlines(keepends=True)))):
        found = verify(content, *prompts)
        assert found.code == 0 and found.report.items() >= ({"rows": 5, "errors": 0} | nothing).items()
        assert found.sentences == "cbatch: out.jsonl: 5 rows; nothing is damaged\n"
    growing = verify(ROWS[1] + ROWS[3] + ROWS[2][:20])
    assert (growing.code, growing.report["torn_bytes"], growing.report["missing"]) == (0, 20, None)
    assert growing.report["missing_lines"] == [[1, 1], [3, 3]]
    assert "no row for lines 1, 3, unless they are blank" in growing.sentences
    assert verify(five, "-q").sentences == ""


def test_everything_that_is_wrong_is_told(verify: Verify, prompts: list[str]) -> None:
    """Guards damaged, doubled, missing and superfluous rows, with their lines."""
    failed = format_result(row_of(3, error={"code": "nan_logits", "message": "m"}))
    changed = ROWS[1].replace(b"answer", b"anewer")
    found = verify(ROWS[3] + ROWS[0] + changed + b"notes\n" + failed + ROWS[4] + format_result(row_of(9)), *prompts)
    assert found.code == 1
    counts = {"rows": 4, "errors": 1, "damaged": 2, "doubled": 1, "missing": 3, "superfluous": 2}
    assert found.report.items() >= counts.items()
    assert found.report["damaged_lines"] == [
        {"line": 3, "reason": "not as it was written: its check does not fit"},
        {"line": 4, "reason": "not valid JSON"},
    ]
    assert found.report["doubled_lines"] == [{"line": 1, "index": 3}]
    assert found.report["missing_lines"] == [[2, 3], [6, 6]]
    assert found.report["superfluous_lines"] == [[5, 5], [10, 10]]
    for sentence in (
        "1 row is replaced by later ones (first: line 1 of out.jsonl)",
        "line 3 of out.jsonl is damaged: it is not as it was written: its check does not fit",
        "no row for lines 2-3, 6\n",
        "rows for lines 5, 10, which the input does not have",
        "out.jsonl: 4 rows, 1 of them an error; 2 damaged lines, 3 missing, 2 superfluous",
    ):
        assert sentence in found.sentences


def test_rows_of_older_versions_are_told(verify: Verify) -> None:
    """Guards against saying that rows are whole that nobody can tell of."""
    found = verify(format_row(row_of(0)) + ROWS[1])
    assert (found.code, found.report["without_check"]) == (0, 1)
    assert "1 row was written by an older version, without a check" in found.sentences


@pytest.mark.parametrize(
    ("content", "arguments", "sentence"),
    [
        (b"", ["--offline"], "has no rows"),
        (b'{"a": 1}\n', ["--offline"], "is not a file of output rows"),
        (ROWS[0], [], "Give the input of the run that made OUT as --prompts IN; or --offline"),
    ],
)
def test_what_cannot_be_told(
    tmp_path: Path, content: bytes, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards exit code 2 for files of others, empty ones, and a command that says too little."""
    (tmp_path / "out.jsonl").write_bytes(content)
    assert run_command(["verify", str(tmp_path / "out.jsonl"), *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_no_model_library_is_imported(tmp_path: Path) -> None:
    """Guards the start: a file is checked at once, on machines without torch, too."""
    (tmp_path / "out.jsonl").write_bytes(ROWS[0])
    heavy = "'torch', 'transformers', 'tokenizers', 'numba'"
    code = (
        "import sys; from cbatch.cli.main import run_command; code = run_command(sys.argv[1:]); "
        f"sys.exit(code or bool({{{heavy}}} & {{*sys.modules}}))"
    )
    out = str(tmp_path / "out.jsonl")
    arguments = ["verify", out, "--offline", "--prompts", out]
    assert subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True).returncode == 0
