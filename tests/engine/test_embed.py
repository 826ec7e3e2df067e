"""Embeddings equal those of plain transformers, however the engine cuts, caches and preempts their texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cbatch import Engine, RequestError
from cbatch.base.params import SamplingParams
from cbatch.base.request import EmbedOptions, Request, ScoredTail
from cbatch.engine.stepping_engine import SteppingEngine
from tests.support.embedders import GEMMA, TEXTS, expected, save_embedder, save_modules
from tests.support.tiny_models import fast, make_engine, make_fast_engine, make_network, make_prompts

MEAN, LAST = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, {"pooling_mode": "lasttoken"}
SMALL: dict[str, Any] = {"max_batch_tokens": 8, "block_size": 16}
DENSE = [torch.randn(96, 48, generator=torch.Generator().manual_seed(1)), torch.randn(32, 96)]


def embedded(folder: Path, **options: Any) -> Any:
    with Engine(str(folder), device="cpu", dtype="float32", **options) as engine:
        return engine.embed(TEXTS)


def close(one: Any, other: Any) -> bool:
    return one.shape == other.shape and bool(np.abs(one - other).max() < 1e-5)


@pytest.mark.parametrize("options", [{}, SMALL, {"attention": "reference", "max_batch_tokens": 8}])
def test_causal_models(tmp_path: Path, options: dict[str, Any]) -> None:
    """Guards models without an output head, and names without `model.`: the mean, and the last token of those whose
    tokenizer ends a text. One token off, or the prompt's chunks summed wrongly, changes every number.
    """
    mean = save_embedder(tmp_path / "mean", "Mistral")
    last = save_embedder(tmp_path / "last", "Qwen3", appends_end=True)
    assert close(embedded(mean, **options), expected(mean, TEXTS))
    assert close(embedded(last, **options), expected(last, TEXTS, "lasttoken"))


def test_bare_names(tmp_path: Path) -> None:
    """Guards Qwen3-Embedding's files: those of a class with an output head, without one, and without `model.`."""
    folder = save_embedder(tmp_path, "Qwen3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    assert close(embedded(folder), expected(folder, TEXTS))


def test_models_of_transformers(tmp_path: Path) -> None:
    """Guards hidden states of a model that transformers computes: those after its last norm."""
    folder = save_embedder(tmp_path, "Qwen3", tie_word_embeddings=True)
    assert close(embedded(folder, attention="reference", **SMALL), expected(folder, TEXTS))


def test_bidirectional_model(tmp_path: Path) -> None:
    """Guards EmbeddingGemma: tokens see later ones within their windows, two dense layers follow, and no prompt is cut
    or takes over cached blocks.
    """
    folder = save_modules(save_embedder(tmp_path, "Gemma3", **GEMMA), MEAN, dense=DENSE)
    right = expected(folder, TEXTS, dense=DENSE)
    with Engine(str(folder), device="cpu", dtype="float32", max_batch_tokens=100) as engine:
        for _ in range(2):
            assert close(engine.embed(TEXTS), right)
        assert engine.stats().num_cached_tokens == 0
        assert close(np.stack([engine.embed(text) for text in TEXTS]), right)
        with pytest.raises(RequestError, match="context of 100"):
            engine.embed("hello " * 101)
        error = engine.generate("hello", max_tokens=3).error
        assert error is not None and "can only embed: its tokens see later ones" in str(error)


def test_what_the_files_say(tmp_path: Path) -> None:
    """Guards each part of sentence-transformers' files: the first token, prompts, and a norm that is not there."""
    folder = save_embedder(tmp_path, "Llama")
    save_modules(folder, {"pooling_mode": "cls"}, prompts={"query": "Find: "})
    with Engine(str(folder), device="cpu", dtype="float32", **SMALL) as engine:
        assert close(engine.embed(TEXTS), expected(folder, TEXTS, "cls"))
    save_modules(folder, LAST, prompts={"query": "Find: "}, normalizes=False)
    with Engine(str(folder), device="cpu", dtype="float32") as engine:
        prompted = engine.embed(TEXTS, prompt_name="query")
        lengths = np.linalg.norm(prompted, axis=1, keepdims=True)
        assert np.abs(lengths - 1).min() > 0.1
        assert close(prompted / lengths, expected(folder, [f"Find: {text}" for text in TEXTS], "lasttoken"))
        with pytest.raises(RequestError, match="no prompt 'other'; those they have: query"):
            engine.embed("a", prompt_name="other")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"1_Pooling/config.json": {"pooling_mode_max_tokens": True}}, "pools by max_tokens"),
        ({"1_Pooling/config.json": MEAN | {"include_prompt": False}}, "leaves prompts out"),
        ({"modules.json": [{"type": "x.LSTM", "path": "1_LSTM"}]}, "a module LSTM, which is not supported"),
        ({"modules.json": [{"type": "x.Pooling", "path": "../elsewhere"}]}, "no folder beside it"),
        ({"modules.json": {"a": 1}}, "no list of modules"),
        ({"2_Dense/config.json": {"bias": True}}, "does not hold the linear"),
        ({"2_Dense/config.json": {"activation_function": "torch.nn.Softmax"}}, "the activation Softmax"),
    ],
)
def test_files_that_are_not_understood(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    """Guards embeddings that would silently be others: the model generates all the same."""
    folder = save_modules(save_embedder(tmp_path, "Llama", tie_word_embeddings=True), MEAN, dense=DENSE)
    for name, content in change.items():
        (folder / name).write_text(json.dumps(content))
    with Engine(str(folder), device="cpu", dtype="float32") as engine:
        with pytest.raises(RequestError, match=sentence):
            engine.embed("a")
        assert engine.generate("a", max_tokens=1).error is None


async def _aembedded(engine: Engine) -> Any:
    return await engine.aembed("hello", 8)


def test_forms(tmp_path: Path) -> None:
    """Guards what goes in and comes out: a text, token ids, several, none, fewer dimensions, and wrong ones."""
    import asyncio

    folder = save_embedder(tmp_path, "Llama")
    with Engine(str(folder), device="cpu", dtype="float32") as engine:
        whole, ids = engine.embed("hello"), engine.tokenize("hello")
        assert whole.shape == (48,) and whole.dtype == np.float32
        assert close(engine.embed(ids), whole) and close(engine.embed([ids, "hello"]), np.stack([whole, whole]))
        assert len(engine.embed([])) == 0
        assert close(engine.embed("hello", 8), whole[:8] / np.linalg.norm(whole[:8]))
        assert close(asyncio.run(_aembedded(engine)), engine.embed("hello", 8))
        for wrong, sentence in ((49, "at most 48, the size"), (0, "at least 1"), (True, "at least 1")):
            with pytest.raises(RequestError, match=sentence):
                engine.embed("hello", wrong)
        for text, sentence in (("hello " * 200, "prompt has"), ("", "number 1 is empty"), ([999], "vocabulary")):
            with pytest.raises(RequestError, match=sentence):
                engine.embed(text)
        assert "can only embed: its files hold no output head" in str(engine.generate("a", max_tokens=1).error)


def request_of(prompts: list[list[int]], **fields: Any) -> Request:
    tails = [ScoredTail(ids, 1, (), ()) for ids in prompts]
    return Request(tails=tails, embed=EmbedOptions(inputs=prompts, is_list=True), **fields)


Found = dict[tuple[int | None, int], Any]
"""By request and output: its tokens, or the mean hidden state of a text that is embedded."""


def pooled(engine: SteppingEngine, late: Request | None = None, *, fails_at: frozenset[int] = frozenset()) -> Found:
    """Runs all requests. late: comes when a text is half summed; fails_at: steps that are tried again"""
    found, forward, count = Found(), engine.runner.forward, 0

    def failing(batch: Any) -> Any:
        nonlocal count
        count += 1
        if count in fails_at:
            raise OSError("planted")
        return forward(batch)

    engine.runner.forward = failing  # type: ignore[method-assign]
    while engine.has_work:
        if late is not None and any(0 < one.num_pooled < len(one.pooled) for one in engine.scheduler.running):
            engine.add_request(late)
            late = None
        try:
            events = engine.step()
        except OSError:
            continue
        engine.scheduler.check_integrity()
        for event in events:
            assert event.error is None
            place = event.request_id, event.sample_index
            if event.pooled is not None:
                assert place not in found and event.token_id is None
                found[place] = event.pooled
            elif event.token_id is not None:
                found.setdefault(place, []).append(event.token_id)
    assert late is None
    return found


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("make", [make_engine, make_fast_engine])
def test_mixed_steps(make: Any, run_ahead: bool) -> None:
    """Guards steps that hold texts that are embedded, prompts that are scored, and outputs, with preemption, and steps
    that fail: each gives what it gives alone, and no token is summed twice.
    """
    network, prompts = make_network("qwen3"), make_prompts([40, 3, 90, 17, 60])
    score = SamplingParams(max_tokens=0, prompt_logprobs=0)

    def requests() -> list[Request]:
        return [
            request_of(prompts[1:4], priority=2),
            Request(prompt_ids=prompts[4], params=score, priority=1),
            request_of([prompts[4], prompts[0]], priority=2),
            Request(prompt_ids=prompts[0], params=SamplingParams(max_tokens=30, ignore_eos=True)),
        ]

    alone, first_id = Found(), 0
    for request in requests():
        engine = make(network, kv_blocks=None, kv_cache_memory="16MiB")
        engine.add_request(request)
        alone |= {(first_id, place): values for (_, place), values in pooled(engine).items()}
        first_id += request.num_outputs
    engine = make(network, kv_blocks=6 if make is make_fast_engine else 24, max_batch_tokens=18, run_ahead=run_ahead)
    *early, late = requests()
    for request in early:
        engine.add_request(request)
    found = pooled(engine, late, fails_at=frozenset([2, 3, 7, 12]))
    assert engine.scheduler.num_preemptions > 0 and found.keys() == alone.keys()
    for place, values in alone.items():
        np.testing.assert_allclose(found[place], values, rtol=1e-4, atol=1e-5)


def test_prefix_cache() -> None:
    """Guards what is shared: the last token's hidden state needs only its own, the mean those of all tokens."""
    network = make_network("qwen3")
    (prompt,) = make_prompts([64])
    for mode, cached in (("mean", 0), ("lasttoken", 48)):
        engine = make_fast_engine(network)
        object.__setattr__(engine.loaded, "make_pooling", lambda mode=mode: type(fast(network).pooling)(mode))
        results = []
        for _ in range(2):
            engine.add_request(request_of([prompt]))
            results += pooled(engine).values()
        assert engine.scheduler.num_cached_tokens == cached
        np.testing.assert_allclose(*results, atol=1e-5)


def test_numbers_that_are_none(tmp_path: Path) -> None:
    """Guards a hidden state that is not a number: an error, and its blocks are not taken over."""
    network = make_network("qwen3")
    with torch.no_grad():
        network.model.embed_tokens.weight[7] = float("nan")
    engine = make_fast_engine(network)
    for number, token in enumerate((7, 9)):
        engine.add_request(request_of([[token] * 20]))
        events = [event for _ in range(2) for event in engine.step()]
        assert [event.error.code if event.error else None for event in events] == [["nan_logits"], [None]][number]


@pytest.mark.kernels
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(torch.bfloat16, marks=pytest.mark.gpu),  # Triton's interpreter cuts off what a GPU rounds
    ],
)
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Guards the norm of a GPU's kernels, whose result is float32 here whatever the model's type is."""
    from tests.support.cuda_model import engine_around, model_of, network_of

    network, prompts = network_of("llama"), make_prompts([20, 3])
    with torch.no_grad():
        right = [network.model(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy() for ids in prompts]
    engine = engine_around(monkeypatch, model_of(network, dtype), max_batch_tokens=16)
    engine.add_request(request_of(prompts))
    found = pooled(engine)
    for (_, place), values in found.items():
        assert values.dtype == np.float64 and np.abs(values - right[place]).max() < (
            1e-5 if dtype == torch.float32 else 0.1
        )
    assert len(found) == 2
