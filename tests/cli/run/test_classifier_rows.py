"""Score rows of `cbatch run` on a model with a classification head, and requests that rank documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cbatch.api import Engine
from cbatch.cli.common import loading
from cbatch.cli.main import run_command
from cbatch.requests.completion import Classification, Completion
from tests.support.classifiers import expected, save_classifier
from tests.support.command import Command
from tests.support.in_process_replicas import InProcessLauncher

DOCUMENTS = [" world", " a", "zz", " world"]


def call(name: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


ROWS: list[Any] = [
    {"prompt": "hello", "score": True, "note": 1},
    {"prompt": "hello", "raw": True, "choices": DOCUMENTS, "score": True},
    call("pair", "/v1/score", model="m", text_1="hello", text_2=DOCUMENTS),
    call("ranked", "/v1/rerank", model="m", query="hello", documents=DOCUMENTS, top_n=None),
    call("best", "/v1/rerank", model="m", query="hello", documents=DOCUMENTS, top_n=2),
    call("wrong", "/v1/rerank", query="hello", documents=DOCUMENTS, top_n=-1),
    call("none", "/v1/rerank", query="hello"),
    {"prompt": "hello", "max_tokens": 3},
]


@pytest.fixture
def reranker(command: Command, tmp_path: Path) -> Command:
    command.model = save_classifier(tmp_path / "reranker")
    return command


def logits_of(command: Command, texts: list[str]) -> list[float]:
    tokenizer: Any = AutoTokenizer.from_pretrained(command.model)
    return [one[0] for one in expected(command.model, [tokenizer.encode(text) for text in texts])]


def test_rows_equal_transformers(reranker: Command) -> None:
    """Guards each form of a row, the order of what is ranked, and what is read back."""
    code, rows = reranker.answer(ROWS)
    (alone,) = logits_of(reranker, ["hello"])
    right = logits_of(reranker, [f"hello{text}" for text in DOCUMENTS])
    order = sorted(range(len(right)), key=lambda number: (-right[number], number))
    assert code == 1 and [row["index"] for row in rows if row.get("error")] == [5, 6, 7]
    assert rows[0]["logits"] == {"RELEVANT": pytest.approx(alone, abs=1e-4)} and rows[0]["extra"] == {"note": 1}
    assert list(rows[0])[2:7] == ["text", "label", "score", "scores", "logits"]
    assert [each["index"] for each in rows[1]["choices"]] == order
    pair, ranked, best = (row["response"]["body"] for row in rows[2:5])
    assert [each["index"] for each in pair["data"]] == [0, 1, 2, 3]
    for each in (*pair["data"], *rows[1]["choices"]):
        assert each["logits"]["RELEVANT"] == pytest.approx(right[each["index"]], abs=1e-4)
        assert each["score"] == each["scores"]["RELEVANT"] and each["text"] == DOCUMENTS[each["index"]]
    assert [each["index"] for each in ranked["results"]] == order and best["results"] == ranked["results"][:2]
    scores = {each["index"]: each["score"] for each in pair["data"]}
    for each in ranked["results"]:
        assert each["relevance_score"] == scores[each["index"]]
        assert each["document"] == {"text": DOCUMENTS[each["index"]]}
    assert rows[3]["key"] != rows[4]["key"]
    for row in rows[:5]:
        read = Completion.from_row(row).score
        assert isinstance(read, Classification) and read.to_dict()["label"] == "RELEVANT"
    messages = [(row.get("error") or {})["message"] for row in rows[5:]]
    for message, part in zip(
        messages, ["top_n must be at least 0", "documents must be", "can only classify"], strict=True
    ):
        assert part in message
    data = reranker.data
    assert reranker("--resume") == 1 and reranker.data == data


@pytest.mark.parametrize("end", ["csv", "parquet"])
def test_tables(reranker: Command, tmp_path: Path, end: str) -> None:
    """Guards tables of such rows, which go on, and text whose lines are classified."""
    source, out = tmp_path / "in.txt", tmp_path / f"out.{end}"
    source.write_text("hello\nworld\n")
    words = ["run", str(source), "-o", str(out), "-m", str(reranker.model), "--dtype", "float32", "--score"]
    assert run_command(words) == 0
    made = out.read_bytes()
    assert run_command([*words, "--resume"]) == 0 and out.read_bytes() == made
    assert end != "csv" or b",rest" not in made.splitlines()[0]


def test_replicas(reranker: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards replicas: the bytes of one engine's output."""
    reranker.answer(ROWS)
    whole, made = reranker.data, list[InProcessLauncher]()
    with Engine(str(reranker.model), device="cpu", dtype="float32") as engine:

        def make(options: Any, config: Any) -> InProcessLauncher:
            made.append(InProcessLauncher(engine, options.wanted))
            return made[-1]

        monkeypatch.setattr(loading, "make_launcher", make)
        assert reranker("--overwrite", "--replicas", "2") == 1 and reranker.data == whole and made


def test_models_that_cannot_rank(command: Command, tmp_path: Path) -> None:
    """Guards ranking by a model without a head, or with several labels, which would mean nothing."""
    _, (row,) = command.answer([ROWS[3]])
    assert "this one has no classification head" in row["error"]["message"]
    command.model = save_classifier(tmp_path / "several", labels=["a", "b"])
    _, rows = command.answer(ROWS[1:4])
    assert [each["index"] for each in rows[0]["choices"]] == [0, 1, 2, 3] and rows[0]["label"] in ("a", "b")
    assert "a head with 2 labels" in rows[2]["error"]["message"]
