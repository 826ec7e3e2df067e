"""`cbatch run` over tables, from the outside: columns in, columns out, kills, shards, chains."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cbatch.cli.main import run_command
from tests.support.command import Command
from tests.support.faults import wait_until
from tests.support.fork_server import ForkServer, KillPoint
from tests.support.rows import read_rows, write_rows

Run = Callable[..., int]
TEXTS = ["täxt", 'a "quote"', "two\nlines", "", "comma, x", "🎉"]


def write_csv(path: Path, rows: int) -> Path:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "text", "Stop", "label"])
        writer.writerows([f"r{n}", f"{TEXTS[n % len(TEXTS)]} {n}", "x", n] for n in range(rows))
    return path


def read_csv(path: Path) -> list[dict[str, str]]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    return list(csv.DictReader(io.StringIO(text, newline="")))


@pytest.fixture
def run(command: Command) -> Callable[..., int]:
    """Runs from an input into an output; a `template` is that of the prompts."""
    command.options += ("--max-tokens", "3", "--temperature", "1", "-q")

    def call(source: Path, out: Path, *arguments: object, template: object = "Say: {text}") -> int:
        command.source = source
        return command("--template", template, "-o", out, *arguments)

    return call


def test_a_table_beside_its_answers(run: Run, tmp_path: Path) -> None:
    """Guards CSV to CSV: columns of any names are data, in their order beside the answer, as in JSON Lines."""
    source = write_csv(tmp_path / "in.csv", 12)
    assert run(source, tmp_path / "out.csv.gz") == run(source, tmp_path / "out.jsonl") == 0
    found = read_csv(tmp_path / "out.csv.gz")
    assert list(found[0])[:6] == ["index", "id", "input_text", "Stop", "label", "text"]
    for number, (row, columns) in enumerate(zip(read_rows(tmp_path / "out.jsonl"), found, strict=True)):
        assert columns["text"] == row["text"] and columns["key"] == row["key"] and columns["index"] == str(number)
        assert columns["input_text"] == row["extra"]["text"] == f"{TEXTS[number % len(TEXTS)]} {number}"
        assert columns["id"] == f"r{number}" and columns["label"] == str(number) and "extra" not in columns


def test_the_same_rows_in_every_form(run: Run, tmp_path: Path) -> None:
    """Guards what decides an answer: not whether its row stood in CSV, a JSON array, lines, or a template file."""
    rows = [{"id": f"r{n}", "text": text} for n, text in enumerate(TEXTS)]
    template = tmp_path / "say.jinja"
    template.write_text("Say: {{ text }}\n")
    write_rows(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=2))
    with gzip.open(tmp_path / "c.csv.gz", "wt", newline="") as file:
        writer = csv.DictWriter(file, ["id", "text"])
        writer.writeheader()
        writer.writerows(rows)
    outputs = set()
    for name, made in (("a.jsonl", "Say: {text}"), ("b.json", f"@{template}"), ("c.csv.gz", "Say: {text}")):
        assert run(tmp_path / name, tmp_path / f"{name}.jsonl", template=made) == 0
        outputs.add((tmp_path / f"{name}.jsonl").read_bytes())
    assert len(outputs) == 1 and outputs.pop().count(b"\n") == 6


def test_shards_together_are_the_run(run: Run, tmp_path: Path) -> None:
    """Guards --shard, sampled and without ids: each row once, with the index and the answer of the whole run."""
    source = tmp_path / "in.csv"
    source.write_text("text\n" + "".join(f"t{n}\n" for n in range(11)))
    shards = [("--shard", f"{number}/3") for number in (1, 2, 3)]
    for number, shard in enumerate([*shards, ()]):
        assert run(source, tmp_path / f"{number}.csv", *shard, template="{text}") == 0
        assert run(source, tmp_path / f"{number}.csv", *shard, "--resume", template="{text}") == 0
    *parts, whole = (read_csv(tmp_path / f"{number}.csv") for number in range(4))
    assert sorted((row for part in parts for row in part), key=lambda row: int(row["index"])) == whole
    assert [int(row["index"]) % 3 for row in parts[1]] == [1, 1, 1, 1]


def test_chained_runs_stay_flat(run: Run, tmp_path: Path) -> None:
    """Guards chains: the answer is always `text`, older ones have numbers, and nothing nests, through each form."""
    source = write_csv(tmp_path / "in.csv", 3)
    for first, second in (("a.csv", "b.csv"), ("a.jsonl", "b.jsonl")):
        for before, after in ((source, first), (tmp_path / first, second), (tmp_path / second, "last.csv")):
            assert run(before, tmp_path / after, "--overwrite") == 0
        (row, *_) = read_csv(tmp_path / "last.csv")
        own = [name for name in row if name.startswith("input_")]
        assert sorted(own) == ["input_text", "input_text_2", "input_text_3"] and row["label"] == "0"
        assert row["input_text"].startswith("täxt") and row["id"] == "r0"


def test_parquet_keeps_its_types(run: Run, tmp_path: Path) -> None:
    """Guards Parquet to Parquet: types, nulls, nested columns; a null in the template is an error row."""
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    columns = {
        "text": ["a", None, "c"],
        "at": pyarrow.array([0, None, 10**15], pyarrow.timestamp("us")),
        "tags": pyarrow.array([["x"], None, []], pyarrow.list_(pyarrow.string())),
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "in.parquet")
    assert run(tmp_path / "in.parquet", tmp_path / "out.parquet", template="{text} {tags}") == 1
    made = parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert made["input_text"] == columns["text"] and made["at"] == columns["at"].to_pylist()
    assert made["tags"] == [["x"], None, []] and made["index"] == [0, 1, 2]
    assert made["error_message"] == [None, "row 2: the column 'text' of the template is null", None]


def test_a_killed_run_of_tables_is_resumed(runs: ForkServer, command: Command, tmp_path: Path) -> None:
    """Guards CSV in and out against SIGKILL, also while the table is made: at last the bytes of an undisturbed run."""
    command.source, command.out = write_csv(tmp_path / "in.csv", 30), tmp_path / "out.csv"
    command.options += ("--max-seqs", "2", "--max-tokens", "15", "-q", "--template", "Say: {text}", "--ignore-eos")
    assert command() == 0
    whole, journal, pipe = command.data, tmp_path / "out.csv.journal.jsonl", tmp_path / "pipe.csv"
    command.out.unlink()
    os.mkfifo(pipe)
    with pipe.open("r+b", buffering=0) as feed:  # an input without an end, so that the run is not over too early
        feed.write(command.source.read_bytes())
        run = runs.start("run", pipe, *command.words("--resume")[2:])
        wait_until(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= 5)
        run.send(signal.SIGKILL)
        assert run.code() == -signal.SIGKILL and not command.out.exists()
    with journal.open("ab") as file:
        file.write(b'{"index": 3')  # as if torn
    for point in (KillPoint("pread", 20), KillPoint("replace"), KillPoint("after replace")):
        assert runs.start(*command.words("--resume"), kill=point).code() == -signal.SIGKILL
        assert journal.exists() and command.out.exists() == (point.name == "after replace")
    for _ in range(2):  # the second time, there is nothing left to do
        assert command("--resume") == 0 and command.data == whole and not journal.exists()


@pytest.mark.parametrize("ending", ["csv.gz", "parquet"])
def test_a_finished_table_is_verified_and_goes_on(run: Run, command: Command, tmp_path: Path, ending: str) -> None:
    """Guards tables against dead ends: they are verified, and resumed with more rows and with other options."""
    if ending == "parquet":
        pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    source, out, whole = write_csv(tmp_path / "in.csv", 5), tmp_path / f"out.{ending}", tmp_path / f"whole.{ending}"
    assert run(source, out) == 0
    options = [*map(str, command.options), "-m", str(command.model), "--template", "Say: {text}", "--sample", "100%"]
    assert run_command(["verify", str(out), "--prompts", str(source), *options]) == 0
    assert command.report()["equal"] == 5
    assert run_command(["verify", str(out), "--prompts", str(source), "--offline"]) == 0  # which makes no prompts
    command.printed.readouterr()
    write_csv(source, 7)
    assert run(source, out, "--resume") == 0 and command.counts() == (5, 2)
    before = out.read_bytes()
    assert run(source, out, "--resume", "--max-tokens", "4") == 2 and out.read_bytes() == before
    assert (
        f"{out} holds rows that do not fit this run: 7 made with different --max-tokens (3 then, 4 now) (first: row 1)"
        in command.said()
    )
    assert run(source, out, "--resume", "--max-tokens", "4", "--recompute-changed") == 0 and command.counts() == (0, 7)
    assert run(source, whole, "--max-tokens", "4") == 0 and whole.read_bytes() == out.read_bytes()
    assert not list(tmp_path.glob("*.journal.jsonl"))


def test_workbooks_and_arrays(run: Run, tmp_path: Path) -> None:
    """Guards xlsx and JSON arrays, in and out: what looks like a formula is text, and numbers are numbers."""
    openpyxl = pytest.importorskip("openpyxl", reason="workbooks need openpyxl")
    book = openpyxl.Workbook()
    for cells in (["id", "text", "n"], ["a", "hello", 3], [], ["b", "two\nlines", 0.5]):
        book.active.append(cells)
    book.save(tmp_path / "in.xlsx")
    assert run(tmp_path / "in.xlsx", tmp_path / "out.xlsx") == run(tmp_path / "in.xlsx", tmp_path / "out.json") == 0
    made = json.loads((tmp_path / "out.json").read_text())
    assert [(row["id"], row["input_text"], row["n"]) for row in made] == [("a", "hello", 3), ("b", "two\nlines", 0.5)]
    names, *rows = openpyxl.load_workbook(tmp_path / "out.xlsx").active.iter_rows(values_only=True)
    assert [dict(zip(names, row, strict=True)) for row in rows] == made
    (tmp_path / "in.json").write_text(json.dumps([{"text": "=1+1", "note": "x" * 40_000}]))
    assert run(tmp_path / "in.json", tmp_path / "long.xlsx", "--overwrite", template="{text}") == 3
    assert (tmp_path / "long.xlsx.journal.jsonl").exists()
    (tmp_path / "in.json").write_text(json.dumps([{"text": "=1+1", "note": "a\r\n_x0041_\x01"}]))
    assert run(tmp_path / "in.json", tmp_path / "long.xlsx", "--overwrite", template="{text}") == 0
    assert openpyxl.load_workbook(tmp_path / "long.xlsx").active["B2"].data_type == "s"


def test_a_table_of_a_database_gets_another_beside_it(run: Run, command: Command, tmp_path: Path) -> None:
    """Guards SQLite in and out: other tables stay, nothing changes before the end; resume, verify and convert."""
    shop = tmp_path / "shop.db"
    texts = ["a", "ü" * 3, "c", None]
    with closing(sqlite3.connect(shop)) as database:
        database.execute("CREATE TABLE Reviews (Text TEXT, good BOOLEAN, photo BLOB, stars REAL)")
        database.executemany("INSERT INTO Reviews VALUES (?, 1, X'00FF', 4.5)", [[text] for text in texts])
        database.execute("CREATE TABLE users (name TEXT)")
        database.commit()
    source, out = f"{shop}#reviews", f"{shop}#answers"

    def rows(table: str) -> list[dict[str, Any]]:
        with closing(sqlite3.connect(shop)) as database:
            database.row_factory = sqlite3.Row
            return [dict(row) for row in database.execute(f"SELECT * FROM {table} ORDER BY rowid")]

    assert run(shop, out) == 2 and f"such as {shop}#Reviews; it has Reviews, users." in command.said()
    assert run(Path(source), Path(source), template="{Text}") == 2 and "is the input" in command.said()
    assert run(Path(f"{shop}#none"), out) == 2 and "no such table; it has Reviews, users" in command.said()
    assert run(Path(source), out, "--max-errors", "1", template="{Text}") == 3
    assert (tmp_path / "shop.db#answers.journal.jsonl").exists() and len(rows("sqlite_master")) == 2
    assert run(Path(source), out, "--resume", template="{Text}") == 1
    made, reviews = rows("answers"), rows("reviews")
    assert [row["Text_2"] for row in made] == texts and [row["Text"] for row in reviews] == texts
    assert (made[0]["good"], made[0]["photo"], made[0]["stars"], made[0]["error_code"]) == (1, "AP8=", 4.5, None)
    assert made[3]["error_code"] == "template_error" and len(rows("users")) == 0
    with closing(sqlite3.connect(shop)) as database:
        database.execute("UPDATE Reviews SET Text = 'd' WHERE Text IS NULL")
        database.execute("INSERT INTO Reviews VALUES ('e', 0, NULL, NULL)")
        database.commit()
    assert run(Path(source), out, template="{Text}") == 2 and "exists and is not empty" in command.said()
    words = ["run", "--resume", "-o", out, "--recompute-changed"]
    assert run_command(words) == 0 and command.counts() == (3, 2)
    assert run_command(["verify", out, "--sample", "100%"]) == 0 and command.report()["equal"] == 5
    assert run(Path(source), tmp_path / "whole.jsonl", template="{Text}") == 0
    assert run_command(["convert", out, str(tmp_path / "back.jsonl")]) == 0
    assert (tmp_path / "back.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert {path.name for path in tmp_path.glob("shop*")} == {"shop.db"}
    with closing(sqlite3.connect(shop)) as database:
        database.execute("UPDATE answers SET text = 'forged' WHERE \"index\" = 2")
        database.commit()
    assert run_command(["verify", out, "--offline"]) == 1


def test_databases_that_are_held_or_none(
    run: Run, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards rows against a database that another program writes, and files of something else against being one."""
    monkeypatch.setattr("cbatch.batch.tables.database._BUSY_S", 0.1)
    source, out = tmp_path / "in.jsonl", tmp_path / "out.sqlite"
    write_rows(source, [{"text": "a", "stop": ["x"]}, {"text": "b"}])
    assert run(source, out) == 0
    with closing(sqlite3.connect(out)) as database:
        database.execute("BEGIN IMMEDIATE")
        assert run(source, out, "--overwrite", "--max-tokens", "2") == 3
        said = command.said()
        assert "Cannot write the table 'results'" in said and "database is locked. The rows are kept" in said
    assert run(source, out, "--resume", "--max-tokens", "2") == 0 and command.counts() == (2, 0)
    assert run(out, tmp_path / "next.db", template="{text} {input_text}") == 0
    with out.open("rb") as file, gzip.open(tmp_path / "packed.db.gz", "wb") as packed:
        packed.write(file.read())
    assert run(tmp_path / "packed.db.gz", tmp_path / "next.db", "--resume", template="{text} {input_text}") == 0
    assert command.counts() == (2, 0)
    (tmp_path / "other.db").write_text("no database, but text")
    assert run(tmp_path / "other.db", tmp_path / "x.jsonl") == run(source, tmp_path / "other.db", "--overwrite") == 2
    assert command.said().count("file is not a database") == 2 and run(source, tmp_path / "x.csv#y") == 2
    with closing(sqlite3.connect(out)) as database:
        database.execute("CREATE VIEW seen AS SELECT input_text AS text, CAST(X'ff' AS TEXT) AS bad FROM results")
        database.commit()
    assert run(source, f"{out}#seen") == 2 and "'seen'" in command.said()
    assert run(Path(f"{out}#seen"), tmp_path / "y.jsonl") == 1
    assert read_rows(tmp_path / "y.jsonl")[0]["error"]["code"] == "invalid_utf8"


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.parquet", "out.db"])
def test_a_changed_column_computes_nothing(run: Run, command: Command, tmp_path: Path, name: str) -> None:
    """Guards columns that no prompt uses: with others, a row takes over its answer, and the bytes of a whole run."""
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    source, out, whole = tmp_path / "in.jsonl", tmp_path / name, tmp_path / f"whole-{name}"
    rows: list[dict[str, Any]] = [{"id": f"r{n}", "text": f"t{n}", "label": n} for n in range(5)]
    write_rows(source, rows)
    assert run(source, out, "--timings") == 0
    rows = [row | {"label": "new", "more": [row["id"]]} for row in rows]
    rows[1] = {"id": "r1", "text": "t1"}
    write_rows(source, [*rows, {"id": "r5", "text": "t5"}])
    assert run(source, out, "--timings", "--resume") == 0 and command.counts() == (5, 1)
    assert run(source, whole) == 0
    assert run(source, out, "--resume") == 0 and command.counts() == (6, 0)
    if name == "out.jsonl":
        timed = ["cached_tokens", "ttft_s", "elapsed_s"]
        found = [{name: value for name, value in row.items() if name not in timed} for row in read_rows(out)]
        assert found == read_rows(whole) and list(read_rows(out)[0])[-4:] == ["extra", *timed]
    rows[2]["text"] = "changed"
    write_rows(source, rows)
    assert run(source, out, "--resume") == 2
    assert "1 made with another id, prompt, field or" in command.said()
    assert run(source, out, "--resume", "--recompute-changed") == 0 and command.counts() == (4, 1)


SCHEMA = {
    "type": "object",
    "properties": {"text": {"enum": ["a", "b"]}, "n": {"enum": [1, 2]}, "tags": {"enum": [["x"], []]}},
    "required": ["text", "n", "tags"],
}


def test_answers_by_a_schema_become_columns(run: Run, command: Command, tmp_path: Path) -> None:
    """Guards --expand: properties in the schema's order, another name for one that is taken, null if it was cut off."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    source, out, by_hand = tmp_path / "in.jsonl", tmp_path / "out.parquet", tmp_path / "by-hand.csv"
    write_rows(source, [{"text": "one", "n": 7}, {"text": "two", "n": 8}])
    form = ("--json-schema", json.dumps(SCHEMA), "--max-tokens", "60")
    assert run(source, out, *form, "--n", "2", "--overwrite") == 0
    table = parquet.read_table(out)
    assert table.column_names[:7] == ["index", "input_text", "n", "text", "answer_text", "answer_n", "tags"]
    for row in table.to_pylist():
        answer = json.loads(row["text"])
        assert list(answer.values()) == [row["answer_text"], row["answer_n"], row["tags"]] and row["n"] in (7, 8)
        assert row["text"] == row["texts"][0] and len(row["texts"]) == 2
    assert run(source, out, *form, "--n", "2", "--resume") == 0 and command.counts() == (2, 0)
    cut = ("--max-tokens", "3", "--param", "close_forms=false")
    assert run(source, tmp_path / "cut.parquet", *form, *cut) == 0
    table = parquet.read_table(tmp_path / "cut.parquet")
    assert table.column("answer_n").to_pylist() == [None, None] and None not in table.column("text").to_pylist()
    assert run(source, tmp_path / "plain.csv", *form, "--no-expand") == 0
    assert run_command(["convert", str(tmp_path / "plain.csv"), str(by_hand), "--expand"]) == 0
    plain, expanded = read_csv(tmp_path / "plain.csv"), read_csv(by_hand)
    assert (
        "answer_n" not in plain[0] and expanded[0]["answer_n"] in ("1", "2") and expanded[0]["tags"] in ("[]", '["x"]')
    )


def test_records_to_stdout(run: Run, command: Command, tmp_path: Path) -> None:
    """Guards CSV to a pipe: the input's columns from the first row on, and nothing lost of rows that have others."""
    rows: list[dict[str, Any]] = [{"text": "a"}, {"text": None, "late": [1]}, {"text": "c", "more": "x"}]
    write_rows(tmp_path / "in.jsonl", rows)
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl") == 1
    words = ["run", tmp_path / "in.jsonl", "-m", command.model, *command.options, "--template", "Say: {text}"]
    command.printed.readouterr()
    for form in ("csv", "tsv"):
        assert run_command([*map(str, words), "--output-format", form]) == 1
        (out := tmp_path / f"piped.{form}").write_text(printed := command.printed.readouterr().out)
        delimiter = "," if form == "csv" else "\t"
        assert printed.split("\n")[0].split(delimiter)[:3] == ["index", "input_text", "text"]
        assert [row["index"] for row in csv.DictReader(io.StringIO(printed), delimiter=delimiter)] == ["0", "1", "2"]
        assert run_command(["convert", str(out), str(tmp_path / "back.jsonl"), "--overwrite"]) == 0
        assert (tmp_path / "back.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()
    table = tmp_path / "in.csv"
    table.write_text("id,text,label\nx,,1\n")
    assert run_command([*map(str, [words[0], table, *words[2:]]), "--output-format", "csv"]) == 0
    assert command.printed.readouterr().out.startswith("index,id,input_text,label,text,finish_reason")
    assert run_command([*map(str, words), "--output-format", "parquet"]) == 2
