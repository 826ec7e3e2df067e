"""`cbatch run --resume`: what it keeps, what it runs again, and what it refuses with the file untouched."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from cbatch.batch import writer as writer_module
from cbatch.batch.journal import Journal
from cbatch.batch.row import format_result
from cbatch.batch.writer import FileWriter
from tests.support.command import Command
from tests.support.model_folder import save_model
from tests.support.rows import pipe_of

pytestmark = pytest.mark.usefixtures("rows_written")

ROWS: list[Any] = [
    {"id": "a", "prompt": "hello", "max_tokens": 12},
    {"prompt": "sampled", "temperature": 1.0, "max_tokens": 9},
    {"prompt": "x " * 400},
    "{bad",
    {"id": 7, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "note": "kept"},
    {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "two", "max_tokens": 5}},
]


@pytest.fixture
def done(command: Command, whole: bytes) -> Command:
    """The command, after a run to the end."""
    command.out.write_bytes(whole)
    return command


def test_a_finished_file_is_left_alone(done: Command, whole: bytes) -> None:
    """Guards a repeated call: all rows are kept, with the same bytes and the same exit code."""
    inode = done.out.stat().st_ino
    assert done("--resume") == 1 and done.counts() == (6, 0)
    said = done.said()
    assert "6 rows are kept; 2 of them failed (see --retry-errors)" in said
    assert "nothing left to do: 6 rows are there, 2 of them errors" in said
    assert done.data == whole and done.out.stat().st_ino == inode


@pytest.mark.parametrize(("keep", "order"), [(0, "input"), (1, "completion"), (3, "completion"), (5, "input")])
def test_what_is_missing_is_run(done: Command, keep: int, order: str) -> None:
    """Guards a run that was cut off: a torn row and missing rows are run, and the bytes are those of one run."""
    whole = done.lines()
    done.out.write_bytes(b"".join(reversed(whole[-keep:] if keep else [])) + whole[0][:20])
    assert done("--resume", "--order", order, "--max-seqs", "2", "--max-batch-tokens", "5") == 1
    assert done.counts() == (keep, 6 - keep)
    assert done.lines() == whole if order == "input" else sorted(done.lines()) == sorted(whole)


def test_content_is_refused_without_resume(done: Command, whole: bytes) -> None:
    """Guards the results of an earlier run."""
    assert done() == 2 and "--resume continues it" in done.said() and done.data == whole
    assert done("--overwrite") == 1 and done.counts() == (0, 6) and done.data == whole


def replaced(place: int, row: Any) -> list[Any]:
    """ROWS with another row in one place."""
    return [*ROWS[:place], row, *ROWS[place + 1 :]]


OTHER_INPUT = (
    "another input, another --system, --template, --template-kwargs, --raw or --format, another LoRA adapter, "
    "or a version of cbatch that read a column differently"
)
SAMPLING, MODEL = (
    "made with other sampling parameters",
    "made with another model, dtype, chat template, --max-model-len or --date",
)
CHANGES: dict[str, tuple[list[Any], str]] = {
    "input": (replaced(0, {**ROWS[0], "prompt": "goodbye"}), f"1 made with {OTHER_INPUT} (first: line 1)"),
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
RECOMPUTED = ("mended line", "shorter", "shifted", "--seed 1", "-m MODEL")


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_what_no_longer_fits_is_named_and_left(done: Command, whole: bytes, change: str, tmp_path: Path) -> None:
    """Guards against mixing two runs: exit code 2 with the difference, no byte changed, and what recomputing gives."""
    rows, message = CHANGES[change]
    done.write(rows)
    other = str(save_model(tmp_path / "other", generation={"eos_token_id": 3})) if "MODEL" in change else ""
    arguments = change.replace("MODEL", other).split() if change.startswith("-") else []
    assert done("--resume", *arguments) == 2
    assert message in done.said() and done.data == whole
    if change in RECOMPUTED:
        assert done("--resume", "--recompute-changed", *arguments) == 1
        resumed = done.data
        assert done("--overwrite", *arguments) == 1 and resumed == done.data != whole


def test_what_decides_nothing_changes_no_key(done: Command) -> None:
    """Guards against repeating a run for the formatting of its JSON, or for another machine's settings."""
    respelt = [
        '{"max_tokens": 12, "prompt": "hel\\u006co", "id": "a", "priority": 3}',
        '{ "prompt": "sampled", "temperature": 1, "max_new_tokens": 9 }',
        *ROWS[2:4],
        {**ROWS[4], "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "temperature": None},
        {**ROWS[5], "method": "POST", "body": {**ROWS[5]["body"], "user": "me", "max_completion_tokens": 5}},
    ]
    done.write(respelt)
    assert done("--resume", "--max-seqs", "3", "--kv-blocks", "40", "--block-size", "8", "--window", "2") == 1
    assert done.counts() == (6, 0)


def test_options_that_do_not_concern_a_row_change_no_key(command: Command) -> None:
    """Guards rows that --system, --raw and others do not concern."""
    own = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    command.write([{"messages": own}, {"prompt_token_ids": [5, 6]}, {"prompt": "a", "raw": True}, "{bad"])
    assert command("--max-tokens", "3", "--param", "top_k=-1") == 1
    assert command("--max-tokens", "3", "--resume", "--system", "be long", "--raw", "--date", "2031-01-01") == 1
    assert command.counts() == (4, 0)


def test_rows_that_a_small_cache_cut_off_are_known(command: Command) -> None:
    """Guards against keeping rows that a cache smaller than the context cut off; others, and their errors, are kept."""
    long = {"prompt": "hello", "max_tokens": 60, "ignore_eos": True}
    command.write([long, {"prompt": "hello", "max_tokens": 5}, {"prompt": "x " * 400}])
    assert command("--kv-blocks", "3") == 1
    more = "--resume", "--kv-blocks", "40"
    assert command(*more) == 2 and "1 made with different size of the KV cache" in command.said()
    assert command("--resume", "--kv-blocks", "3") == 1 and command.counts()[0] == 3
    assert command(*more, "--recompute-changed") == 1 and command.counts() == (2, 1)
    assert command.rows()[0]["usage"]["completion_tokens"] == 60


def test_a_signal_during_the_final_ordering(done: Command, whole: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards Ctrl-C while a large file is being ordered: 130, the journal as it was, and --resume orders it."""
    mixed = b"".join(reversed(done.lines()))
    done.out.write_bytes(mixed)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "row", lambda self, number: signal.raise_signal(signal.SIGINT) or b"")
        assert done("--resume") == 130
    assert done.data == mixed and len(list(done.folder.iterdir())) == 4
    assert done("--resume") == 1 and done.data == whole


def test_templates_with_a_clock_get_a_date(command: Command, model_folder: Path, tmp_path: Path) -> None:
    """Guards a run that is resumed after midnight: the date is an option with a fixed default, and part of the key."""
    command.model = shutil.copytree(model_folder, tmp_path / "clock")
    template = command.model / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}" + template.read_text())
    assert command("--check", "-q") == 1
    assert command() == 1 and command("--resume", "--date", "2024-07-26") == 1 and command.counts()[0] == 6
    first = command.data
    assert command("--resume", "--date", "2024-07-27") == 2 and "--date" in command.said()
    assert command("--overwrite", "--date", "2024-07-27") == 1 and command.data != first


def test_another_writer_of_the_file_is_noticed(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards an intact journal against being ordered by offsets that are no longer right."""
    finish = FileWriter.finish

    def meddled(self: FileWriter, check_stop: Any) -> None:
        with command.out.open("ab") as file:
            file.write(b"note\n")
        finish(self, check_stop)

    def taken_away(self: FileWriter, check_stop: Any) -> None:
        command.out.unlink()
        finish(self, check_stop)

    with monkeypatch.context() as patch:
        patch.setattr(FileWriter, "finish", meddled)
        assert command() == 3 and "Another process wrote to" in command.said()
        assert len(command.data.splitlines()) == 7
        patch.setattr(FileWriter, "finish", taken_away)
        assert command("--overwrite") == 3 and "was removed or replaced" in command.said()


def test_the_file_for_ordering_touches_nothing_of_others(command: Command, tmp_path: Path) -> None:
    """Guards files behind a link or a pipe that stands where the ordered rows are written."""
    precious, place = tmp_path / "precious", tmp_path / ".out.jsonl.cbatch-sorting"
    precious.write_text("precious")
    place.symlink_to(precious)
    assert command() == 1 and precious.read_text() == "precious" and not place.exists()
    os.mkfifo(place)
    assert command("--overwrite") == 1 and not place.exists()


def test_outputs_that_cannot_be_opened_are_refused(command: Command, tmp_path: Path) -> None:
    """Guards exit code 2 for odd paths, and that nothing is left behind."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for name in (loop, tmp_path / ("n" * 300)):
        command.out = name
        assert command() == 2
    command.out = tmp_path / ("n" * 250)
    assert command() == 1 and len(list(tmp_path.iterdir())) == 4


def test_retry_errors(done: Command) -> None:
    """Guards --retry-errors: error rows are run again, and the file keeps one row an index."""
    done.write([*ROWS[:2], ROWS[2], '{"prompt": "mended", "max_tokens": 2}', *ROWS[4:]])
    assert done("--resume", "--retry-errors", "--order", "completion") == 1 and done.counts() == (4, 2)
    rows = done.rows()
    assert sorted(row["index"] for row in rows) == list(range(6))
    assert [row["index"] for row in rows if row.get("error")] == [2]


def failed(row: bytes) -> bytes:
    """An error row of an earlier run in the place of a row."""
    error = {"code": "nan_logits", "message": "m"}
    return format_result({"index": 0, "id": "a", "error": error, "key": json.loads(row)["key"]})


def test_an_interrupted_retry_keeps_the_last_row_of_an_index(done: Command, whole: bytes) -> None:
    """Guards the journal's rule: the last row of an index counts, and the file has one in the end."""
    done.out.write_bytes(failed(done.lines()[0]) + whole)
    assert done("--resume") == 1 and done.counts() == (6, 0) and done.data == whole


OTHERS = ['{"index": 0, "text": "from another tool"}\n', "notes\nof mine\n", "\n"]
OTHERS += ["my novel", '{"index": 5, "precious": "data"}', '{"a": 1}', "[" * 100_000]  # and with no last newline


@pytest.mark.parametrize("content", OTHERS, ids=range(len(OTHERS)))
def test_files_of_others_are_left_alone(command: Command, content: str) -> None:
    """Guards a file in which no line was ever a row of output, whatever the options; its end is no torn row."""
    command.out.write_text(content)
    for options in ([], ["--recompute-changed"]):
        assert command("--resume", *options) == 2 and command.out.read_text() == content
    assert "is not a file of output rows: line 1 is not" in command.said()


@pytest.mark.parametrize("left", [2, 6])
def test_rows_of_older_versions_get_a_check(done: Command, whole: bytes, left: int) -> None:
    """Guards files that were begun, or finished, before rows had a check: nothing is computed again."""
    done.out.write_bytes(b"".join(row[: -len(b', "check": "01234567"}\n')] + b"}\n" for row in done.lines()[:left]))
    assert done("--resume") == 1 and done.counts() == (left, 6 - left) and done.data == whole


def test_a_damaged_row_may_have_replaced_an_error_row(done: Command, whole: bytes) -> None:
    """Guards a row that --retry-errors had run again: if its bytes have changed, the old error row does not count."""
    first, *rest = done.lines()
    done.out.write_bytes(failed(first) + b"".join(rest) + first.replace(b'"text": "', b'"text": "#'))
    assert done("--resume") == 2
    assert done("--resume", "--recompute-changed") == 1 and done.data == whole and done.counts() == (3, 3)
    assert "not kept: 1 damaged line (first: line 7, which is not as it was written" in done.said()


def test_resume_from_a_pipe(done: Command, whole: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `generate | cbatch run -o out --resume`: lines read to compare them are run too."""
    done.out.write_bytes(b"".join(done.lines()[:4]))
    with pipe_of(done.source.read_bytes()) as stream:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=stream, isatty=lambda: False))
        done.source = Path("-")
        assert done("--resume") == 1 and done.counts() == (4, 2) and done.data == whole


@pytest.mark.parametrize("link", ["symlink", "hard link", "itself"])
def test_the_output_is_not_the_input(command: Command, link: str) -> None:
    """Guards the input against being overwritten, under whatever name."""
    before = command.source.read_bytes()
    command.out = command.source if link == "itself" else command.out
    if link == "symlink":
        command.out.symlink_to(command.source)
    elif link == "hard link":
        os.link(command.source, command.out)
    for option in ("--resume", "--overwrite"):
        assert command(option) == 2 and command.source.read_bytes() == before


class BadDisk:
    """Stands in for `os` in the writer's module: a disk that holds `capacity` bytes, takes `chunk` at once, or fails.

    sync_error: of files that have a content
    """

    def __init__(self, *, capacity: int = 2**30, sync_error: int | None = None, chunk: int = 2**30) -> None:
        self._capacity, self._sync_error, self._chunk = capacity, sync_error, chunk

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, fd: int, data: memoryview) -> int:
        if self._capacity == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        size = min(len(data), self._chunk, self._capacity)
        self._capacity -= size
        return os.write(fd, data[:size])

    def fsync(self, fd: int) -> None:
        is_file = not Path(f"/proc/self/fd/{fd}").readlink().is_dir()
        if self._sync_error is not None and is_file and os.fstat(fd).st_size:
            raise OSError(self._sync_error, os.strerror(self._sync_error))
        os.fsync(fd)


FULL, UNSYNCED = "No space left on device", "Input/output error"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("disk", "size"),
    [
        *((BadDisk(capacity=size), size) for size in (0, 1, 700)),
        (BadDisk(capacity=400, chunk=3), 400),
        (BadDisk(sync_error=errno.EIO), None),
    ],
)
def test_a_bad_disk_is_exit_3_and_resumable(
    done: Command, whole: bytes, disk: BadDisk, size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the rows before a disk was full, with the last one torn at any byte; short writes; and refused syncs."""
    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "os", disk)
        assert done("--overwrite") == 3
    error = done.said()
    assert (UNSYNCED if size is None else FULL) in error and "--resume" in error and "Traceback" not in error
    assert size is None or len(done.data) == size
    assert done("--resume") == 1 and done.data == whole


def test_no_space_for_the_ordered_file(done: Command, whole: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a disk that cannot hold the rows twice: exit 3, all rows there, and --resume orders them later."""
    done.out.write_bytes(b"".join(reversed(done.lines())))
    with monkeypatch.context() as patch:
        patch.setattr(FileWriter, "_complete", Mock(side_effect=OSError(errno.ENOSPC, FULL)))
        assert done("--resume") == 3 and "Cannot order" in done.said()
    assert done("--resume") == 1 and done.data == whole and done.counts()[1] == 0


def test_max_errors_stops_at_that_error(command: Command) -> None:
    """Guards --max-errors: exit 3 with exactly N error rows, and --resume continues."""
    command.write(["{bad"] * 9 + ROWS)
    for number in (1, 4):
        assert command("--overwrite", "--max-errors", number) == 3
        assert len([row for row in command.rows() if row.get("error")]) == number
        assert f"Stopped at error {number}" in command.said()
    assert command("--resume") == 1 and len(command.lines()) == 15


def test_the_fingerprint_is_of_the_content(done: Command, tmp_path: Path, model_folder: Path) -> None:
    """Guards --resume with a model that was moved, and against another model under the same name."""
    moved = shutil.copytree(model_folder, tmp_path / "moved")
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"_name_or_path": "elsewhere", "transformers_version": "9"}))
    assert done("--resume", "-m", moved) == 1 and done.counts()[0] == 6
    weights = moved / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-4:] = b"\x00\x00\x80\x3f"
    weights.write_bytes(content)
    assert done("--resume", "-m", moved) == 2


def test_the_cause_of_another_key_is_said(command: Command, tmp_path: Path) -> None:
    """Guards what a run keeps beside its output: which option, file or line changed; without it, all that may have."""
    rows: list[dict[str, Any]] = [{"id": "a", "prompt": "hello"}, {"id": "b", "prompt": "there", "max_tokens": 3}]
    template = tmp_path / "say.jinja"
    template.write_text("Say {{ prompt }}")
    command.write(rows)
    command.options += ("--template", f"@{template}", "--max-tokens", "4")
    assert command() == 0
    command.model = shutil.copytree(command.model, tmp_path / "other")

    def cause(*arguments: object) -> str:
        assert command("--resume", *arguments) == 2
        return command.said().split("this run: ")[1].split(" (first: ")[0]

    assert cause("--seed", "1", "--system", "brief") == "2 made with different --system (none then, brief now)"
    assert cause("--seed", "1", "-q") == "2 made with different --seed (0 then, 1 now)"
    assert cause("--dtype", "bfloat16") == "2 made with different dtype (float32 then, bfloat16 now)"
    for name, part in (("chat_template.jinja", "chat template"), ("tokenizer_config.json", "tokenizer")):
        before = (file := command.model / name).read_text()
        file.write_text(f"x{before}" if "jinja" in name else json.dumps(json.loads(before) | {"new": 1}))
        assert cause() == f"2 made with different {part}"
        file.write_text(before)
    template.write_text("Tell {{ prompt }}")
    assert cause() == "2 made with different --template (Say {{ prompt }} then, Tell {{ prompt }} now)"
    template.write_text("Say {{ prompt }}")
    command.write([{**rows[0], "prompt": "other"}, rows[1]])
    assert cause() == "1 made with another id, prompt, field or LoRA adapter of the line"
    (command.folder / f".{command.out.name}.cbatch-run").unlink()
    assert cause().startswith("1 made with another input, another --system")
    assert command("--resume", "--recompute-changed") == 0
    assert cause("--seed", "1").startswith("2 made with different --seed")
