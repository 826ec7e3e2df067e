"""The example of the evaluation harness gives the figures of the harness's own model of transformers in float32."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cbatch import Engine

lm_eval = pytest.importorskip("lm_eval", reason="needs `pip install lm_eval`")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "evaluation_harness.py"
LONGEST = 60
"""Most tokens before a scored one, here."""

LONG = "The system helps the assistant, said the user; and the world says hello. " * 3


@pytest.fixture(scope="module")
def ours(model_folder: Path) -> Iterator[Any]:
    with Engine(str(model_folder), device="cpu", dtype="float32") as engine:
        yield runpy.run_path(str(EXAMPLE))["EngineLM"](engine, max_length=LONGEST)


@pytest.fixture(scope="module")
def theirs(model_folder: Path) -> Any:
    return HFLM(pretrained=str(model_folder), dtype="float32", device="cpu", batch_size=1, max_length=LONGEST)


def instances(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    return [Instance(kind, {}, args, number) for number, args in enumerate(arguments)]  # type: ignore[arg-type]


@pytest.mark.parametrize("special", [None, True, False])
def test_tokens(special: bool | None, ours: Any, theirs: Any) -> None:
    """Guards special tokens: BOS as the tokenizer adds it, never twice, and none where none is asked for."""
    for text in ("hello world", "<|bos|>hello", "", "user<|im_end|>", " é😀"):
        expected = theirs.tok_encode(text, add_special_tokens=special)
        if special is True and text.startswith("<|bos|>"):
            assert expected[:2] == [0, 0]  # which the harness asks for nowhere
        else:
            assert ours.tok_encode(text, add_special_tokens=special) == expected, text


def test_continuations(ours: Any, theirs: Any) -> None:
    """Guards empty contexts, spaces between context and answer, and contexts that are cut from the left."""
    requests = instances(
        "loglikelihood",
        ("hello", " world"), ("hello ", "world"), ("user hel", "lo user"), ("", "hello world"), ("", "<|bos|>hello"),
        ("<|bos|>hello", " you"), (LONG, " hello world"), (LONG, "x"), ("hello world" * 4, "x" * LONGEST), ("a", "b"),
    )  # fmt: skip
    found = ours.loglikelihood(requests, disable_tqdm=True)
    # One by one: it would take the logits of one request for those of another whose tokens are split elsewhere.
    expected = [one for request in requests for one in theirs.loglikelihood([request], disable_tqdm=True)]
    assert [logprob for logprob, _ in found] == pytest.approx([float(logprob) for logprob, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [bool(greedy) for _, greedy in expected]


def test_greedy_continuations(ours: Any, theirs: Any) -> None:
    """Guards `is_greedy` where it is true: the continuation is what the model itself would say."""
    (text,) = ours.generate_until(instances("generate_until", ("hello world", {"max_gen_toks": 3})))
    requests = instances("loglikelihood", ("hello world", text), ("hello world", text + "a"))
    assert [greedy for _, greedy in ours.loglikelihood(requests)] == [
        bool(greedy) for _, greedy in theirs.loglikelihood(requests)
    ]


def test_whole_texts(ours: Any, theirs: Any) -> None:
    """Guards windows of texts that are longer than the context, and texts without a token of their own."""
    requests = instances("loglikelihood_rolling", ("hello world",), (LONG,), ("",), ("a",))
    expected = theirs.loglikelihood_rolling(requests, disable_tqdm=True)
    assert ours.loglikelihood_rolling(requests) == pytest.approx(list(map(float, expected)), abs=1e-3, rel=1e-5)


def test_generated_texts(ours: Any, theirs: Any) -> None:
    """Guards texts: lengths, stop strings, and prompts that are cut to leave room for the output."""
    options: list[dict[str, Any]] = [
        {"max_gen_toks": 12},
        {"max_gen_toks": 12, "until": ["e", "\n"], "do_sample": False},
        {"max_gen_toks": 12, "until": " ", "temperature": 0.0},
    ]
    arguments = [(text, one) for text in ("hello world", LONG, "user", "<|bos|>a") for one in options]
    requests = instances("generate_until", *arguments)
    expected, found = theirs.generate_until(requests, disable_tqdm=True), ours.generate_until(requests)
    assert found == expected and any(found) and len(set(found)) > 4


def test_chats(ours: Any, theirs: Any) -> None:
    """Guards prompts through the chat template, to the assistant's turn or into its answer."""
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
    assert ours.apply_chat_template(chat[:1]) == theirs.apply_chat_template(chat[:1])
    assert ours.apply_chat_template(chat, False) == theirs.apply_chat_template(chat, False)


def tasks(folder: Path) -> list[dict[str, Any]]:
    """Choices, perplexity and generation, over files of documents."""
    words = ["hello", "world", "user", "assistant", "system"]
    choices = [
        {"context": f"the {one} says", "choices": [f" {two}" for two in words], "answer": number % 5}
        for number, one in enumerate(words * 2)
    ]
    files = {
        "choices": choices,
        "texts": [{"text": LONG}, {"text": "hello world"}],
        "questions": [{"question": word, "answer": "a"} for word in words],
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kinds: dict[str, dict[str, Any]] = {
        "choices": {
            "output_type": "multiple_choice", "doc_to_text": "{{context}}", "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "texts": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        "questions": {
            "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": [" "], "max_gen_toks": 8}, "metric_list": [{"metric": "exact_match"}],
        },
    }  # fmt: skip
    return [
        {
            "task": name, "dataset_path": "json", "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}}, **kind,
        }
        for name, kind in kinds.items()
    ]  # fmt: skip


def test_tasks(ours: Any, theirs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards whole evaluations: accuracy, perplexity and texts are those of the harness's own model."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    manager = TaskManager(include_defaults=False)
    found, expected = (
        lm_eval.simple_evaluate(
            model, tasks=tasks(tmp_path), task_manager=manager, log_samples=True, bootstrap_iters=0, verbosity="ERROR"
        )
        for model in (ours, theirs)
    )
    for name, figures in expected["results"].items():
        numbers = {key: value for key, value in figures.items() if isinstance(value, float)}
        assert numbers and {key: found["results"][name][key] for key in numbers} == pytest.approx(numbers, rel=1e-5)
    assert 0 < found["results"]["choices"]["acc,none"] < 1
    texts = [[sample["resps"] for sample in one["samples"]["questions"]] for one in (found, expected)]
    assert texts[0] == texts[1]
