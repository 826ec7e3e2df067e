"""`cbatch run --resume`: what it keeps, what it runs again, and what it refuses with the file untouched."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cbatch.batch import writer as writer_module
from cbatch.batch.journal import Journal
from cbatch.batch.row import format_result
from cbatch.batch.writer import FileWriter
from cbatch.cli.main import run_command
from tests.support.model_folder import save_model

ROWS: list[Any] = [
    {"id": "a", "prompt": "hello", "max_tokens": 12},
    {"prompt": "sampled", "temperature": 1.0, "max_tokens": 9},
    {"prompt": "x " * 400},
    "{bad",
    {"id": 7, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "note": "kept"},
    {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "two", "max_tokens": 5}},
]


class Case:
    """A folder with an input, an output and the command between them."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.source, self.out, self.stats = folder / "in.jsonl", folder / "out.jsonl", folder / "stats.json"
        self.model = model
        self.rows(ROWS)

    def rows(self, rows: list[Any]) -> None:
        self.source.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))

    def run(self, *arguments: str, model: Path | None = None) -> int:
        files = [str(self.source), "-o", str(self.out), "--stats", str(self.stats)]
        return run_command(["run", *files, "-m", str(model or self.model), "--dtype", "float32", *arguments])

    def figures(self) -> dict[str, Any]:
        """Those of the last run."""
        found: dict[str, Any] = json.loads(self.stats.read_text())
        return found

    def kept(self) -> int:
        return int(self.figures()["rows_kept"])

    def ran(self) -> int:
        return int(self.figures()["rows"])


@pytest.fixture
def case(tmp_path: Path, model_folder: Path) -> Case:
    return Case(tmp_path, model_folder)


@pytest.fixture
def done(case: Case) -> Case:
    """A case that has been run to its end."""
    assert case.run() == 1
    return case


def test_a_finished_file_is_left_alone(done: Case, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards a repeated call: all rows are kept, with the same bytes and the same exit code."""
    before, inode = done.out.read_bytes(), done.out.stat().st_ino
    assert done.run("--resume") == 1
    assert (done.kept(), done.ran()) == (6, 0)
    assert "nothing left to do: 6 rows are there, 2 of them errors" in capfd.readouterr().err
    assert done.out.read_bytes() == before and done.out.stat().st_ino == inode


@pytest.mark.parametrize("order", ["input", "completion"])
@pytest.mark.parametrize("keep", [0, 1, 3, 5])
def test_what_is_missing_is_run(done: Case, keep: int, order: str) -> None:
    """Guards a run that was cut off: a torn row and missing rows are run, and the bytes are those of one run."""
    whole = done.out.read_bytes().splitlines(keepends=True)
    done.out.write_bytes(b"".join(reversed(whole[-keep:] if keep else [])) + whole[0][:20])
    assert done.run("--resume", "--order", order, "--max-seqs", "2", "--max-batch-tokens", "5") == 1
    assert (done.kept(), done.ran()) == (keep, 6 - keep)
    found = done.out.read_bytes().splitlines(keepends=True)
    assert found == whole if order == "input" else sorted(found) == sorted(whole)


def test_resume_starts_a_file_that_is_not_there(case: Case) -> None:
    """Guards scripts that always say --resume."""
    assert case.run("--resume") == 1
    assert (case.kept(), case.ran()) == (0, 6) and len(case.out.read_bytes().splitlines()) == 6


def test_content_is_refused_without_resume(done: Case, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards the results of an earlier run."""
    before = done.out.read_bytes()
    assert done.run() == 2 and "--resume continues it" in capfd.readouterr().err
    assert done.out.read_bytes() == before
    assert done.run("--overwrite") == 1 and done.kept() == 0 and done.out.read_bytes() == before


def replaced(place: int, row: Any) -> list[Any]:
    """ROWS with another row in one place."""
    return [*ROWS[:place], row, *ROWS[place + 1 :]]


OTHER_INPUT = (
    "another input, another --system, --template, --template-kwargs, --raw or --format, another LoRA adapter, "
    "or a version of cbatch that read a column differently"
)
SAMPLING, MODEL = "made with other sampling parameters", "made with another model, dtype, chat template or --date"
CHANGES: dict[str, tuple[list[Any], str]] = {
    "input": (replaced(0, {**ROWS[0], "prompt": "goodbye"}), f"1 made with {OTHER_INPUT} (first: line 1)"),
    "column": (replaced(4, {**ROWS[4], "note": "other"}), f"1 made with {OTHER_INPUT} (first: line 5)"),
    "bad line": (replaced(3, "{worse"), f"1 made with {OTHER_INPUT} (first: line 4)"),
    "mended line": (
        replaced(3, {"prompt": "mended"}),
        "1 made with a line that was refused then and is accepted now, or the other way round",
    ),
    "sampling": (replaced(0, {**ROWS[0], "max_tokens": 4}), f"1 {SAMPLING}"),
    "shorter": (ROWS[:4], "2 for lines that the input does not have (first: line 5)"),
    "shifted": (["", *ROWS], "1 for lines that the input does not have (first: line 1)"),
    "--top-k 5": (ROWS, f"5 {SAMPLING}, another seed"),
    "--seed 1": (ROWS, f"5 {SAMPLING}, another seed"),
    "--system brief": (ROWS, f"4 made with {OTHER_INPUT} (first: line 1)"),
    "--token-ids": (ROWS, f"5 {SAMPLING}, another seed, --token-ids"),
    "--dtype bfloat16": (ROWS, f"6 {MODEL} (first: line 1)"),
    "-m MODEL": (ROWS, f"6 {MODEL} (first: line 1)"),
}
"""Changes of the input or, from - on, of the options, and what is said of them."""


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_what_no_longer_fits_is_named_and_left(
    done: Case, change: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Guards against mixing two runs: exit code 2 with the difference, and no byte changed."""
    rows, message = CHANGES[change]
    done.rows(rows)
    other = str(save_model(tmp_path / "other", generation={"eos_token_id": 3}))
    arguments = change.replace("MODEL", other).split() if change.startswith("-") else []
    before = done.out.read_bytes()
    assert done.run("--resume", *arguments) == 2
    assert message in capfd.readouterr().err and done.out.read_bytes() == before
    assert done.run("--resume", "--recompute-changed", *arguments) == 1
    resumed = done.out.read_bytes()
    assert done.run("--overwrite", *arguments) == 1
    assert resumed == done.out.read_bytes() != before


def test_what_decides_nothing_changes_no_key(done: Case) -> None:
    """Guards against repeating a run for the formatting of its JSON, or for another machine's settings."""
    respelt = [
        '{"max_tokens": 12, "prompt": "hel\\u006co", "id": "a", "priority": 3}',
        '{ "prompt": "sampled", "temperature": 1, "max_new_tokens": 9 }',
        *ROWS[2:4],
        {**ROWS[4], "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "temperature": None},
        {**ROWS[5], "method": "POST", "body": {**ROWS[5]["body"], "user": "me", "max_completion_tokens": 5}},
    ]
    done.rows(respelt)
    assert done.run("--resume", "--max-seqs", "3", "--kv-blocks", "40", "--block-size", "8", "--window", "2") == 1
    assert (done.kept(), done.ran()) == (6, 0)


def test_options_that_do_not_concern_a_row_change_no_key(case: Case) -> None:
    """Guards rows that --system, --raw and others do not concern."""
    own = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    case.rows([{"messages": own}, {"prompt_token_ids": [5, 6]}, {"prompt": "a", "raw": True}, "{bad"])
    assert case.run("--max-tokens", "3", "--param", "top_k=-1") == 1
    assert case.run("--max-tokens", "3", "--resume", "--system", "be long", "--raw", "--date", "2031-01-01") == 1
    assert (case.kept(), case.ran()) == (4, 0)


def test_rows_that_a_small_cache_cut_off_are_known(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards against keeping rows that a cache smaller than the context cut off; rows that fitted are kept."""
    case.rows([{"prompt": "hello", "max_tokens": 60, "ignore_eos": True}, {"prompt": "hello", "max_tokens": 5}])
    assert case.run("--kv-blocks", "3") == 0
    assert case.run("--resume") == 2 and "1 made with other sampling parameters" in capfd.readouterr().err
    assert case.run("--resume", "--kv-blocks", "3") == 0 and case.kept() == 2
    assert case.run("--resume", "--recompute-changed") == 0 and (case.kept(), case.ran()) == (1, 1)
    assert json.loads(case.out.read_bytes().splitlines()[0])["usage"]["completion_tokens"] == 60


CLOCK = "{{ strftime_now('%d %b %Y') }}"


def test_a_prompt_too_long_for_the_context_has_one_key(case: Case) -> None:
    """Guards error rows that are the same with a small cache and a large one."""
    case.rows([{"prompt": "x " * 400}])
    assert case.run("--kv-blocks", "3") == 1 and case.run("--resume") == 1 and case.kept() == 1


def test_a_signal_during_the_final_ordering(
    done: Case, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Guards Ctrl-C while a large file is being ordered: 130, the journal as it was, and --resume orders it."""
    whole = done.out.read_bytes()
    mixed = b"".join(reversed(whole.splitlines(keepends=True)))
    done.out.write_bytes(mixed)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "row", lambda self, number: signal.raise_signal(signal.SIGINT) or b"")
        assert done.run("--resume") == 130
    assert done.out.read_bytes() == mixed and len(list(done.out.parent.iterdir())) == 3
    assert done.run("--resume") == 1 and done.out.read_bytes() == whole


def test_templates_with_a_clock_get_a_date(
    case: Case, model_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Guards a run that is resumed after midnight: the date is an option with a fixed default, and part of the key."""
    case.model = shutil.copytree(model_folder, tmp_path / "clock")
    template = case.model / "chat_template.jinja"
    template.write_text(CLOCK + template.read_text())
    assert case.run("--check", "-q") == 1
    assert case.run() == 1 and case.run("--resume", "--date", "2024-07-26") == 1 and case.kept() == 6
    first = case.out.read_bytes()
    assert case.run("--resume", "--date", "2024-07-27") == 2 and "--date" in capfd.readouterr().err
    assert case.run("--overwrite", "--date", "2024-07-27") == 1 and case.out.read_bytes() != first


def test_another_writer_of_the_file_is_noticed(
    case: Case, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Guards an intact journal against being ordered by offsets that are no longer right."""
    finish = FileWriter.finish

    def meddled(self: FileWriter, check_stop: Any) -> None:
        with case.out.open("ab") as file:
            file.write(b"note\n")
        finish(self, check_stop)

    def taken_away(self: FileWriter, check_stop: Any) -> None:
        case.out.unlink()
        finish(self, check_stop)

    with monkeypatch.context() as patch:
        patch.setattr(FileWriter, "finish", meddled)
        assert case.run() == 3 and "Another process wrote to" in capfd.readouterr().err
        assert len(case.out.read_bytes().splitlines()) == 7
        patch.setattr(FileWriter, "finish", taken_away)
        assert case.run("--overwrite") == 3 and "was removed or replaced" in capfd.readouterr().err


def test_the_file_for_ordering_touches_nothing_of_others(case: Case, tmp_path: Path) -> None:
    """Guards files behind a link or a pipe that stands where the ordered rows are written."""
    precious, place = tmp_path / "precious", tmp_path / ".out.jsonl.cbatch-sorting"
    precious.write_text("precious")
    place.symlink_to(precious)
    assert case.run() == 1 and precious.read_text() == "precious" and not place.exists()
    os.mkfifo(place)
    assert case.run("--overwrite") == 1 and not place.exists()


def test_outputs_that_cannot_be_opened_are_refused(case: Case, tmp_path: Path) -> None:
    """Guards exit code 2 for odd paths, and that nothing is left behind."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for name in (loop, tmp_path / ("n" * 300)):
        case.out = name
        assert case.run() == 2
    case.out = tmp_path / ("n" * 250)
    assert case.run() == 1 and len(list(tmp_path.iterdir())) == 4


def test_retry_errors(done: Case) -> None:
    """Guards --retry-errors: error rows are run again, and the file keeps one row an index."""
    done.rows([*ROWS[:2], ROWS[2], '{"prompt": "mended", "max_tokens": 2}', *ROWS[4:]])
    assert done.run("--resume", "--retry-errors", "--order", "completion") == 1
    assert (done.kept(), done.ran()) == (4, 2)
    rows = [json.loads(line) for line in done.out.read_bytes().splitlines()]
    assert sorted(row["index"] for row in rows) == list(range(6))
    assert [row["index"] for row in rows if row.get("error")] == [2]


def test_an_interrupted_retry_keeps_the_last_row_of_an_index(done: Case) -> None:
    """Guards the journal's rule: the last row of an index counts, and the file has one in the end."""
    whole = done.out.read_bytes()
    first = json.loads(whole.splitlines()[0])
    failed = json.dumps({"index": 0, "id": "a", "error": {"code": "nan_logits", "message": "m"}, "key": first["key"]})
    done.out.write_bytes(failed.encode() + b"\n" + whole)
    assert done.run("--resume") == 1
    assert (done.kept(), done.ran()) == (6, 0) and done.out.read_bytes() == whole


def test_damage_in_the_middle_is_refused(done: Case, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards damaged files: exit code 2, the line, and no byte changed; --recompute-changed mends the file."""
    whole, damage = done.out.read_bytes(), b'{"index": 0, "id"\n'
    done.out.write_bytes(damage + whole)
    assert done.run("--resume") == 2
    assert "1 damaged line (first: line 1, which is not valid JSON" in capfd.readouterr().err
    assert done.out.read_bytes() == damage + whole
    assert done.run("--resume", "--recompute-changed") == 1 and done.out.read_bytes() == whole


@pytest.mark.parametrize("content", [b'{"index": 0, "text": "from another tool"}\n', b"notes\nof mine\n", b"\n"])
def test_files_of_others_are_left_alone(case: Case, content: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards a file in which no line was ever a row of output, whatever the options."""
    case.out.write_bytes(content)
    for options in ([], ["--recompute-changed"]):
        assert case.run("--resume", *options) == 2 and case.out.read_bytes() == content
    assert "is not a file of output rows: line 1 is not" in capfd.readouterr().err


def without_checks(rows: list[bytes]) -> bytes:
    """Rows as a version wrote them that had no checks."""
    return b"".join(row[: -len(b', "check": "01234567"}\n')] + b"}\n" for row in rows)


@pytest.mark.parametrize("left", [2, 6])
def test_rows_of_older_versions_get_a_check(done: Case, left: int) -> None:
    """Guards files that were begun, or finished, before rows had a check: nothing is computed again."""
    whole = done.out.read_bytes()
    done.out.write_bytes(without_checks(whole.splitlines(keepends=True)[:left]))
    assert done.run("--resume") == 1
    assert (done.kept(), done.ran()) == (left, 6 - left) and done.out.read_bytes() == whole


def test_a_damaged_row_may_have_replaced_an_error_row(done: Case, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards a row that --retry-errors had run again: if its bytes have changed, the old error row does not count."""
    whole = done.out.read_bytes()
    rows = whole.splitlines(keepends=True)
    first = json.loads(rows[0])
    error = {"code": "nan_logits", "message": "m"}
    failed = format_result({"index": 0, "id": "a", "error": error, "key": first["key"]})
    done.out.write_bytes(failed + b"".join(rows[1:]) + rows[0].replace(b'"text": "', b'"text": "#'))
    assert done.run("--resume") == 2
    assert done.run("--resume", "--recompute-changed") == 1 and done.out.read_bytes() == whole
    assert (done.kept(), done.ran()) == (3, 3)
    assert "not kept: 1 damaged line (first: line 7, which is not as it was written" in capfd.readouterr().err


@pytest.mark.parametrize("text", ["my novel", '{"index": 5, "precious": "data"}', '{"a": 1}', "[" * 100_000])
def test_a_tail_that_is_not_ours_is_not_cut_off(case: Case, text: str) -> None:
    """Guards a text file without a last newline, given as output by mistake."""
    case.out.write_text(text)
    assert case.run("--resume") == 2 and case.out.read_text() == text


def test_resume_from_a_pipe(done: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `generate | cbatch run -o out --resume`: lines read to compare them are run too."""
    whole = done.out.read_bytes()
    done.out.write_bytes(b"".join(whole.splitlines(keepends=True)[:4]))
    reader, writer = os.pipe()
    os.write(writer, done.source.read_bytes())
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=stream, isatty=lambda: False))
        done.source = Path("-")
        assert done.run("--resume") == 1
    assert (done.kept(), done.ran()) == (4, 2) and done.out.read_bytes() == whole


@pytest.mark.parametrize("link", ["symlink", "hard link", "itself"])
def test_the_output_is_not_the_input(case: Case, link: str) -> None:
    """Guards the input against being overwritten, under whatever name."""
    before = case.source.read_bytes()
    case.out = case.source if link == "itself" else case.out
    if link == "symlink":
        case.out.symlink_to(case.source)
    elif link == "hard link":
        os.link(case.source, case.out)
    for option in ("--resume", "--overwrite"):
        assert case.run(option) == 2 and case.source.read_bytes() == before


class BadDisk:
    """Stands in for `os` in the writer's module: a disk that holds `capacity` bytes, or does not sync."""

    def __init__(self, *, capacity: int | None = None, sync_error: int | None = None, chunk: int = 2**30) -> None:
        self._capacity, self._sync_error, self._chunk = capacity, sync_error, chunk

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, fd: int, data: memoryview) -> int:
        size = min(len(data), self._chunk)
        if self._capacity is not None:
            if self._capacity == 0:
                raise OSError(28, os.strerror(28))
            size = min(size, self._capacity)
            self._capacity -= size
        return os.write(fd, data[:size])

    def fsync(self, fd: int) -> None:
        is_file = not Path(f"/proc/self/fd/{fd}").readlink().is_dir()
        if self._sync_error is not None and is_file and os.fstat(fd).st_size:
            raise OSError(self._sync_error, os.strerror(self._sync_error))
        os.fsync(fd)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [0, 1, 150, 400, 700])
def test_a_full_disk_is_exit_3_and_resumable(
    case: Case, capacity: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Guards the rows written before a disk was full, with the last one torn at any byte."""
    assert case.run() == 1
    whole = case.out.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "os", BadDisk(capacity=capacity))
        assert case.run("--overwrite") == 3
    error = capfd.readouterr().err
    assert "No space left on device" in error and "--resume" in error and "Traceback" not in error
    assert len(case.out.read_bytes()) == capacity
    assert case.run("--resume") == 1 and case.out.read_bytes() == whole


def test_a_disk_that_does_not_sync_is_exit_3(
    case: Case, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Guards against losing rows silently when the disk refuses to sync."""
    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "os", BadDisk(sync_error=5))
        assert case.run() == 3
    assert "Input/output error" in capfd.readouterr().err
    assert case.run("--resume") == 1


def test_short_writes_are_finished(done: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards rows against a file system that takes a few bytes at a time."""
    whole = done.out.read_bytes()
    monkeypatch.setattr(writer_module, "os", BadDisk(chunk=3))
    assert done.run("--overwrite") == 1 and done.out.read_bytes() == whole


def test_no_space_for_the_ordered_file(
    done: Case, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Guards a disk that cannot hold the rows twice: exit 3, all rows there, and --resume orders them later."""
    whole = done.out.read_bytes()
    done.out.write_bytes(b"".join(reversed(whole.splitlines(keepends=True))))
    rewrite = FileWriter._complete

    def full(self: FileWriter, check_stop: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(FileWriter, "_complete", full)
    assert done.run("--resume") == 3 and "Cannot order" in capfd.readouterr().err
    monkeypatch.setattr(FileWriter, "_complete", rewrite)
    assert done.run("--resume") == 1 and done.out.read_bytes() == whole and done.ran() == 0


def test_max_errors_stops_at_that_error(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards --max-errors: exit 3 with exactly N error rows, and --resume continues."""
    case.rows(["{bad"] * 9 + ROWS)
    for number in (1, 4):
        assert case.run("--overwrite", "--max-errors", str(number)) == 3
        rows = [json.loads(line) for line in case.out.read_bytes().splitlines()]
        assert len([row for row in rows if row.get("error")]) == number
        assert f"Stopped at error {number}" in capfd.readouterr().err
    assert case.run("--resume") == 1 and len(case.out.read_bytes().splitlines()) == 15


def test_the_fingerprint_is_of_the_content(case: Case, tmp_path: Path, model_folder: Path) -> None:
    """Guards --resume with a model that was moved, and against another model under the same name."""
    assert case.run() == 1
    moved = shutil.copytree(model_folder, tmp_path / "moved")
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"_name_or_path": "elsewhere", "transformers_version": "9"}))
    assert case.run("--resume", model=moved) == 1 and case.kept() == 6
    weights = moved / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-4:] = b"\x00\x00\x80\x3f"
    weights.write_bytes(content)
    assert case.run("--resume", model=moved) == 2
