"""Score rows of `cbatch run`: they equal the log-softmax of transformers, and keep the promises of all other rows."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cbatch.api import Engine
from cbatch.cli.main import run_command
from cbatch.requests.completion import Completion
from tests.support.command import Command
from tests.support.in_process_replicas import InProcessLauncher

CONTEXT = "The system helps the assistant. " * 2
ROWS: list[Any] = [
    {"prompt": CONTEXT, "raw": True, "choices": [" yes", " no", " no, never"], "score": True},
    {"id": "c", "prompt": "user hel", "raw": True, "completion": "lo user", "score": True, "logprobs": 2},
    {"prompt": "hello world, said the user", "score": True, "note": [1]},
    {"prompt_token_ids": [5, 6, 7], "choices": [[8], [9], [8, 9], [8, 10]], "score": True},
    {"prompt": "hi", "choices": ["a", "bc"], "score": True},
    {"prompt": "hi", "max_tokens": 3},
    {"prompt": "hi", "choices": ["a", ""], "score": True},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}], "score": True},
]
CUT: list[tuple[object, ...]] = [("--max-batch-tokens", "3", "--max-seqs", "2"), ("--no-prefix-cache",), ()]


@pytest.fixture(scope="module")
def expected(model_folder: Path) -> Callable[[list[int], int], list[float]]:
    """Gives log-probabilities of token ids from a number on, as transformers computes them."""
    network = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)

    @torch.no_grad()
    def compute(token_ids: list[int], start: int) -> list[float]:
        places = torch.log_softmax(network(torch.tensor([token_ids])).logits[0].double(), -1)
        return [float(places[at - 1, token_ids[at]]) for at in range(start, len(token_ids))]

    return compute


def check(shown: dict[str, Any], right: list[float]) -> None:
    """Compares the fields of a continuation."""
    assert shown["num_tokens"] == len(right) and shown["logprob"] == pytest.approx(sum(right), abs=2e-4)
    assert shown["mean_logprob"] == pytest.approx(sum(right) / len(right), abs=1e-4)


@pytest.mark.parametrize("options", CUT, ids=["chunks of 3", "no cache", "whole"])
def test_scores_equal_transformers(
    command: Command, model_folder: Path, expected: Any, options: tuple[object, ...]
) -> None:
    """Guards each figure, and the order of choices, however prompts are cut and shared; a shift by one would show."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder)
    code, rows = command.answer(ROWS, *options)
    assert code == 1 and [row["index"] for row in rows if "error" in row] == [6]
    for row, asked in zip(rows[:2], ROWS, strict=False):
        context = tokenizer.encode(asked["prompt"])
        thens = asked.get("choices") or [asked["completion"]]
        for shown in row.get("choices", [{"index": 0, **row}]):
            ids = tokenizer.encode(asked["prompt"] + thens[shown["index"] if "choices" in row else 0])
            start = next((at for at, (a, b) in enumerate(zip(context, ids, strict=False)) if a != b), len(context))
            check(shown, expected(ids, start))
    ids = tokenizer.encode(ROWS[2]["prompt"])
    check(rows[2], expected(ids, 1))
    for shown in rows[3]["choices"]:
        then = ROWS[3]["choices"][shown["index"]]
        check(shown, expected([5, 6, 7, *then], 3))
    for row in rows[:4]:
        if "choices" in row:
            assert [one["logprob"] for one in row["choices"]] == sorted(
                (one["logprob"] for one in row["choices"]), reverse=True
            )
            assert row["text"] == row["choices"][0]["text"] and row["logprob"] == row["choices"][0]["logprob"]
    content = rows[1]["logprobs"]["content"]
    assert len(content) == rows[1]["num_tokens"] and all(len(one["top_logprobs"]) == 2 for one in content)
    assert rows[2]["extra"] == {"note": [1]} and rows[5]["usage"]["completion_tokens"] == 3
    assert "continuation 2 has no token to score" in rows[6]["error"]["message"]


def test_an_answer_is_scored_behind_its_template(command: Command, engine: Engine, expected: Any) -> None:
    """Guards chat rows: choices stand where the model's answer would, and a last message of the model is one."""
    _, rows = command.answer(ROWS[4:8])
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    for shown in rows[0]["choices"]:
        ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}], answer=["a", "bc"][shown["index"]])
        assert list(ids[: len(prompt)]) == list(prompt)
        check(shown, expected(list(ids), len(prompt)))
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}], answer="hello")
    check(rows[3], expected(list(ids), len(prompt)))


def test_choices_are_computed_once(command: Command) -> None:
    """Guards the work of a row: its prompt once, and of choices only what differs before their last tokens."""
    ids = list(range(3, 43))
    row = {"prompt_token_ids": ids, "choices": [[5], [6], [7], [8, 9], [8, 10]], "score": True}
    command.answer([row], "--block-size", "4")
    figures = command.figures()
    assert figures["prompt_tokens"] == 40 + 3 + 1 + 2 and figures["output_tokens"] == 0
    assert figures["truncated"] == figures["empty"] == 0
    assert figures["steps"] == 1


@pytest.mark.parametrize("kept", [0, 3, 7])
def test_a_run_that_goes_on(command: Command, kept: int) -> None:
    """Guards --resume: the same bytes as of one run, and keys in which every choice counts."""
    command.answer(ROWS)
    whole = command.data
    command.out.write_bytes(b"".join(command.lines()[:kept]) + command.lines()[kept][:9])
    assert command("--resume") == 1 and command.data == whole and command.counts() == (kept, 8 - kept)
    changed = [{**ROWS[0], "choices": [" yes", " no", " now"]}, *ROWS[1:]]
    command.write(changed)
    assert command("--resume") == 2 and command("--resume", "--recompute-changed") == 1
    assert command.counts() == (7, 1)


def test_replicas_and_verify(launchers: list[InProcessLauncher], command: Command) -> None:
    """Guards the bytes of log-probabilities in rows of replicas, of which one dies, and `cbatch verify` of them."""
    rows = [{**row, "id": f"{copy}/{number}"} for copy in range(5) for number, row in enumerate(ROWS)]
    _, found = command.answer(rows)
    whole = command.data
    assert len(found) == 40 and command("--overwrite", "--replicas", "3") == 1 and command.data == whole
    assert launchers
    command.said()
    words = ["verify", str(command.out), "--prompts", str(command.source), "-m", str(command.model)]
    assert run_command([*words, "--sample", "100%", "--dtype", "float32"]) == 0


def test_columns_of_tables(command: Command, tmp_path: Path) -> None:
    """Guards --score: choices and completions in cells, texts of plain lines, and tables that give their rows back."""
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    with source.open("w", newline="") as file:
        rows = [["question", "choices", "completion"], ["hi", '["a", "b"]', ""], ["ho", "", "c"], ["hu", "no list", ""]]
        csv.writer(file).writerows(rows)
    command.source = source
    assert command("--score", "--raw", "--template", "{question}", "-o", out) == 1
    with out.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [json.loads(row["texts"]) if row["texts"] else row["text"] for row in found][1:] == ["c", ""]
    assert {*json.loads(found[0]["texts"])} == {"a", "b"} and float(found[0]["logprob"]) < 0
    assert "choices must be a list of texts" in found[2]["error_message"] and "rest" not in found[0]
    assert run_command(["convert", str(out), str(tmp_path / "back.jsonl")]) == 0
    assert command("--score", "--raw", "--template", "{question}", "-o", tmp_path / "own.jsonl") == 1
    assert (tmp_path / "back.jsonl").read_bytes() == (tmp_path / "own.jsonl").read_bytes()
    command.source = tmp_path / "in.txt"
    command.source.write_text("hello world\nhi\n")
    assert command("--score", "--overwrite") == 0 and all(row["num_tokens"] > 0 for row in command.rows())
    assert command("--score", "--check") == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"completion": "a", "choices": ["a"]}, "the row has both completion and choices"),
        ({"choices": []}, "choices must be 1 to 1,024 texts, not 0"),
        ({"choices": "ab"}, "choices must be a list of texts, not a string"),
        ({"choices": ["a", 5]}, "choice 2 must be a string or token ids, not a number"),
        ({"completion": True}, "completion must be a string or token ids, not"),
        ({"completion": "a", "regex": "b"}, "regex has no meaning in a score row"),
        ({"prompt": "x" * 3000, "completion": "a"}, "context"),
        ({"completion": [10**6]}, "1000000 is not in the model's vocabulary"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ", ".join(value),
)
def test_rows_that_cannot_be_scored(command: Command, fields: dict[str, Any], message: str) -> None:
    """Guards errors that say what is wrong, beside rows that are scored."""
    code, rows = command.answer([{"prompt": "a", "raw": True, "score": True, **fields}, ROWS[3]])
    assert code == 1 and message in rows[0]["error"]["message"] and "error" not in rows[1]


def test_lines_of_vllm(command: Command) -> None:
    """Guards `/v1/score`: the scores of a plain row in the order of the request, read again, and its errors."""
    texts, then = "The system ", ["helps", "user", " x"]
    bodies = [{"text_1": texts, "text_2": then}, {"queries": [texts], "documents": then[0]}, {"text_1": "a"}]
    bodies += [{"text_1": ["a", "b"], "text_2": "c"}, {"text_1": "a", "text_2": "b", "tool": [], "max_token": 1}]
    lines = [{"custom_id": str(at), "url": "/v1/score", "body": body} for at, body in enumerate(bodies)]
    code, rows = command.answer([*lines, {"prompt": texts, "raw": True, "choices": then, "score": True}])
    whole, one, *wrong, own = rows
    data = whole["response"]["body"]["data"]
    assert code == 1 and [shown["index"] for shown in data] == [0, 1, 2] and data[0]["object"] == "score"
    assert [data[shown["index"]]["score"] for shown in own["choices"]] == [shown["logprob"] for shown in own["choices"]]
    assert one["response"]["body"]["data"] == data[:1]
    read = Completion.from_row(whole)
    assert [choice.score and choice.score.logprob for choice in read.choices] == [shown["score"] for shown in data]
    messages = [row["error"]["message"] for row in wrong]
    assert "text_2 must be a list of texts" in messages[0] and "text_1 must be one string" in messages[1]
    assert "did you mean" in messages[2]
    assert command("--resume") == 1 and command.counts() == (6, 0)


def test_other_columns_stay_data(command: Command) -> None:
    """Guards rows with columns of these names that are no score rows."""
    _, rows = command.answer([{"prompt": "hi", "score": 0.5, "completion": "x", "max_tokens": 2}])
    assert rows[0]["extra"] == {"score": 0.5, "completion": "x"} and rows[0]["finish_reason"]


def test_a_step_scores_a_limited_number_of_tokens(model_folder: Path) -> None:
    """Guards memory: a long text is scored in parts, whose logits fit, while others go on; the scores are the same."""
    draw = random.Random(0)
    texts = [[draw.randrange(3, 250) for _ in range(size)] for size in (120, 30, 5, 80)]
    with Engine(str(model_folder), device="cpu", dtype="float32", block_size=4) as engine:
        whole = [score.logprob for score in engine.score(texts)]
        engine.core.scheduler._max_scored = 7
        most: list[int] = []
        engine.on_step = lambda step: most.append(sum(len(chunk.to_score) for chunk in step.scheduled.chunks))
        found = [score.logprob for score in engine.score([[text[-1], *text[1:]] for text in texts])]
        assert len(found) == 4 and max(most) == 7 and len(most) >= sum(len(text) - 1 for text in texts) // 7
        engine.core.scheduler.check_integrity()
        assert [score.logprob for score in engine.score(texts)] == pytest.approx(whole, abs=1e-4)
