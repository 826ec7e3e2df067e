"""Scores of texts equal the log-softmax of plain transformers, however the engine cuts and caches their tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cbatch import Engine, RequestError, Score, TokenLogprob

TEXTS = ["hello world", "hello world, said the user", "é😀", "a", "The system helps the assistant. " * 3]


@pytest.fixture(scope="module", params=[{}, {"max_batch_tokens": 8, "block_size": 4}], ids=["whole", "in chunks"])
def engine(model_folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(str(model_folder), device="cpu", dtype="float32", **request.param) as engine:
        yield engine


@pytest.fixture(scope="module")
def network(model_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_folder)


@torch.no_grad()
def expected(network: Any, token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities of all tokens in each place after the first; one row a place."""
    return torch.log_softmax(network(torch.tensor([token_ids])).logits[0, :-1].double(), -1)


def check(score: Score, network: Any, token_ids: list[int], start: int = 1) -> None:
    """Compares a score of tokens from `start` on."""
    places = expected(network, token_ids)
    right = [float(places[at - 1, token_ids[at]]) for at in range(max(start, 1), len(token_ids))]
    assert score.error is None and [one.token_id for one in score.tokens] == token_ids[max(start, 1) :]
    assert [one.logprob for one in score.tokens] == pytest.approx(right, abs=1e-4)
    assert score.logprob == pytest.approx(sum(right), abs=1e-3)
    likeliest = [int(places[at - 1].argmax()) == token_ids[at] for at in range(max(start, 1), len(token_ids))]
    assert [one.is_likeliest for one in score.tokens] == likeliest and score.is_greedy == all(likeliest)
    if right:
        assert score.perplexity == pytest.approx(math.exp(-sum(right) / len(right)), rel=1e-3)


def test_texts(engine: Engine, network: Any, tokenizer: Any) -> None:
    """Guards each token's score, of texts that begin alike and of those in the cache; BOS itself has none."""
    for _ in range(2):
        for text, score in zip(TEXTS, engine.score(TEXTS), strict=True):
            check(score, network, tokenizer.encode(text))
            assert b"".join(one.data or b"" for one in score.tokens).decode() == text
    check(engine.score(TEXTS[0]), network, tokenizer.encode(TEXTS[0]))


def test_token_ids(engine: Engine, network: Any) -> None:
    """Guards token ids, one list or several, also as arrays: they are scored as they are."""
    forms: list[Any] = [[5, 6, 7], (5, 6, 7), np.array([5, 6, 7]), torch.tensor([5, 6, 7])]
    for given in forms:
        check(engine.score(given), network, [5, 6, 7])
        check(engine.score(given, given), network, [5, 6, 7, 5, 6, 7], 3)
    several = engine.score([[5, 6], [7]], [[8], [9, 9]])
    check(several[0], network, [5, 6, 8], 2)
    check(several[1], network, [7, 9, 9], 1)
    tensors: list[Any] = [torch.tensor([5, 6]), torch.tensor([8])]
    (alone,) = engine.score(tensors[:1], tensors[1:])
    check(alone, network, [5, 6, 8], 2)


def test_continuations(engine: Engine, network: Any, tokenizer: Any) -> None:
    """Guards what is scored: the tokens of the continuation only, which come after those of the text."""
    pairs = [(TEXTS[0], ", yes"), ("é", "😀"), ("", "hello"), ("a", "b" * 30)]
    texts, continuations = zip(*pairs, strict=True)
    for (text, then), score in zip(pairs, engine.score(texts, continuations), strict=True):
        start = len(tokenizer.encode(text))
        assert tokenizer.encode(text + then)[:start] == tokenizer.encode(text), "the boundary is merged"
        check(score, network, tokenizer.encode(text + then), start)
        assert b"".join(one.data or b"" for one in score.tokens).decode() == then
        rest = engine.score(text).logprob if text else 0.0
        assert rest + score.logprob == pytest.approx(engine.score(text + then).logprob, abs=1e-3)


def test_a_token_across_the_boundary_counts(engine: Engine, network: Any, tokenizer: Any) -> None:
    """Guards continuations whose beginning is one token with the end of the text: none of it is left out."""
    text, then = "user hel", "lo user"
    parts, whole = tokenizer.encode(text), tokenizer.encode(text + then)
    start = next(at for at, (one, other) in enumerate(zip(parts, whole, strict=False)) if one != other)
    assert 0 < start < len(parts), "nothing is merged"
    check(engine.score(text, then), network, whole, start)
    assert then in "".join(one.token for one in engine.score(text, then).tokens)


def test_top(engine: Engine, network: Any, tokenizer: Any) -> None:
    """Guards the alternatives in each token's place."""
    token_ids = tokenizer.encode(TEXTS[0])
    places = expected(network, token_ids)
    for one, place in zip(engine.score(TEXTS[0], top=3).tokens, places, strict=True):
        values, found = place.topk(3)
        assert [top.token_id for top in one.top] == found.tolist()
        assert [top.logprob for top in one.top] == pytest.approx(values.tolist(), abs=1e-4)
        assert all(isinstance(top, TokenLogprob) and top.token for top in one.top)
    assert all(one.top == () for one in engine.score(TEXTS[0]).tokens)


def test_several_continuations_of_each_text(engine: Engine, network: Any, tokenizer: Any) -> None:
    """Guards lists of continuations, one for each text, and that their text is computed once."""
    texts, several = ["The system helps the assistant. " * 3, "hello"], [[" yes", " no", " and so on"], [" world"]]
    before = engine.stats().num_prefilled_tokens
    scores = engine.score(texts, several)
    computed = engine.stats().num_prefilled_tokens - before
    for text, group, found in zip(texts, several, scores, strict=True):
        for then, score in zip(group, found, strict=True):
            check(score, network, tokenizer.encode(text + then), len(tokenizer.encode(text)))
    (alone,) = engine.score(["hello"], [[" world"]])
    assert alone[0].logprob == pytest.approx(scores[1][0].logprob, abs=1e-5)
    ids = [tokenizer.encode(text) for text in texts]
    assert [[one.error for one in group] for group in engine.score(ids, [[[5], [6, 7]], [[8]]])] == [[None] * 2, [None]]
    assert computed < len(ids[0]) + len(ids[1]) + 4 * (engine.limits.block_size + 10)


def test_choices_copy_the_block_that_their_text_ends_in(engine: Engine, network: Any) -> None:
    """Guards choices against each other's tokens, and computing more of the shared text than one token."""
    size = engine.limits.block_size
    context = [one % 90 + 3 for one in range(7 * size - 1)]
    choices = [[token, token + 1, 5][: 2 + token % 2] for token in range(10, 16)]
    before = engine.stats().num_cached_tokens
    (scores,) = engine.score([context], [choices])
    for choice, score in zip(choices, scores, strict=True):
        check(score, network, [*context, *choice], len(context))
    assert engine.stats().num_cached_tokens - before == (len(choices) - 1) * (len(context) - 1)


def test_a_first_token_has_something_before_it(engine: Engine, network: Any) -> None:
    """Guards single tokens and empty contexts: the token that begins texts comes before them."""
    bos = engine.tokenizer.encode("")[0] if engine.tokenizer else 0
    check(engine.score([5]), network, [bos, 5])
    check(engine.score([[7]], [[5, 6]])[0], network, [7, 5, 6])
    check(engine.score([[]], [[5, 6]])[0], network, [bos, 5, 6])
    check(engine.score([5, 6]), network, [5, 6])


def test_nothing_to_score(engine: Engine) -> None:
    """Guards empty texts and continuations: an error, and no probability of 1."""
    for score in (
        engine.score(""),
        engine.score("hello", ""),
        *engine.score([[5]], [[]]),
        engine.score(["a"], [[""]])[0][0],
    ):
        assert math.isnan(score.logprob) and "no token to score" in str(score.error) and not score.tokens
    nothing: list[str] = []
    assert engine.score(nothing) == []


def test_a_text_that_cannot_be_scored_fails_alone(engine: Engine) -> None:
    """Guards the other texts of a call."""
    long, good, strange = engine.score(["a" * 300, "a", "\ud800"])
    assert long.error is not None and long.error.code == "prompt_too_long" and math.isnan(long.logprob)
    assert good.error is None and strange.error is None and strange.tokens[0].data == b"\xef"
    unknown, good = engine.score([[5, 10**6], [5, 6]])
    assert unknown.error is not None and "1000000" in str(unknown.error) and good.error is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5,), "The prompts must be a text"),
        ((["a", 5],), "prompt must be a string, not a number"),
        ((["a", b"b"],), "prompt must be a string, not"),
        (({"prompt": "a"},), "prompt must be a string, not an object"),
        (("a", {"b": 1}), "choice 1 must be a string or token ids, not an object"),
        (([5], "a"), "behind token ids, continuations must be token ids, too"),
        ((["a", "b"], "c"), "Each text needs one continuation: there are 2 and 1."),
    ],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_what_cannot_be_scored_has_an_error(arguments: tuple[Any, ...], message: str, engine: Engine) -> None:
    """Guards against scoring rows without their template, and text beside token ids; others are scored."""
    try:
        found = engine.score(*arguments)
        *good, bad = found if isinstance(found, list) else [found]
        assert bad.error is not None and all(one.error is None for one in good)
        error = bad.error
    except RequestError as raised:  # of the call as a whole
        error = raised
        assert message.startswith(("The prompts", "Each text"))
    assert error.code == "invalid_row" and str(error).startswith(message)


@pytest.mark.parametrize("top", [21, -1, "a", 1.5])
def test_wrong_numbers_of_alternatives_raise(top: Any, engine: Engine) -> None:
    """Guards `top`."""
    for score in (engine.score, partial(engine.score, continuations="b")):
        with pytest.raises(RequestError, match="must be a whole number from 0 to 20"):
            score("a", top=top)
