"""Texts that are cut to a number of tokens, with words as tokens and a frame around the text."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from cbatch.base.errors import RequestError
from cbatch.text.loading import of_transformers
from cbatch.text.tokenizer import ChatTokenizer
from cbatch.text.truncation import cut_ids, fit_text
from tests.support.model_folder import make_tokenizer

TEXT = " ".join(f"w{number}" for number in range(20))


def starts(text: str) -> Sequence[int]:
    return [found.start() for found in re.finditer(r" ?\S+", text)]


def fitted(limit: int, side: str, text: str = TEXT, frame: int = 3) -> tuple[str, int]:
    return fit_text(text, limit, side, starts=starts, count=lambda shown: frame + len(shown.split()))


@pytest.mark.parametrize(
    ("limit", "side", "wanted", "dropped"),
    [
        (23, "left", TEXT, 0),
        (22, "left", TEXT.partition("w0")[2], 1),
        (6, "right", "w0 w1 w2", 17),
        (4, "right", "w0", 19),
        (9, "middle", "w0 w1 w2\n[…]\n w18 w19", 15),
        (5, "middle", "w0\n[…]\n", 19),
    ],
)
def test_a_side_is_dropped(limit: int, side: str, wanted: str, dropped: int) -> None:
    """Guards each side, the frame around the text, the mark of a gap, which takes a token, and the count."""
    assert fitted(limit, side) == (wanted, dropped)


def test_a_frame_that_is_too_long() -> None:
    """Guards against a prompt without any of its text, and against an endless search."""
    with pytest.raises(RequestError) as raised:
        fitted(3, "left")
    assert raised.value.code == "prompt_too_long"


def test_token_ids_are_cut_alike() -> None:
    """Guards prompts of token ids."""
    ids = [1, 2, 3, 4, 5]
    assert [list(cut_ids(ids, 3, side)) for side in ("left", "right", "middle")] == [[3, 4, 5], [1, 2, 3], [1, 2, 5]]


def test_long_texts_are_encoded_in_pieces() -> None:
    """Guards the places of tokens where pieces meet: none is lost, and no special token is taken apart."""
    tokenizer = ChatTokenizer(of_transformers(make_tokenizer()))
    text = "hello wörld <|im_end|><|im_start|>hello " * 3 + "<|im_end|>" * 5
    whole = tokenizer.token_starts(text)
    assert list(whole) == [start for start, _ in tokenizer.backend.encode(text, add_special_tokens=False).offsets]
    inside = {place for one in re.finditer(r"<\|.*?\|>", text) for place in range(one.start() + 1, one.end())}
    for size in range(13, 40):
        found = set(tokenizer.token_starts(text, size))
        assert found >= set(whole) and found.isdisjoint(inside)
