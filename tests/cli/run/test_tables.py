"""`cbatch run` over tables, from the outside: columns in, columns out, kills, shards, chains."""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from cbatch.cli.main import run_command
from tests.support.fork_server import ForkServer, KillPoint

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


class Command:
    """`cbatch run` in this process, in a folder with a model."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.options = ["-m", str(model), "--dtype", "float32", "--max-tokens", "3", "--temperature", "1", "-q"]

    def __call__(self, *arguments: object) -> int:
        return run_command(["run", *map(str, arguments), *self.options])


@pytest.fixture
def run(tmp_path: Path, model_folder: Path) -> Command:
    return Command(tmp_path, model_folder)


def test_a_table_beside_its_answers(run: Command, tmp_path: Path) -> None:
    """Guards CSV to CSV: columns of any names are data, in their order beside the answer, as in JSON Lines."""
    source = write_csv(tmp_path / "in.csv", 12)
    assert run(source, "--template", "Say: {text}", "-o", tmp_path / "out.csv.gz") == 0
    assert run(source, "--template", "Say: {text}", "-o", tmp_path / "out.jsonl") == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    found = read_csv(tmp_path / "out.csv.gz")
    assert list(found[0])[:6] == ["index", "id", "input_text", "Stop", "label", "text"]
    for number, (row, columns) in enumerate(zip(rows, found, strict=True)):
        assert columns["text"] == row["text"] and columns["key"] == row["key"] and columns["index"] == str(number)
        assert columns["input_text"] == row["extra"]["text"] == f"{TEXTS[number % len(TEXTS)]} {number}"
        assert columns["id"] == f"r{number}" and columns["label"] == str(number) and "extra" not in columns


def test_the_same_rows_in_every_form(run: Command, tmp_path: Path) -> None:
    """Guards what decides an answer: not whether its row stood in CSV, a JSON array, lines, or a template file."""
    rows = [{"id": f"r{n}", "text": text} for n, text in enumerate(TEXTS)]
    template = tmp_path / "say.jinja"
    template.write_text("Say: {{ text }}\n")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=2))
    with gzip.open(tmp_path / "c.csv.gz", "wt", newline="") as file:
        writer = csv.DictWriter(file, ["id", "text"])
        writer.writeheader()
        writer.writerows(rows)
    outputs = []
    for name, made in (("a.jsonl", "Say: {text}"), ("b.json", template), ("c.csv.gz", "Say: {text}")):
        assert run(tmp_path / name, "--template", made, "-o", tmp_path / f"{name}.out") == 0
        outputs.append((tmp_path / f"{name}.out").read_bytes())
    assert outputs[0] == outputs[1] == outputs[2] and outputs[0].count(b"\n") == 6


def test_shards_together_are_the_run(run: Command, tmp_path: Path) -> None:
    """Guards --shard, sampled and without ids: each row once, with the index and the answer of the whole run."""
    source = tmp_path / "in.csv"
    source.write_text("text\n" + "".join(f"t{n}\n" for n in range(11)))
    for number in (1, 2, 3):
        part = tmp_path / f"{number}.csv"
        assert run(source, "--template", "{text}", "-o", part, "--shard", f"{number}/3") == 0
        assert run(source, "--template", "{text}", "-o", part, "--shard", f"{number}/3", "--resume") == 0
    assert run(source, "--template", "{text}", "-o", tmp_path / "whole.csv") == 0
    parts = [row for number in (1, 2, 3) for row in read_csv(tmp_path / f"{number}.csv")]
    assert sorted(parts, key=lambda row: int(row["index"])) == read_csv(tmp_path / "whole.csv")
    assert [int(row["index"]) % 3 for row in read_csv(tmp_path / "2.csv")] == [1, 1, 1, 1]


def test_chained_runs_stay_flat(run: Command, tmp_path: Path) -> None:
    """Guards chains: the answer is always `text`, older ones have numbers, and nothing nests, through each form."""
    source = write_csv(tmp_path / "in.csv", 3)
    for first, second in (("a.csv", "b.csv"), ("a.jsonl", "b.jsonl")):
        for before, after in ((source, first), (tmp_path / first, second), (tmp_path / second, "last.csv")):
            code = run(before, "--template", "Say: {text}", "-o", tmp_path / after, "--overwrite")
            assert code == 0
        (row, *_) = read_csv(tmp_path / "last.csv")
        own = [name for name in row if name.startswith("input_")]
        assert sorted(own) == ["input_text", "input_text_2", "input_text_3"] and row["label"] == "0"
        assert row["input_text"].startswith("täxt") and row["id"] == "r0"


def test_parquet_keeps_its_types(run: Command, tmp_path: Path) -> None:
    """Guards Parquet to Parquet: types, nulls, nested columns; a null in the template is an error row."""
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    columns = {
        "text": ["a", None, "c"],
        "at": pyarrow.array([0, None, 10**15], pyarrow.timestamp("us")),
        "tags": pyarrow.array([["x"], None, []], pyarrow.list_(pyarrow.string())),
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "in.parquet")
    assert run(tmp_path / "in.parquet", "--template", "{text} {tags}", "-o", tmp_path / "out.parquet") == 1
    made = parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert made["input_text"] == columns["text"] and made["at"] == columns["at"].to_pylist()
    assert made["tags"] == [["x"], None, []] and made["index"] == [0, 1, 2]
    assert made["error_message"] == [None, "row 2: the column 'text' of the template is null", None]


def test_a_killed_run_of_tables_is_resumed(runs: ForkServer, model_folder: Path, tmp_path: Path) -> None:
    """Guards CSV in and out against SIGKILL, also while the table is made: at last the bytes of an undisturbed run."""
    source, whole, out = write_csv(tmp_path / "in.csv", 30), tmp_path / "whole.csv", tmp_path / "out.csv"
    command = ["run", source, "-m", model_folder, "--dtype", "float32", "--max-seqs", "2", "--max-tokens", "15", "-q"]
    command += ["--template", "Say: {text}", "--ignore-eos"]
    assert runs.start(*command, "-o", whole).code() == 0
    journal = tmp_path / "out.csv.journal.jsonl"
    pipe = tmp_path / "pipe.csv"
    os.mkfifo(pipe)
    with pipe.open("r+b", buffering=0) as feed:  # an input without an end, so that the run is not over too early
        feed.write(source.read_bytes())
        run = runs.start("run", pipe, *command[2:], "-o", out, "--resume")
        while not (journal.exists() and journal.read_bytes().count(b"\n") >= 5):
            assert not run.is_over()
            time.sleep(0.002)
        run.send(signal.SIGKILL)
        assert run.code() == -signal.SIGKILL and not out.exists()
    with journal.open("ab") as file:
        file.write(b'{"index": 3')  # as if torn
    points: list[KillPoint] = [KillPoint("pread", 20), KillPoint("replace"), KillPoint("after replace")]
    for point in points:
        assert runs.start(*command, "-o", out, "--resume", kill=point).code() == -signal.SIGKILL
        assert journal.exists() and out.exists() == (point.name == "after replace")
    for _ in range(2):  # the second time, there is nothing left to do
        assert runs.start(*command, "-o", out, "--resume").code() == 0
        assert out.read_bytes() == whole.read_bytes() and not journal.exists()


def test_check_reads_tables(run: Command, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards --check: bad rows of CSV are told with their rows and lines, before anything runs."""
    source = tmp_path / "in.csv"
    source.write_text('id,text\n1,a\n2\n3,"x\ny"\n4,z,\n')
    assert run(source, "--template", "{text}", "--check") == 1
    report = json.loads(capfd.readouterr().out)
    assert (report["rows"], report["errors"]) == (4, {"invalid_row": 2})
    assert report["first_errors"][1]["message"] == "row 4 (line 6): 3 values for 2 columns"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--template", "{tixt}"], "in.csv has no column 'tixt', which the template needs"),
        ([], "in.csv has no column 'prompt'"),
        (["--template", "{}"], "plain names of columns in braces"),
        (["--template", "none.jinja"], "Cannot read the template none.jinja"),
        (["--template", "{text}", "--shard", "9/8"], "--shard takes K/N"),
        (["--template", "{text}", "--format", "json"], "begins with ["),
        (["--template", "{text}", "--output-format", "csv"], "--output-format csv needs an output file"),
        (["--template", "{text}", "-o", "out.parquet.gz"], "Parquet is compressed inside"),
        (["--template", "{text}", "-o", "in.csv", "--overwrite"], "in.csv is the input"),
    ],
)
def test_what_no_row_could_survive_is_told_at_the_start(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, arguments: list[str], message: str
) -> None:
    """Guards exit code 2 and one sentence, before a model is loaded, instead of 10,000 error rows."""
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "in.csv", 2)
    monkeypatch.setattr("cbatch.cli.run.command._load", lambda *_: pytest.fail("a model was loaded"))
    if "out.parquet.gz" in arguments:
        pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    assert run("in.csv", *arguments) == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize("name", ["in.parquet", "in.csv.zst"])
def test_a_missing_extra_refuses_the_run(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, name: str
) -> None:
    """Guards runs without pyarrow: exit code 2 with what to install, for inputs and outputs."""
    real = importlib.import_module

    def without(module: str, *rest: Any) -> Any:
        if module in ("pyarrow", "compression.zstd"):
            raise ImportError(module)
        return real(module, *rest)

    monkeypatch.setattr(importlib, "import_module", without)
    (tmp_path / name).write_bytes(b"\x28\xb5\x2f\xfd....")
    source = write_csv(tmp_path / "good.csv", 1)
    for arguments in ([tmp_path / name], [source, "-o", tmp_path / f"out.{name}"]):
        assert run(*arguments, "--template", "{text}") == 2
        assert re.search(r"needs pyarrow: pip install .*\[tables\]'", capfd.readouterr().err)


def test_csv_from_a_pipe(runs: ForkServer, model_folder: Path, tmp_path: Path) -> None:
    """Guards stdin: --format csv without a file, and --resume, which reads it twice."""
    source = write_csv(tmp_path / "in.csv", 6)
    command = ["run", "--format", "csv", "--template", "{text}", "-m", model_folder, "--max-tokens", "2", "-q"]
    out = tmp_path / "out.jsonl"
    for _ in range(2):
        assert runs.start(*command, "-o", out, "--resume", stdin=str(source)).code() == 0
        rows = out.read_text().splitlines(keepends=True)
        assert [json.loads(row)["id"] for row in rows] == [f"r{n}" for n in range(6)]
        out.write_text("".join(rows[:2]))
