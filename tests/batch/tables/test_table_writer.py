"""Tables of results: their columns, and how they are written and resumed."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.base.errors import ConfigError, Interrupted
from cbatch.batch.forms import Compression, OutputForm
from cbatch.batch.journal import Journal
from cbatch.batch.lines import Line
from cbatch.batch.resume import Resuming
from cbatch.batch.row import Row, format_result
from cbatch.batch.tables.columns import ALWAYS, free_names, split_result
from cbatch.batch.tables.table_writer import TableWriter, journal_of, open_results, write_results

KEY = "0123456789abcdef" * 2
ROW = {
    "index": 3,
    "id": "a",
    "text": "Paris",
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
    "key": KEY,
    "extra": {"text": "Where?", "city": "x", "check": "mine"},
    "check": "01234567",
}
FAILED = {"index": 3, "id": None, "error": {"code": "invalid_row", "message": "why"}, "key": KEY}


def test_an_answer_keeps_its_names() -> None:
    """Guards the rule for two columns of one name: the answer has it, and the input's gets the next that is free."""
    assert free_names(["text", "city"], ALWAYS) == {"text": "input_text", "city": "city"}
    assert free_names(["input_text", "text", "input_text_2"], ALWAYS) == {
        "input_text": "input_text",
        "text": "input_text_3",
        "input_text_2": "input_text_2",
    }


def test_a_row_as_columns() -> None:
    """Guards what a table says of a row, an error row and an OpenAI result: all have the same columns."""
    answer, columns = split_result(ROW)
    assert answer["text"] == "Paris" and answer["total_tokens"] == 3 and columns == ROW["extra"]
    failed, _ = split_result(FAILED)
    assert failed["error_code"] == "invalid_row" and failed["error_message"] == "why" and failed["text"] is None
    message = {"index": 0, "message": {"role": "assistant", "content": "Paris"}, "finish_reason": "stop"}
    body = {"choices": [message], "usage": ROW["usage"]}
    line = {"id": "batch_req_1", "custom_id": "a", "response": {"body": body}, "error": None, "index": 3, "key": KEY}
    assert split_result(line)[0] == answer | {"check": None}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Paris"}]}
    usage = {"input_tokens": 2, "output_tokens": 1, "total_tokens": 3, "output_tokens_details": {"reasoning_tokens": 0}}
    body = {"object": "response", "status": "completed", "output": [said], "usage": usage}
    assert split_result(line | {"response": {"body": body}})[0] == answer | {"check": None}
    assert set(answer) == set(failed) == set(ALWAYS)


KEYS = [f"{number:032x}" for number in range(9)]


def row(index: int, *, error: bool = False, **extra: Any) -> Row:
    fields: dict[str, Any] = {"index": index, "id": None}
    fields |= {"error": {"code": "c", "message": "m"}} if error else {"text": f"t{index}", "finish_reason": "stop"}
    return Row(index, index, format_result(fields | {"key": KEYS[index], "extra": extra}))


def keyed(lines: Iterable[Line]) -> Iterator[tuple[Line, str]]:
    return ((line, KEYS[line.index]) for line in lines)


def lines(count: int) -> Iterator[Line]:
    return iter([Line(index, b"") for index in range(count)])


def write(path: Path, rows: list[Row], form: OutputForm = "csv", kind: Compression | None = None) -> str:
    """A whole run. Returns its note."""
    with TableWriter(path, form, kind) as writer:
        writer.start()
        writer.write(rows)
        writer.finish(lambda: None)
        return writer.note


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_bytes().decode(), newline="")))


ROWS = [row(1, city="x,\r\n", n=1.0), row(0, city='"', text="mine"), row(2, tags=["a"], flag=True)]


def test_a_table_in_the_order_of_the_input(tmp_path: Path) -> None:
    """Guards order, quotes, line ends in values, names that are taken, and columns that only some rows have."""
    assert write(tmp_path / "out.csv", ROWS) == ""
    first, second, third = read(tmp_path / "out.csv")
    own, usage = "index city input_text n tags flag text finish_reason", "prompt_tokens completion_tokens total_tokens"
    assert list(first) == f"{own} {usage} error_code error_message key check rest".split()
    assert (first["city"], first["input_text"], first["text"], first["key"]) == ('"', "mine", "t0", KEYS[0])
    assert (second["city"], second["n"], second["tags"]) == ("x,\r\n", "1.0", "")
    assert (third["tags"], third["flag"]) == ('["a"]', "true")
    assert (tmp_path / "out.csv").read_bytes().count(b"\r") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


@pytest.mark.parametrize(
    ("name", "form", "kind"), [("o.tsv", "tsv", None), ("o.csv.gz", "csv", "gz"), ("o.gz", "jsonl", "gz")]
)
def test_other_forms(tmp_path: Path, name: str, form: OutputForm, kind: Compression | None) -> None:
    """Guards tabs and compression; the rows of JSON Lines are those of the journal."""
    write(tmp_path / name, ROWS, form, kind)
    data = (tmp_path / name).read_bytes()
    text = (gzip.decompress(data) if kind else data).decode()
    if form == "jsonl":
        assert text.encode() == b"".join(one.data for one in sorted(ROWS, key=lambda one: one.index))
    else:
        found = list(csv.DictReader(io.StringIO(text), delimiter="\t" if form == "tsv" else ","))
        assert [one["text"] for one in found] == ["t0", "t1", "t2"]
    with TableWriter(tmp_path / name, form, kind) as writer:
        assert list(writer.journal().indices) == [0, 1, 2]


def test_an_interrupted_run_leaves_its_journal(tmp_path: Path) -> None:
    """Guards a run that is stopped while it makes the table: the old table stays, and the journal is continued."""
    path = tmp_path / "out.csv"
    path.write_text("old")
    path.chmod(0o640)

    def interrupt() -> None:
        raise Interrupted(2)

    with TableWriter(path, "csv") as writer:
        writer.start()
        writer.write(ROWS[:2])
        with pytest.raises(Interrupted):
            writer.finish(interrupt)
        assert "out.csv.journal.jsonl; --resume continues" in writer.resume_hint
    assert path.read_text() == "old" and {one.name for one in tmp_path.iterdir()} == {"out.csv", journal_of(path).name}
    with TableWriter(path, "csv") as writer:
        with pytest.raises(ConfigError, match=r"out.csv.journal.jsonl exists and is not empty; --resume continues it"):
            writer.check_empty()
        plan = writer.resume(writer.journal(), lines(3), keyed)
        assert plan.rows == 2 and 2 not in plan
        writer.write(ROWS[2:])
        writer.finish(lambda: None)
    assert len(read(path)) == 3 and path.stat().st_mode & 0o777 == 0o640 and not journal_of(path).exists()


def test_a_damaged_row_is_noticed(tmp_path: Path) -> None:
    """Guards the journal of a table, and finished files of compressed JSON Lines, against bytes that have changed."""
    path = tmp_path / "out.jsonl.gz"
    write(path, ROWS, "jsonl", "gz")
    data = gzip.decompress(path.read_bytes()).replace(b"mine", b"mice")
    path.write_bytes(gzip.compress(data))
    with TableWriter(path, "jsonl", "gz") as writer, pytest.raises(ConfigError, match=r"gz has 1 damaged line \(first"):
        writer.resume(writer.journal(), lines(3), keyed)
    journal_of(path).write_bytes(data)
    with TableWriter(path, "jsonl", "gz") as writer:
        with pytest.raises(ConfigError, match=r"journal.jsonl has 1 damaged line .*--recompute-changed removes"):
            writer.resume(writer.journal(), lines(3), keyed)
        plan = writer.resume(writer.journal(), lines(3), keyed, Resuming(recompute_changed=True))
        assert plan.rows == 2 and 0 not in plan
        writer.write(ROWS[1:2])
        writer.finish(lambda: None)
    assert gzip.decompress(path.read_bytes()) == data.replace(b"mice", b"mine")


def test_a_finished_table_goes_on(tmp_path: Path) -> None:
    """Guards --resume of a finished table: error rows, new lines and changed keys run, and the rest is as it was."""
    path = tmp_path / "out.csv"
    write(path, [ROWS[1], row(1, error=True)])
    with TableWriter(path, "csv") as writer:
        with pytest.raises(ConfigError, match=r"out.csv exists and is not empty"):
            writer.check_empty()
        assert list(writer.resume(writer.journal(), lines(2), keyed).kept) == [1, 1]
        writer.finish(lambda: None)
    assert not journal_of(path).exists()
    with TableWriter(path, "csv") as writer:
        assert list(writer.resume(writer.journal(), lines(3), keyed, Resuming(retry_errors=True)).kept) == [1]
        assert journal_of(path).read_bytes().startswith(ROWS[1].data)
        with pytest.raises(ConfigError, match="Another run is writing"):
            TableWriter(path, "csv")
        writer.write([ROWS[0], ROWS[2]])
        writer.finish(lambda: None)
    whole = path.read_bytes()
    assert not journal_of(path).exists() and write(tmp_path / "b.csv", ROWS) == ""
    assert whole == (tmp_path / "b.csv").read_bytes()
    with TableWriter(path, "csv") as writer:
        with pytest.raises(ConfigError, match=r"out.csv holds rows that do not fit .*--recompute-changed runs changed"):
            writer.resume(writer.journal(), lines(2), keyed)
        assert path.read_bytes() == whole and not journal_of(path).read_bytes()
        assert writer.resume(writer.journal(), lines(2), keyed, Resuming(recompute_changed=True)).rows == 2
        writer.finish(lambda: None)
    assert len(read(path)) == 2


def test_a_table_of_an_older_version_goes_on(tmp_path: Path) -> None:
    """Guards tables without a check: their rows are kept as they stand, and get one."""
    path = tmp_path / "out.csv"
    write(path, ROWS[:2])
    rows = read(path)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(
            file, [name for name in rows[0] if name not in ("check", "rest")], extrasaction="ignore"
        )
        writer.writeheader()
        writer.writerows(rows)
    with TableWriter(path, "csv") as output:
        assert output.resume(output.journal(), lines(3), keyed).rows == 2
        output.write(ROWS[2:])
        output.finish(lambda: None)
    assert [one | {"check": "", "rest": ""} for one in read(path)[:2]] == [
        one | {"check": "", "rest": "", "tags": "", "flag": ""} for one in rows
    ]
    with open_results(path, "csv") as file:
        assert not Journal.read(file, "").damaged


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
NAMES = st.sampled_from(["a", "A", "Key", "text", "input_text", "input_text_2", "key", "rest", "1"])
ANSWERS = st.dictionaries(NAMES, VALUES, max_size=2).map(json.dumps)
CHOICES = st.lists(st.fixed_dictionaries({"text": VALUES}), max_size=2)
RESULTS = st.fixed_dictionaries(
    {"id": st.none() | st.integers() | st.text(max_size=3), "text": st.none() | st.text(max_size=5) | ANSWERS},
    optional={
        "stop_reason": st.text(max_size=3),
        "choices": CHOICES,
        "strange": VALUES,
        "extra": st.dictionaries(NAMES, VALUES, max_size=3),
    },
)


@pytest.mark.parametrize("form", ["csv", "json", "parquet", "xlsx", "sqlite"])
@given(results=st.lists(RESULTS, min_size=1, max_size=4), error=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_table_gives_its_rows_back(form: OutputForm, results: list[dict[str, Any]], error: bool) -> None:
    """Guards verify, --resume and convert of tables: whatever stands in rows, their bytes come back."""
    if form in ("parquet", "xlsx"):
        package = "pyarrow" if form == "parquet" else "openpyxl"
        pytest.importorskip(package, reason=f"this form needs {package}")
    usage = {"prompt_tokens": 2, "total_tokens": 3}
    rows = [
        format_result({"index": number, **result, "usage": usage, "key": KEYS[number]})
        for number, result in enumerate(results)
    ]
    rows += [row(len(rows), error=True).data] * error
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "out")
        with path.open("wb+") as file:
            write_results(file, form, None, lambda: iter(rows), {}, expand=())
        with open_results(path, form) as found:
            assert list(found) == rows
        if form == "csv" and isinstance(results[0]["text"], str) and "\0" not in str(results):
            data = path.read_bytes()
            path.write_bytes(data.replace(KEYS[0].encode() + b",", KEYS[1].encode() + b","))
            with open_results(path, form) as found:
                assert list(Journal.read(found, "").damaged) == [0]
