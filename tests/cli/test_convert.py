"""`cbatch convert`: results in other forms, which are still verified and resumed."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from cbatch.batch.row import format_result
from cbatch.cli.main import run_command

KEYS = [f"{number:032x}" for number in range(3)]
ROWS = [
    format_result({"index": 0, "id": "a", "text": "täxt", "finish_reason": "stop", "usage": {}, "key": KEYS[0]}),
    format_result({"index": 1, "id": 7, "error": {"code": "c", "message": "m"}, "key": KEYS[1], "extra": {"n": 1.5}}),
    format_result({"id": "b", "custom_id": "x", "response": {"body": {}}, "error": None, "index": 2, "key": KEYS[2]}),
]


@pytest.mark.parametrize("name", [f"out.{form}" for form in "csv tsv.gz json parquet xlsx db jsonl.gz".split()])
def test_there_and_back(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards rows of all kinds through each form: the same bytes come back, and verify takes what is between."""
    if name.endswith(("parquet", "xlsx")):
        package = "pyarrow" if name.endswith("parquet") else "openpyxl"
        pytest.importorskip(package, reason=f"this form needs {package}")
    source, there, back = tmp_path / "in.jsonl", tmp_path / name, tmp_path / "back.jsonl"
    source.write_bytes(b"".join(reversed(ROWS)))
    assert run_command(["convert", str(source), str(there)]) == 0
    assert capsys.readouterr().err == f"cbatch: {there}: 3 rows\n"
    assert run_command(["verify", str(there), "--offline"]) == 0
    assert run_command(["convert", str(there), str(back), "-q"]) == 0 and back.read_bytes() == b"".join(ROWS)
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", name, "back.jsonl"}


def test_what_is_not_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards files that are there, damaged rows, torn ones, unknown endings, and leftovers of what failed."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.csv"

    def convert(data: bytes, *arguments: object) -> tuple[int, str]:
        source.write_bytes(data)
        return run_command(["convert", str(source), *map(str, arguments)]), capsys.readouterr().err

    assert convert(ROWS[0] + ROWS[1][:20], out) == (
        1,
        f"cbatch: {out}: 1 row\ncbatch: {source} ends with a torn row, which is left out: "
        "a run has ended there, or is writing it\n",
    )
    before = out.read_bytes()
    assert convert(ROWS[0], out) == (2, f"cbatch: {out} exists and is not empty; --overwrite replaces it.\n")
    code, said = convert(ROWS[0] + ROWS[1].replace(b"1.5", b"1.6"), out, "--overwrite")
    assert code == 2 and "in.jsonl has 1 damaged line (first: line 2" in said and out.read_bytes() == before
    assert convert(ROWS[0], out, "--overwrite")[0] == 0 and convert(gzip.compress(ROWS[0]), tmp_path / "b.csv")[0] == 0
    (link := tmp_path / "link.jsonl").hardlink_to(source)
    assert convert(ROWS[0], link) == (2, f"cbatch: {link} is the input; choose another file for the output.\n")
    link.unlink()
    database = tmp_path / "out.db"
    assert convert(ROWS[0], database)[0] == 0
    assert run_command(["convert", f"{database}#Results", str(database), "--overwrite"]) == 2
    assert "is the input" in capsys.readouterr().err
    database.unlink()
    (tmp_path / ".out.db.cbatch-run").unlink(missing_ok=True)
    assert convert(ROWS[0], source)[0] == convert(ROWS[0], "-")[0] == convert(ROWS[0], tmp_path / "out.xml")[0] == 2
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.csv", "b.csv"}


def test_shards_are_put_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards outputs of shards, of several forms: in the order of the input; no row may be there twice."""
    parts = [tmp_path / "a.jsonl", tmp_path / "b.csv"]
    parts[0].write_bytes(ROWS[2] + ROWS[0])
    (tmp_path / "b.jsonl").write_bytes(ROWS[1])
    assert run_command(["convert", "-q", str(tmp_path / "b.jsonl"), str(parts[1])]) == 0
    assert run_command(["convert", *map(str, parts), str(tmp_path / "all.jsonl")]) == 0
    assert (tmp_path / "all.jsonl").read_bytes() == b"".join(ROWS) and ": 3 rows" in capsys.readouterr().err
    parts.append(tmp_path / "all.jsonl")
    assert run_command(["convert", *map(str, parts), str(tmp_path / "none.jsonl")]) == 2
    assert "Row 1 is in several of the files" in capsys.readouterr().err and not (tmp_path / "none.jsonl").exists()
    parts[0].write_bytes(ROWS[2] + ROWS[0][:-9])
    assert run_command(["convert", *map(str, parts[:2]), str(tmp_path / "torn.jsonl")]) == 1


@pytest.mark.parametrize("name", ["out.csv", "out.json"])
def test_properties_of_answers_stay_columns(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the columns that --expand has made, which a conversion left out without a word."""
    source, tables = tmp_path / "in.jsonl", [tmp_path / name, tmp_path / "again.csv"]
    row = {"index": 0, "id": "a", "text": '{"mood": "good"}', "finish_reason": "stop", "usage": {}, "key": KEYS[0]}
    for answer, is_expanded in (("--expand", True), ("-q", False)):
        source.write_bytes(format_result(row))
        assert run_command(["convert", str(source), str(tables[0]), answer, "--overwrite"]) == 0
        assert run_command(["convert", *map(str, tables), "--overwrite"]) == 0
        assert (",mood,finish_reason," in tables[1].read_text()) == is_expanded
    assert run_command(["convert", str(source), "out.foo"]) == 2 and "say the form (--to)" in capsys.readouterr().err
