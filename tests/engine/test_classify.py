"""Sequence classifiers give the logits of transformers, however the engine cuts and caches their texts."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from cbatch import Classification, Engine, ModelError, RequestError
from cbatch.attention.reference import ReferenceAttention
from cbatch.model.load_plan import LoadPlan
from tests.support.classifiers import expected, save_classifier
from tests.support.embedders import TEXTS

LABELS = ["bad", "fair", "good"]
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12, "query_pre_attn_scalar": 16}
TIED: dict[str, Any] = {"tie_word_embeddings": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {}, "Mistral": {}, "Qwen2": TIED, "Qwen3": TIED, "Gemma": TIED, "Gemma2": TIED | WINDOWS,
    "Gemma3": TIED | WINDOWS,
}  # fmt: skip
SMALL: dict[str, Any] = {"max_batch_tokens": 8, "block_size": 16}
MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]


def engine_of(folder: Path, **options: Any) -> Engine:
    return Engine(str(folder), device="cpu", dtype="float32", **options)


def check(engine: Engine, folder: Path, path: str) -> None:
    """Compares a batch of texts of different lengths, twice: the second time, prefixes are cached."""
    right = expected(folder, [engine.tokenize(text) for text in TEXTS])
    assert engine.core.loaded.path == path
    for _ in range(2):
        for one, logits in zip(engine.classify(TEXTS), right, strict=True):
            assert one.labels == LABELS and one.logits == pytest.approx(logits, abs=1e-4)
            assert one.scores == pytest.approx(torch.tensor(logits).softmax(0).tolist(), abs=1e-5)
            assert (one.label, one.score) == (LABELS[logits.index(max(logits))], max(one.scores))
    assert engine.stats().num_cached_tokens > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_fast_path(tmp_path: Path, name: str) -> None:
    """Guards each family on the CPU's own path, whole and in chunks: another row than a text's last changes all."""
    folder = save_classifier(tmp_path, name, LABELS, **FAMILIES[name])
    for options in ({}, SMALL):
        with engine_of(folder, **options) as engine:
            check(engine, folder, "fast")


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3"])
def test_other_paths(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards heads behind a model that transformers computes, and behind the device's program in torch operations."""
    from cbatch.model.cuda import CudaModel
    from cbatch.model.ops.device_kernel import by_torch

    folder = save_classifier(tmp_path, name, LABELS, **FAMILIES[name])
    with engine_of(folder, attention="reference", max_batch_tokens=8) as engine:
        check(engine, folder, "transformers")

    def on_a_device(plan: LoadPlan, config: Any, tensors: Any, dtype: Any, *_: Any) -> CudaModel:
        return CudaModel(config, tensors, dtype, plan.device, by_torch())

    monkeypatch.setattr(LoadPlan, "fast_model", on_a_device)
    monkeypatch.setattr("cbatch.engine.fallback.select_attention", lambda *_: ReferenceAttention())
    with engine_of(folder, **SMALL) as engine:
        assert isinstance(engine.core.model, CudaModel)
        check(engine, folder, "fast")


def test_forms(tmp_path: Path) -> None:
    """Guards what a head sees of pairs, token ids and conversations, and the forms of results."""
    folder = save_classifier(tmp_path)
    with engine_of(folder, **SMALL) as engine:
        ids, whole = engine.tokenize("hello"), engine.tokenize("hello world")
        right, of_ids = expected(folder, [whole, [*ids, 7]])
        one = engine.classify("hello", " world")
        assert isinstance(one, Classification) and one.label == "RELEVANT"
        assert one.logits == pytest.approx(right, abs=1e-4)
        assert one.score == pytest.approx(1 / (1 + math.exp(-right[0])), abs=1e-5)
        several = engine.classify(["hello", "hi"], [[" world", "é"], ["a"]])
        assert [len(each) for each in several] == [2, 1] and several[0][0].logits == pytest.approx(right, abs=1e-4)
        assert engine.classify(ids, [7]).logits == pytest.approx(of_ids, abs=1e-4)
        assert asyncio.run(engine.aclassify("hello world")).logits == pytest.approx(right, abs=1e-4)
        closed = AutoTokenizer.from_pretrained(folder).apply_chat_template(MESSAGES, return_dict=False)
        (turn,) = expected(folder, [closed])
        (row,) = engine.map([{"messages": MESSAGES, "score": True}])
        assert list(row["logits"].values()) == pytest.approx(turn, abs=1e-4)
        rows = [{"prompt": "hello", "raw": True, "choices": [" a", " world", ""], "score": True}]
        (ranked,) = engine.map(rows)
        logits = [each["logits"]["RELEVANT"] for each in ranked["choices"]]
        assert logits == sorted(logits, reverse=True) and len(ranked["choices"]) == 3
        (cut,) = engine.map([{"prompt": "hello " * 200, "score": True, "truncate_prompt": "left:10"}])
        assert cut["usage"]["prompt_tokens"] == 10 and "scores" in cut
        (empty,) = engine.map([{"prompt_token_ids": [], "score": True}])
        assert "no token to classify" in empty["error"]["message"]


@pytest.mark.parametrize(
    ("settings", "scores"),
    [
        ({"id2label": {"0": "x"}}, [0.5]),
        ({"id2label": {"0": "x", "1": "y"}}, [0.5, 0.5]),
        ({"id2label": {"0": "x", "1": "x"}, "problem_type": "multi_label_classification"}, [0.5, 0.5]),
        ({"id2label": {"0": "x"}, "problem_type": "regression"}, [0.0]),
        ({"num_labels": 3}, [1 / 3] * 3),
        ({"num_labels": 2, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, [0.0] * 2),
        ({"id2label": {"0": "x"}, "sbert_ce_default_activation_function": "torch.nn.Tanh"}, [0.0]),
    ],
)
def test_activations(tmp_path: Path, settings: dict[str, Any], scores: list[float]) -> None:
    """Guards the way from logits to scores, as the files say it, by a head of zeros."""
    folder = save_classifier(tmp_path)
    change(folder, settings, torch.zeros(len(scores), 48))
    with engine_of(folder) as engine:
        found = engine.classify("hello")
        assert found.scores == pytest.approx(scores) and len({*found.labels}) == len(scores)


def change(folder: Path, settings: dict[str, Any], head: torch.Tensor | None) -> None:
    """Changes the settings about labels, and the head; None: there is none."""
    path, weights = folder / "config.json", folder / "model.safetensors"
    config = json.loads(path.read_text())
    for name in ("id2label", "label2id", "problem_type"):
        config.pop(name, None)
    path.write_text(json.dumps(config | settings))
    tensors = load_file(weights)
    tensors.pop("score.weight")
    save_file(tensors | ({} if head is None else {"score.weight": head}), weights, {"format": "pt"})


@pytest.mark.parametrize("attention", ["auto", "reference"])
@pytest.mark.parametrize(
    ("settings", "head", "sentence"),
    [
        ({"num_labels": 1}, None, "no tensor score.weight"),
        ({"num_labels": 3}, torch.zeros(2, 48), r"score.weight in .* is \[2, 48\], and \[3, 48\]"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.LSTM"}}, torch.zeros(2, 48), "the activation LSTM"),
    ],
)
def test_heads_that_are_wrong(
    tmp_path: Path, attention: str, settings: dict[str, Any], head: torch.Tensor | None, sentence: str
) -> None:
    """Guards against heads that are torn, whose scores would be random, and against unknown activations."""
    folder = save_classifier(tmp_path)
    change(folder, settings, head)
    with pytest.raises(ModelError, match=sentence):
        engine_of(folder, attention=attention)


def test_what_models_cannot(tmp_path: Path, model_folder: Path) -> None:
    """Guards the sentences that say what to do instead, on each kind of model."""
    with engine_of(save_classifier(tmp_path)) as engine:
        error = engine.generate("hello", max_tokens=2).error
        assert error is not None and "can only classify: ask for scores" in str(error)
        with pytest.raises(RequestError, match="call classify"):
            engine.score("hello")
        with pytest.raises(RequestError, match="classifies, and does not embed"):
            engine.embed("hello")
    with engine_of(model_folder) as engine, pytest.raises(RequestError, match=r"no classification head .* call score"):
        engine.classify("hello")
