"""`cbatch verify`: which rows are run again, what differs, and what is told of it."""

from __future__ import annotations

import gzip
import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cbatch.cli.main import run_command
from cbatch.cli.verify.options import Sample
from cbatch.cli.verify.report import Difference, first_difference
from cbatch.model.cpu import CpuModel
from cbatch.runtime.batch import Logits
from tests.cli.verify.test_offline import Found, Verify
from tests.support.command import Command
from tests.support.model_folder import make_tokenizer, save_model
from tests.support.rows import read_rows, write_results
from tests.support.tiny_models import make_network


def test_sizes() -> None:
    """Guards shares that give less than a row, and numbers above that of the rows."""
    assert [Sample.parse("5%").size(total) for total in (1, 20, 21, 1000)] == [1, 1, 2, 50]
    assert [Sample.parse("100").size(total) for total in (1, 99, 5000)] == [1, 99, 100]
    assert Sample.parse("100%").size(7) == 7 and Sample.parse("0.1%").size(5000) == 5


def test_the_same_seed_takes_the_same_rows() -> None:
    """Guards a report that somebody else repeats."""
    sample = Sample.parse("10")
    assert sample.choose(1000, 0) == sample.choose(1000, 0) != sample.choose(1000, 1)
    assert sample.choose(1000, 0) == sorted(set(sample.choose(1000, 0))) and len(sample.choose(1000, 0)) == 10


ROW: dict[str, Any] = {
    "index": 0,
    "id": "a",
    "text": "The cat sat.",
    "finish_reason": "stop",
    "token_ids": [5, 6, 7, 2],
    "choices": [{"index": 0, "text": "The cat sat."}, {"index": 1, "text": "A dog ran.", "token_ids": [8, 9]}],
    "usage": {"completion_tokens": 4},
}


def test_equal_rows_have_no_difference() -> None:
    """Guards rows of --timings: seconds and cached tokens differ from run to run."""
    assert first_difference(ROW, dict(ROW)) is None
    timed = ROW | {"cached_tokens": 3, "ttft_s": 0.1, "elapsed_s": 0.2, "from_cache": True}
    assert first_difference(timed, ROW) is None and first_difference(ROW, timed) is None


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"text": "The cow sat.", "token_ids": [5, 8, 7, 2]},
         Difference("text", 0, 5, "character", 1, '"The cat sat."', '"The cow sat."')),
        ({"text": "The cat sat. It"}, Difference("text", 0, 12, "character", 4, '"The cat sat."', '"The cat sat. It"')),
        ({"text": None}, Difference("text", 0, None, None, None, '"The cat sat."', "null")),
        ({"token_ids": [5, 6, 8, 2]}, Difference("token_ids[2]", 0, 2, "token", None, "7", "8")),
        ({"token_ids": [5, 6]}, Difference("token_ids[2]", 0, 2, "token", None, "7", "null")),
        ({"choices": [ROW["choices"][0], {"index": 1, "text": "A dog.", "token_ids": [8, 3]}]},
         Difference("choices[1].text", 1, 5, "character", 1, '"A dog ran."', '"A dog."')),
        ({"usage": {"completion_tokens": 5}}, Difference("usage.completion_tokens", None, None, None, None, "4", "5")),
        ({"stop_reason": "END"}, Difference("stop_reason", 0, None, None, None, "null", '"END"')),
        ({"finish_reason": True}, Difference("finish_reason", 0, None, None, None, '"stop"', "true")),
    ],
)  # fmt: skip
def test_the_first_difference(changed: dict[str, Any], expected: Difference) -> None:
    """Guards offsets of characters and tokens, outputs after the first, fields that come and go, and other types."""
    assert first_difference(ROW, ROW | changed) == expected


def test_long_texts_are_cropped_around_the_difference() -> None:
    """Guards reports of long answers: a line each, with the place that differs in it."""
    found = first_difference({"text": "a" * 500 + "b" + "c" * 500}, {"text": "a" * 500 + "d" + "c" * 500})
    assert found is not None and found.offset == 500
    assert found.in_file == '"…' + "a" * 40 + "b" + "c" * 39 + '…"'
    assert str(found).startswith('text differs from character 500 on: "…aaa') and " in the file, " in str(found)
    listed = first_difference({"extra": list(range(100))}, {"extra": None})
    assert listed is not None and len(listed.in_file) == 81 and listed.now == "null"


def test_a_response_differs_in_its_output() -> None:
    """Guards the place in an answer of the Responses API, which has one output, against one of the whole row."""

    def row(**body: Any) -> dict[str, Any]:
        return {"custom_id": "r", "response": {"body": body}}

    said = [[{"type": "message", "content": [{"text": text}]}] for text in ("ab", "ac")]
    found = first_difference(*(row(output=one) for one in said))
    assert found is not None and found[:4] == ("response.body.output[0].content[0].text", 0, 1, "character")
    found = first_difference(*(row(metadata={"output": text}) for text in ("a", "b")))
    assert found is not None and found.output is None


USER = {"role": "user", "content": "hi"}
BODY = {"model": "m", "messages": [USER], "max_tokens": 6}
ROWS: list[dict[str, Any]] = [
    {"id": "a", "prompt": "hello", "max_tokens": 12},
    {"messages": [USER], "n": 2, "temperature": 1.0, "max_tokens": 8, "label": "kept"},
    {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": BODY},
    {"prompt": "hello", "temperatur": 1},
    {"prompt_token_ids": [5, 6, 7], "max_tokens": 9, "logprobs": 1},
]
OPTIONS = ["--device", "cpu", "--dtype", "float32", "--token-ids"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes the fast path, on which a row has the same bits in any company."""
    folder = save_model(tmp_path_factory.mktemp("model"))
    sizes = {"vocab_size": len(make_tokenizer()), "max_position_embeddings": 256, "eos_token_id": 2}
    make_network("qwen3", **sizes).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the input and the output of a run."""
    command = Command(tmp_path_factory.mktemp("run"), model, ["", *ROWS])
    assert command("--timings", *OPTIONS) == 1
    return command.folder


@pytest.fixture
def rows(finished: Path) -> list[dict[str, Any]]:
    return read_rows(finished / "out.jsonl")


@pytest.fixture
def verify(finished: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Verify:
    """Verifies rows of output, or a file of them."""

    def call(output: list[Any] | Path, *arguments: str) -> Found:
        path = output if isinstance(output, Path) else write_results(tmp_path / "out.jsonl", output)
        prompts = ["--prompts", str(finished / "in.jsonl"), "-m", str(model), "--sample", "100%"]
        code = run_command(["verify", str(path), *prompts, *OPTIONS, *arguments])
        printed = capsys.readouterr()
        return Found(code, json.loads(printed.out or "{}"), printed.err)

    return call


def test_an_untouched_file_is_equal(verify: Verify, finished: Path, tmp_path: Path) -> None:
    """Guards every form of row, error rows and --timings; and compressed files."""
    found = verify(finished / "out.jsonl")
    assert found.code == 0, found
    counts = {"rows": 5, "sampled": 5, "compared": 5, "equal": 5, "different": 0, "other_options": 0}
    assert found.report.items() >= counts.items() and found.report["first_differences"] == []
    assert "5 rows of 5 run again, alone and together: all as in the file" in found.sentences
    packed = tmp_path / "out.jsonl.gz"
    packed.write_bytes(gzip.compress((finished / "out.jsonl").read_bytes()))
    assert verify(packed).report == found.report
    fewer = found.report | {"sampled": 2, "compared": 2, "equal": 2}
    assert verify(packed, "--sample", "2", "-q") == (0, fewer, "")


def changed(text: str, place: int) -> str:
    return text[:place] + ("#" if text[place] != "#" else "+") + text[place + 1 :]


def test_a_changed_character_is_found_where_it_is(verify: Verify, rows: list[dict[str, Any]]) -> None:
    """Guards the offsets: a text, a second output, the body of an OpenAI row, an error, a token; and the exit code."""
    message = rows[2]["response"]["body"]["choices"][0]["message"]
    rows[0]["text"] = changed(rows[0]["text"], 3)
    rows[1]["choices"][1]["text"] = changed(rows[1]["choices"][1]["text"], 2)
    message["content"] = changed(message["content"], 1)
    rows[3]["error"]["message"] = changed(rows[3]["error"]["message"], 7)
    rows[4]["token_ids"][4] += 1
    found = verify(rows)
    assert found.code == 1 and found.report["different"] == 5 and found.report["depend_on_company"] == 0
    places = [
        (one["index"], one["id"], one["alone"]["field"], one["alone"]["output"], one["alone"]["offset"])
        for one in found.report["first_differences"]
    ]
    assert places == [
        (1, "a", "text", 0, 3),
        (2, None, "choices[1].text", 1, 2),
        (3, "c", "response.body.choices[0].message.content", 0, 1),
        (4, None, "error.message", None, 7),
        (5, None, "token_ids[4]", 0, 4),
    ]
    first = found.report["first_differences"][0]
    assert first["alone"] == first["together"] and json.loads(first["alone"]["in_file"])[3] in "#+"
    assert 'line 2 ("a"), alone and together: text differs from character 3 on' in found.sentences
    assert "5 differ from the file; 5 are the same in any company, and not as in the file" in found.sentences


def test_a_model_that_depends_on_company_is_found(
    verify: Verify, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards what the command is for: kernels whose result depends on what else is in a step."""
    plain = CpuModel.forward

    def forward(self: CpuModel, batch: Any, *rest: Any) -> Logits:
        logits = plain(self, batch, *rest)
        time.sleep(0.02)  # so that all rows have begun before one ends
        return logits if len(batch.stops) == 1 else Logits(logits.values.roll(1, dims=1))

    monkeypatch.setattr(CpuModel, "forward", forward)
    found = verify([row for row in rows if "choices" not in row])
    differing = found.report["first_differences"]
    assert found.code == 1 and found.report["depend_on_company"] == found.report["different"] == len(differing) == 3
    assert all(one["alone"] is None and one["together"] is not None for one in differing)
    assert "3 depend on what runs beside" in found.sentences and "alone: as in the file" in found.sentences


@pytest.mark.parametrize("is_alone", [True, False])
def test_an_interruption_ends_either_pass(
    verify: Verify, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    """Guards Ctrl-C: the pass ends, no other one begins, nothing is reported, and the exit code is the signal's."""
    plain, before, main = CpuModel.forward, signal.getsignal(signal.SIGINT), threading.main_thread().ident
    were_alone: list[bool] = []

    def forward(self: CpuModel, batch: Any, *rest: Any) -> Logits:
        assert main is not None
        were_alone.append(len(batch.stops) == 1)
        is_time = were_alone[-1] is is_alone and were_alone.count(is_alone) == 1
        if is_time:
            signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.3 if is_time else 0.02)  # so that the signal comes, and all rows begin, before one ends
        return plain(self, batch, *rest)

    monkeypatch.setattr(CpuModel, "forward", forward)
    found = verify([row for row in rows if "choices" not in row])
    assert (found.code, found.report) == (130, {}) and "run again" not in found.sentences
    assert (False in were_alone) is not is_alone
    assert signal.getsignal(signal.SIGINT) is before


def test_rows_of_other_options_are_not_compared(verify: Verify, rows: list[dict[str, Any]]) -> None:
    """Guards against differences that are none: what differs is said, and the exit code is 2."""
    found = verify(rows, "--seed", "1", "--max-tokens", "3")
    assert found.code == 2 and (found.report["other_options"], found.report["compared"]) == (4, 1)
    (first,) = found.report["first_other_options"]
    assert first["index"] == 1 and first["rows"] == 4 and first["made_with"].startswith("other sampling parameters")
    assert "4 rows were made with other sampling parameters" in found.sentences
    rows[0]["text"] = "?"
    assert verify(rows[:1], "--seed", "1").sentences.endswith("none of 1 sampled row could be run again\n")


def test_damaged_lines_are_told(verify: Verify, finished: Path, tmp_path: Path) -> None:
    """Guards rows whose bytes have changed in the file: they are named and not run, the others are."""
    data = (finished / "out.jsonl").read_bytes()
    (tmp_path / "changed.jsonl").write_bytes(data.replace(b"temperatur", b"temperatua", 1))
    found = verify(tmp_path / "changed.jsonl")
    assert (found.code, found.report["damaged"], found.report["compared"], found.report["equal"]) == (1, 1, 4, 4)
    assert found.report["first_damaged"] == [{"line": 4, "reason": "not as it was written: its check does not fit"}]
    assert "line 4 of " in found.sentences and "is damaged: it is not as it was written" in found.sentences


def test_what_cannot_be_run_again_is_left_out(verify: Verify, rows: list[dict[str, Any]]) -> None:
    """Guards answers of tools and commands, rows without a line, rows that a later one replaces, and a torn end."""
    rows[0] |= {"validation": {"valid": True, "tries": 2, "errors": ["short"]}}
    rows[1] |= {"tool_messages": [{"role": "tool"}]}
    replaced = rows[4] | {"text": "replaced"}
    torn = '{"index": 5, "id": nu'
    found = verify([replaced, *rows, rows[2] | {"index": 99}, torn])
    assert found.code == 2 and found.report["left_out"] == {"validated": 1, "tools": 1, "no line": 1}
    assert (found.report["rows"], found.report["compared"], found.report["equal"]) == (6, 3, 3)
    assert "left out: 1 row that called tools" in found.sentences


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("none.jsonl", None, "Cannot read"),
        ("out.csv", b"index,text\n", "is not a table of results"),
        ("torn.jsonl.gz", gzip.compress(b"x" * 99, mtime=0)[:-9], "cannot be read"),
    ],
)
def test_files_that_are_no_output(
    verify: Verify, tmp_path: Path, name: str, content: bytes | None, sentence: str
) -> None:
    """Guards exit code 2 and a sentence for each, before a model is loaded."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    found = verify(tmp_path / name)
    assert (found.code, found.report) == (2, {}) and sentence in found.sentences
