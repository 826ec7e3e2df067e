"""Rows of `cbatch run` that are embedded: they equal transformers, and keep the promises of all other rows."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai.types import CreateEmbeddingResponse
from transformers import AutoTokenizer

from cbatch.api import Engine
from tests.support.command import Command
from tests.support.embedders import TEXTS, expected
from tests.support.in_process_replicas import InProcessLauncher
from tests.support.rows import write_rows

BODY = {"model": "m", "input": TEXTS[:2], "user": "me", "encoding_format": "float"}
CALL = {"custom_id": "c", "method": "POST", "url": "/v1/embeddings", "body": BODY}
ROWS: list[Any] = [
    {"id": "a", "input": TEXTS[1], "embed": True, "note": [1]},
    {"input": TEXTS[:3], "embed": True, "dimensions": 8},
    {"input": [5, 6, 7], "embed": True},
    {"prompt": TEXTS[4], "embed": True, "encoding_format": "base64"},
    {"prompt": "hi", "max_tokens": 3},
    {"prompt": "hi", "score": True},
    {"input": "x" * 3000, "embed": True},
    CALL,
    CALL | {"body": BODY | {"input": TEXTS[0], "encoding_format": "base64", "dimensions": 4}},
]
CUT: list[tuple[object, ...]] = [("--max-batch-tokens", "3", "--max-seqs", "2"), ()]


def cut(vectors: Any, dimensions: int) -> Any:
    return vectors[:, :dimensions] / np.linalg.norm(vectors[:, :dimensions], axis=1, keepdims=True)


def numbers(text: str) -> Any:
    return np.frombuffer(base64.b64decode(text), "<f4")


@pytest.mark.parametrize("options", CUT, ids=["chunks of 3", "whole"])
def test_rows_equal_transformers(command: Command, model_folder: Path, options: tuple[object, ...]) -> None:
    """Guards every form of a row beside rows that generate and score, and OpenAI's, however prompts are cut."""
    right = expected(model_folder, TEXTS)
    code, rows = command.answer(ROWS, *options)
    assert code == 1
    np.testing.assert_allclose(rows[0]["embedding"], right[1], atol=1e-5)
    assert list(rows[0]) == ["index", "id", "embedding", "usage", "key", "extra"] and rows[0]["extra"] == {"note": [1]}
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder)
    counts = [len(tokenizer.encode(text)) for text in TEXTS]
    assert rows[0]["usage"] == {"prompt_tokens": counts[1], "completion_tokens": 0, "total_tokens": counts[1]}
    np.testing.assert_allclose(rows[1]["embeddings"], cut(right[:3], 8), atol=1e-5)
    assert len(rows[2]["embedding"]) == 48 and rows[2]["usage"]["prompt_tokens"] == 3
    np.testing.assert_allclose(numbers(rows[3]["embedding"]), right[4], atol=1e-5)
    assert rows[4]["finish_reason"] and rows[5]["num_tokens"] > 0
    assert rows[6]["error"]["code"] == "prompt_too_long"
    response = CreateEmbeddingResponse.model_validate(rows[7]["response"]["body"], strict=True)
    assert [one.index for one in response.data] == [0, 1] and response.model == "m" and rows[7]["custom_id"] == "c"
    np.testing.assert_allclose([one.embedding for one in response.data], right[:2], atol=1e-5)
    assert response.usage.prompt_tokens == response.usage.total_tokens == sum(counts[:2])
    shown = rows[8]["response"]["body"]["data"][0]["embedding"]
    np.testing.assert_allclose(numbers(shown), cut(right[:1], 4)[0], atol=1e-5)
    assert command.figures()["empty"] == command.figures()["truncated"] - (rows[4]["finish_reason"] == "length") == 0


def test_resumed(command: Command) -> None:
    """Guards the journal and keys: rows are kept, and those that ask for something else are computed again."""
    command.answer(ROWS)
    whole = command.lines()
    command.out.write_bytes(b"".join(whole[:3]) + whole[3][:40])
    assert command("--resume") == 1 and command.lines() == whole and command.counts() == (3, len(ROWS) - 3)
    command.write([ROWS[0] | {"dimensions": 4}, *ROWS[1:]])
    assert command("--resume") == 2
    assert command("--resume", "--recompute-changed") == 1 and command.counts() == (len(ROWS) - 1, 1)
    assert command.rows()[0]["embedding"][:2] != json.loads(whole[0])["embedding"][:2]


def test_replicas(command: Command, launchers: list[InProcessLauncher]) -> None:
    """Guards replicas, one of which dies: the bytes of one engine's output."""
    command.answer(ROWS)
    whole = command.data
    assert command("--overwrite", "--replicas", "2") == 1 and command.data == whole and launchers


def test_tables(command: Command, model_folder: Path, tmp_path: Path) -> None:
    """Guards --embed over a template, and a column of floats, of which the rows are restored to the byte."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    command.source = write_rows(tmp_path / "in.jsonl", [{"text": text, "n": n} for n, text in enumerate(TEXTS)])
    options = ("--embed", "--template", "{text}")
    assert command(*options, "-o", tmp_path / "out.jsonl") == 0
    for name in ("out.parquet", "out.csv", "out.db"):
        assert command(*options, "-o", tmp_path / name) == 0
        assert command(*options, "-o", tmp_path / name, "--resume") == 0 and command.counts() == (len(TEXTS), 0)
        with pytest.MonkeyPatch.context():
            assert main("convert", tmp_path / name, tmp_path / "back.jsonl", "--overwrite") == 0
        assert (tmp_path / "back.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.schema.field("embedding").type == pyarrow.list_(pyarrow.float32()) and "rest" not in table.column_names
    found = np.array(table.column("embedding").to_pylist())
    np.testing.assert_allclose(found, expected(model_folder, TEXTS), atol=1e-5)


def main(*words: object) -> int:
    from cbatch.cli.main import run_command

    return run_command(list(map(str, words)))


def test_an_array(command: Command, model_folder: Path, tmp_path: Path) -> None:
    """Guards .npy: rows in the order of the input, NaN for an error, a journal that resumes, and what is refused."""
    out = tmp_path / "out.npy"
    rows = [{"input": text, "embed": True} for text in [*TEXTS, "x" * 3000]]
    command.write(rows)
    assert command("-o", out) == 1 and "1 failed" in command.said()
    found = np.load(out)
    assert found.dtype == np.float32 and found.shape == (6, 48) and np.isnan(found[5]).all()
    np.testing.assert_allclose(found[:5], expected(model_folder, TEXTS), atol=1e-5)
    assert command("-o", out) == 2
    out.unlink()
    command.write([*rows, {"input": "b", "embed": True}])
    assert command("-o", out, "--resume") == 1 and command.counts() == (6, 1) and np.load(out).shape == (7, 48)
    assert main("convert", out, tmp_path / "back.parquet") == 0
    assert main("verify", out, "-m", model_folder, "--dtype", "float32", "-q") == 0
    for row, sentence in ((ROWS[4], "no embedding"), (ROWS[1], "3 embeddings")):
        command.write([row])
        assert command("-o", out, "--overwrite") == 2 and f"Row 0 has {sentence}" in command.said()
    command.write([rows[0], rows[1] | {"dimensions": 5}])
    assert command("-o", out, "--overwrite") == 2 and "of 5 and of 48 numbers" in command.said()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"embed": None}, "the row has none of messages"),
        ({"input": ["a", 5]}, "number 2 is a number"),
        ({"input": []}, "a list of 1 to 2,048 texts, not 0"),
        ({"input": ["a", ""]}, "number 2 is empty"),
        ({"prompt": "b"}, "a row that is embedded has input, and not input and prompt"),
        ({"dimensions": 1.5}, "dimensions must be a whole number"),
        ({"dimensions": 49}, "dimensions must be at most 48"),
        ({"encoding_format": "int8"}, "encoding_format must be float or base64"),
        ({"prompt_name": "query"}, "no prompt 'query'; those they have: none"),
        ({"temperature": 1}, "temperature has no meaning for what is embedded"),
        ({"system": "Be brief."}, "system needs the chat template"),
        ({"input": [10**6]}, "1000000 is not in the model's vocabulary"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ", ".join(value),
)
def test_rows_that_cannot_be_embedded(command: Command, fields: dict[str, Any], message: str) -> None:
    """Guards errors that say what is wrong, beside rows that are embedded."""
    code, rows = command.answer([{"input": "a", "embed": True} | fields, ROWS[2]])
    assert code == 1 and message in rows[0]["error"]["message"] and "embedding" in rows[1]


def test_other_columns_stay_data(command: Command) -> None:
    """Guards rows with columns of these names that generate."""
    fields = {"embed": 0.5, "input": "x", "dimensions": 3, "encoding_format": "y"}
    _, rows = command.answer([{"prompt": "hi", **fields, "max_tokens": 2}])
    assert rows[0]["extra"] == fields and rows[0]["finish_reason"]


def test_forms_of_a_run(command: Command, tmp_path: Path) -> None:
    """Guards --embed over rows of text and token ids, --check, and what it does not go with."""
    code, rows = command.answer([{"prompt": "a"}, {"input": "a"}, {"prompt_token_ids": [5]}], "--embed")
    assert code == 0 and rows[0]["embedding"] == rows[1]["embedding"]
    assert command("--embed", "--check") == 0 and command.report()["prompt_tokens"]["total"] > 2
    code, rows = command.answer([{"messages": [{"role": "user", "content": "a"}]}], "--embed")
    assert code == 1 and "has input, and not messages" in rows[0]["error"]["message"]
    for option in (("--score",), ("--validate", "regex=a")):
        assert command("--embed", *option, "--overwrite") == 2 and "--embed generates nothing" in command.said()
    command.source = tmp_path / "in.txt"
    command.source.write_text("hello world\nhi\n")
    assert command("--embed", "--overwrite", "--cache", tmp_path / "cache") == 0
    assert len(command.rows()) == 2 and all("embedding" in row for row in command.rows())


def test_results_in_python(command: Command, model_folder: Path) -> None:
    """Guards rows in Python: their embeddings are arrays, also of results that are read again."""
    with Engine(str(model_folder), device="cpu", dtype="float32") as engine:
        results = list(engine.map([ROWS[0], ROWS[1], CALL], path=command.out))
        again = list(engine.map([ROWS[0], ROWS[1], CALL], path=command.out, resume=True))
    for one, other in zip(results, again, strict=True):
        assert one.error is None and one.text == "" and one.embeddings is not None and other.embeddings is not None
        np.testing.assert_array_equal(one.embeddings, other.embeddings)
