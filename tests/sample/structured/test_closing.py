"""A form is whole when the budget of tokens ends, whatever a model would have written."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from transformers import AutoTokenizer

from cbatch.base.errors import RequestError
from cbatch.base.params import Constraint, Kind
from cbatch.model.load_plan import DEMO_MODEL
from cbatch.sample.structured.compiler import ConstraintCompiler
from cbatch.sample.structured.grammar import CompiledGrammar, GrammarState
from cbatch.text.loading import of_transformers
from cbatch.text.tokenizer import ChatTokenizer
from tests.sample.structured.test_structured import STOP, TOKENS, WIDTH, allowed_tokens, random_schema

TREE: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "left": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                "right": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "left", "right"],
        }
    },
    "$ref": "#/$defs/node",
}
RUNAWAYS: dict[str, dict[str, Any]] = {
    "integer": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    "pattern": {"type": "object", "patternProperties": {"^x_[a-z]+$": {"type": "integer"}}},
    "open": {"type": "object", "additionalProperties": True},
    "recursion": TREE,
    "texts": {"type": "array", "items": {"type": "string", "minLength": 3}, "minItems": 2},
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    tokenizer = ChatTokenizer(of_transformers(AutoTokenizer.from_pretrained(DEMO_MODEL)))
    with closing(ConstraintCompiler(tokenizer, WIDTH)) as made:
        yield made


def compiled(compiler: ConstraintCompiler, kind: Kind, source: Any) -> CompiledGrammar:
    return compiler.compile(Constraint(kind, source if isinstance(source, str) else json.dumps(source)))


def write(grammar: CompiledGrammar, budget: int, rng: random.Random) -> tuple[bytes, GrammarState]:
    """An output of random tokens, the longest of a few where that goes on longest."""
    state = GrammarState(grammar, [STOP], budget, closes=True)
    output = b""
    for left in reversed(range(budget)):
        choices = rng.choices([token for token in allowed_tokens(state) if token != STOP] or [STOP], k=3)
        token = state.accept(max(choices, key=lambda token: len(TOKENS[token])), left)
        if token in (STOP, None):
            break
        output += TOKENS[token]
        if state.is_finished:
            break
    return output, state


def wanted(grammar: CompiledGrammar) -> int:
    assert grammar.shortest is not None
    return len(grammar.shortest)


@pytest.mark.parametrize("seed", range(50))
def test_random_schemas_give_whole_json(compiler: ConstraintCompiler, seed: int) -> None:
    """Guards the promise: JSON that is valid for its schema, however short the budget, if it can be had at all."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema, of the extra `dev`, is not installed")
    rng = random.Random(seed)
    for _ in range(4):
        schema = random_schema(rng)
        grammar = compiled(compiler, "json_schema", schema)
        for budget in (wanted(grammar), wanted(grammar) + rng.randint(1, 60)):
            output, state = write(grammar, budget, rng)
            assert state.is_complete, (schema, budget, output)
            jsonschema.Draft202012Validator(schema).validate(json.loads(output))


@pytest.mark.parametrize("kind", RUNAWAYS)
@pytest.mark.parametrize("budget", [40, 64, 100])
def test_what_would_never_end_is_closed(compiler: ConstraintCompiler, kind: str, budget: int) -> None:
    """Guards integers, keys and nesting without end: they use most of the budget, and are valid JSON."""
    grammar, rng = compiled(compiler, "json_schema", RUNAWAYS[kind]), random.Random(kind)
    output, state = write(grammar, budget, rng)
    assert state.is_complete and json.loads(output) is not None


def test_patterns_and_choices_are_closed(compiler: ConstraintCompiler) -> None:
    """Guards forms that are not JSON, whose ways to an end are found by trying."""
    rng = random.Random(0)
    for pattern in (r"(ab)*c", r"[a-z ]{3,}\.", r"<a>(x|y)*</a>", r"\d+ [A-Z]{4}"):
        grammar = compiled(compiler, "regex", pattern)
        for budget in range(wanted(grammar), wanted(grammar) + 12):
            output, state = write(grammar, budget, rng)
            assert state.is_complete and re.fullmatch(pattern, output.decode())
    choices = ["no", "yes, of course, and with pleasure"]
    output, state = write(compiled(compiler, "choice", choices), 2, rng)
    assert output == b"no" and state.is_finished


def test_an_output_with_room_is_left_alone(compiler: ConstraintCompiler) -> None:
    """Guards what nobody has to close: the tokens are those that were sampled."""
    grammar = compiled(compiler, "json_schema", RUNAWAYS["texts"])
    for seed in range(20):
        closed = GrammarState(grammar, [STOP], 400, closes=True)
        plain, rng = GrammarState(grammar, [STOP]), random.Random(seed)
        for left in reversed(range(200, 400)):
            if closed.is_finished:
                break
            token = rng.choice(allowed_tokens(plain))
            assert closed.accept(token, left) == plain.accept(token)
            assert list(closed.forced) == list(plain.forced)


def test_known_tokens_are_taken_as_they_were(compiler: ConstraintCompiler) -> None:
    """Guards an output that goes on after a kill: the tokens that it had lead to the same place again."""
    for seed in range(20):
        rng = random.Random(seed)
        grammar = compiled(compiler, "json_schema", rng.choice([*RUNAWAYS.values()]))
        state = GrammarState(grammar, [STOP], 48, closes=True)
        twin = GrammarState(grammar, [STOP], 48, closes=True)
        for left in reversed(range(48)):
            token = state.accept(rng.choice(allowed_tokens(state)), left)
            assert token is None or twin.accept(token, left) == token
            assert list(twin.forced) == list(state.forced)
            if token in (STOP, None) or state.is_finished:
                break


def test_a_budget_that_is_too_small_closes_nothing(compiler: ConstraintCompiler) -> None:
    """Guards an output that cannot be whole: it is cut where the budget ends, without an error."""
    grammar = compiled(compiler, "json_schema", TREE)
    output, state = write(grammar, wanted(grammar) - 2, random.Random(0))
    assert not state.is_complete and state.error is None and output.startswith(b"{")


def test_a_replaced_token_leaves_no_trace(compiler: ConstraintCompiler) -> None:
    """Guards the two matchers, which go back by one token: what follows is what follows the other token."""
    grammar = compiled(compiler, "regex", r"([a-z]|<[0-9]{9}>)*\.")
    opening, letter, end = (TOKENS.index(text) for text in (b"<", b"a", b"."))
    state = GrammarState(grammar, [STOP], 6, closes=True)
    assert state.accept(letter, 5) == letter
    assert state.accept(opening, 4) == end and state.is_finished
    later = GrammarState(grammar, [STOP], 40, closes=True)
    assert later.accept(opening, 39) == opening, "there is room"
    with pytest.raises(RequestError, match="not allowed"):
        later.accept(letter, 38)
