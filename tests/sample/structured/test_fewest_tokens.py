"""The bound below which no output of a form can be."""

from __future__ import annotations

import json

import pytest

from cbatch.base.params import Constraint
from cbatch.sample.structured.fewest_tokens import fewest_tokens

TOKENS = [b"", *(bytes([byte]) for byte in range(256)), b"ab", b"abc", b"no way", b"2024", "né".encode()]


@pytest.mark.parametrize(
    ("choices", "fewest"),
    [(["abab"], 2), (["abcabc"], 2), (["abcabcabc", "x"], 1), (["xyz", "no way no way"], 3), (["né"], 1)],
)
def test_choices_are_spelt_with_the_longest_tokens(choices: list[str], fewest: int) -> None:
    """Guards against refusing a choice that fits, by the tokens that one tokenizer would use."""
    assert fewest_tokens(Constraint("choice", json.dumps(choices)), TOKENS, 0) == fewest


@pytest.mark.parametrize(
    ("pattern", "fewest"),
    [
        ("[0-9]{40}", 10),
        (r"\d{3}-\d{4}", 2),
        ("(ab|c){6}", 2),
        ("a{50}|b", 1),
        ("x*", 0),
        (".{50}", 0),
        ("[^a]{50}", 0),
        ("[[:alpha:]]{50}", 0),
        ("(?i)a{50}", 0),
        (r"\p{L}{50}", 0),
    ],
)
def test_patterns_are_bounded_or_not_judged(pattern: str, fewest: int) -> None:
    """Guards against refusing a pattern that means another thing in Rust, or whose tokens are not known."""
    assert fewest_tokens(Constraint("regex", pattern), TOKENS, 0) == fewest


def test_many_choices_take_no_time() -> None:
    """Guards the reader of rows: the first choice that fits is enough, and a very long one is not judged."""
    many = ["no way" * 3, *(f"{number} no way" * 9 for number in range(100_000))]
    assert fewest_tokens(Constraint("choice", json.dumps(many)), TOKENS, 5) == 3
    assert fewest_tokens(Constraint("choice", json.dumps(["x" * 10**6])), TOKENS, 5) == 0
