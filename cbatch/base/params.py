"""Sampling parameters of a request, and how its randomness is seeded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal, TypeGuard

from cbatch.base.converted import NO_ITEMS, NOTHING, Converted
from cbatch.base.errors import RequestError
from cbatch.base.spelling import similar_name

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing logits by them would overflow."""

MAX_TEMPERATURE = 1000.0
"""Above this every token is about equally likely, and float32 soon overflows."""

MAX_BIAS = 100.0
MAX_BIASED = MAX_STRINGS = 1024
"""Every step goes through all of them."""

MAX_TOKEN_ID = 2**31

CONSTRAINTS = ("response_format", "regex", "choice", "grammar")
"""Parameters that constrain the output; a request has at most one of them."""

LogitBias = Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]]
"""Token ids, which are strings in JSON, and what is added to their logits."""

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "tool_call"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an output as a whole must be.

    json_object  any JSON object; `source` is empty
    json_schema  JSON that is valid for a schema; `source` is the schema as JSON text. Properties come in the order of
                 the schema. The parts are separated by nothing, one space, or a line break and up to 40 blanks.
    regex        text that a pattern matches as a whole, in the syntax of Rust's regex crate, without look-around
                 and backreferences; \\d is 0 to 9
    choice       one of several strings; `source` is a JSON list of them
    grammar      text of a context-free grammar with a rule `start`, in llguidance's dialect of Lark
    tool_call    calls of a request's tools in the model's own format; `source` is what `tool_choice_constraint` makes
    """

    kind: Kind
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when its output ends.

    Names and meanings follow the OpenAI API and vLLM. Lists become tuples, so that parameters can be hashed and do not
    change. Raises RequestError (`invalid_row`) for a wrong type or a value out of range.

    max_tokens:     most tokens to generate; None: up to the end of the context; 0: none, to score or echo the prompt
    min_tokens:     end tokens and stop strings do not end the output before this many tokens
    n:              number of outputs, each with its own randomness
    temperature:    0 is greedy; 1 samples from the model's own distribution
    top_k:          sample among the k most likely tokens; 0 (or -1): among all
    top_p:          sample among the most likely tokens that together reach this probability
    min_p:          drop tokens less likely than this share of the most likely one
    seed:           None: made of the seed of the call or run and the prompt's place in it (`derive_seed`), so that the
                    same call gives the same outputs
    stop:           strings that end the output; they are not part of the text
    stop_token_ids: further end tokens
    ignore_eos:     continue past the model's end tokens, up to max_tokens

    presence_penalty:    subtracted from the logit of every token generated so far
    frequency_penalty:   subtracted once for each time the token was generated
    repetition_penalty:  divides positive and multiplies negative logits of tokens in prompt or output (CTRL,
                         https://arxiv.org/abs/1909.05858)
    logit_bias:          added to the logits of token ids, -100 to 100; a mapping or pairs
    bad_words:           strings whose tokens may not be generated in sequence
    allowed_token_ids:   the only tokens that may be generated; None: all. End tokens count, so an output without any
                         of them in the list ends by max_tokens or a stop string

    logprobs:        report the log-probability of each token and of the k most likely ones, from the raw logits
    prompt_logprobs: the same for the tokens of the prompt
    echo:            begin the text with the prompt
    skip_special_tokens: leave special tokens out of the text

    response_format: `{"type": "json_object"}`, or `json_schema` with a schema, as in the OpenAI API; kept as JSON text
    regex:           a pattern that the whole output matches
    choice:          the output is one of these strings
    grammar:         a grammar that the output follows, in llguidance's dialect of Lark

    The last four exclude each other. Such an output ends when it is complete, whatever min_tokens and ignore_eos say.

    lora:            name of the LoRA adapter that the model computes with (`EngineConfig.lora`); empty: without one
    """

    max_tokens: int | None = 512
    min_tokens: int = 0
    n: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: Converted[str | Sequence[str], tuple[str, ...]] = NO_ITEMS
    stop_token_ids: Converted[int | Sequence[int], tuple[int, ...]] = NO_ITEMS
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Converted[LogitBias, tuple[tuple[int, float], ...]] = NO_ITEMS
    bad_words: Converted[str | Sequence[str], tuple[str, ...]] = NO_ITEMS
    allowed_token_ids: Converted[int | Sequence[int] | None, tuple[int, ...] | None] = NOTHING
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    skip_special_tokens: bool = True
    response_format: Converted[str | Mapping[str, Any] | None, str | None] = NOTHING
    regex: str | None = None
    choice: Converted[Sequence[str] | None, tuple[str, ...] | None] = NOTHING
    grammar: str | None = None
    lora: str = ""

    def __post_init__(self) -> None:
        self._check_counts()
        for name, low, high in (
            ("temperature", 0.0, MAX_TEMPERATURE),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("repetition_penalty", 0.01, 100.0),
        ):
            _check_number(name, getattr(self, name), low, high, open_low=name == "top_p")
            object.__setattr__(self, name, float(getattr(self, name)))
        for name in ("ignore_eos", "echo", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, "true or false", getattr(self, name))
        if self.choice is not None and not (_is_sequence(self.choice) and self.choice):
            raise _invalid("choice", "a list of at least one string", self.choice)
        lists = {"stop": str, "stop_token_ids": int, "bad_words": str} | ({"choice": str} if self.choice else {})
        for name, kind in lists.items():
            object.__setattr__(self, name, _tuple_of(name, getattr(self, name), kind))
        for name in ("stop", "bad_words"):
            if (count := len(getattr(self, name))) > MAX_STRINGS:
                raise RequestError("invalid_row", f"{name} has {count:,} strings; at most {MAX_STRINGS:,} are allowed.")
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _allowed(self.allowed_token_ids))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        self._check_constraint()
        if not isinstance(self.lora, str):
            raise _invalid("lora", "the name of an adapter", self.lora)

    def _check_counts(self) -> None:
        if self.max_tokens is not None:
            scores = self.prompt_logprobs is not None or self.echo is True
            _check_int("max_tokens", self.max_tokens, low=0 if scores else 1)
            if self.max_tokens == 0 and self.n != 1:
                raise RequestError("invalid_row", "n must be 1 if max_tokens is 0: nothing is generated.")
        if self.seed is not None:
            _check_int("seed", self.seed, low=-(2**63), high=2**64 - 1)
        _check_int("min_tokens", self.min_tokens, low=0)
        _check_int("n", self.n, low=1, high=128)
        _check_int("top_k", self.top_k, low=-1, high=2**31 - 1)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is False:  # OpenAI's way to ask for none
                object.__setattr__(self, name, None)
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low=0, high=20)

    def _check_constraint(self) -> None:
        if self.response_format is not None:
            # As text it is hashable, and the properties keep their order.
            value: object = self.response_format
            text = value if isinstance(value, str) else _as_json("response_format", value)
            object.__setattr__(self, "response_format", text if _constraint_of_format(text) else None)
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise RequestError("invalid_row", f"{' and '.join(given)} cannot be combined.")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise _invalid(name, "a non-empty string", value)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def changes_logits(self) -> bool:
        """Whether logits change before a token is sampled, not counting bad words and constraints."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalties or bool(self.logit_bias) or self.min_tokens > 0 or self.allowed_token_ids is not None

    @property
    def constraint(self) -> Constraint | None:
        """The constraint on the output, if there is one."""
        if self.response_format is not None:
            return _constraint_of_format(self.response_format)
        if self.choice is not None:
            return Constraint("choice", json.dumps(self.choice))
        if self.regex is not None:
            return Constraint("regex", self.regex)
        return Constraint("grammar", self.grammar) if self.grammar is not None else None

    def for_sample(self, number: int) -> SamplingParams:
        """The parameters of output `number` of `n`; only the first one scores the prompt."""
        return replace(self, prompt_logprobs=None) if number and self.prompt_logprobs is not None else self

    def merged(self, overrides: Mapping[str, Any]) -> SamplingParams:
        """These parameters with some replaced; None in `overrides` keeps the value.

        Raises RequestError: `unknown_parameter` for a name that is no parameter, else as the constructor does.
        """
        if not overrides.keys() <= _NAMES:
            raise _unknown(next(name for name in overrides if name not in _NAMES))
        given = {name: value for name, value in overrides.items() if value is not None}
        return SamplingParams(**with_overrides({name: getattr(self, name) for name in PARAM_NAMES}, given))


PARAM_NAMES: tuple[str, ...] = tuple(field.name for field in fields(SamplingParams))
_NAMES = frozenset(PARAM_NAMES)


def with_overrides(params: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters by name with some replaced; a constraint replaces the other kinds of constraint."""
    replaced = () if overrides.keys().isdisjoint(CONSTRAINTS) else CONSTRAINTS
    return {name: value for name, value in params.items() if name not in replaced} | dict(overrides)


def derive_seed(run_seed: int, kind: str, name: str | float) -> int:
    """The 64-bit seed of a row without one: a hash of the run's seed and the row's name.

    kind: `id` or `index`, so that the row with id 3 and the row at index 3 differ
    """
    text = f"{run_seed}/{kind}/{type(name).__name__}/{name}"
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")


def _invalid(name: str, wanted: str, value: object) -> RequestError:
    too_large = isinstance(value, int) and value.bit_length() > 100  # Python refuses to print very long ones
    return RequestError("invalid_row", f"{name} must be {wanted}, not {'this' if too_large else repr(value)[:60]}.")


def _unknown(name: object) -> RequestError:
    meant = similar_name(name, PARAM_NAMES) if isinstance(name, str) else None
    advice = f"; did you mean {meant!r}?" if meant else "."
    return RequestError("unknown_parameter", f"There is no sampling parameter {repr(name)[:60]}{advice}")


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether it is a sequence of values, and not one of characters or bytes."""
    if isinstance(value, (list, tuple)):
        return True
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _as_json(name: str, value: object) -> str:
    try:
        return json.dumps(dict(value) if isinstance(value, Mapping) else None)
    except (TypeError, ValueError, RecursionError):
        raise _invalid(name, "an object that can be written as JSON", value) from None


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    wanted = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    if not _is_int(value) or value < low or (high is not None and value > high):
        raise _invalid(name, wanted, value)


def _check_number(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    wanted = f"a number {'above' if open_low else 'of at least'} {low:g} and at most {high:g}"
    if not (_is_int(value) or isinstance(value, float)) or not low <= value <= high or (open_low and value == low):
        raise _invalid(name, wanted, value)


def _bias(value: object) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias, ordered by id; keys may be strings, as in JSON."""
    pairs = list(value.items() if isinstance(value, Mapping) else value if _is_sequence(value) else [None])
    try:
        found = {int(token): float(bias) for token, bias in pairs if _is_bias(token, bias)}
        is_right = len(found) == len(pairs) <= MAX_BIASED and all(0 <= token < MAX_TOKEN_ID for token in found)
    except (TypeError, ValueError, OverflowError):
        found, is_right = {}, False
    if not is_right or any(not abs(bias) <= MAX_BIAS for bias in found.values()):
        wanted = f"an object of up to {MAX_BIASED:,} token ids with numbers from -{MAX_BIAS:g} to {MAX_BIAS:g}"
        raise _invalid("logit_bias", wanted, value)
    return tuple(sorted(found.items()))


def _allowed(value: object) -> tuple[int, ...]:
    """Token ids, each once and ordered."""
    if not (token_ids := _tuple_of("allowed_token_ids", value, int)):
        raise _invalid("allowed_token_ids", "a list of at least one token id", value)
    return tuple(sorted(set(token_ids)))


def _is_bias(token: object, bias: object) -> bool:
    is_id = token.isascii() and token.isdigit() if isinstance(token, str) else _is_int(token)
    return is_id and (_is_int(bias) or isinstance(bias, float))


@lru_cache(maxsize=256)
def _constraint_of_format(text: str) -> Constraint | None:
    """The constraint of an OpenAI response_format; None for plain text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint("json_object")
    if kind == "json_schema":
        schema = value.get("json_schema")
        schema = schema.get("schema") if isinstance(schema, dict) else None
        if isinstance(schema, dict | bool):
            return Constraint("json_schema", json.dumps(schema))
        wanted = '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
    else:
        wanted = "an object whose type is text, json_object or json_schema"
    raise _invalid("response_format", wanted, value)


def _tuple_of(name: str, value: object, kind: type) -> tuple[Any, ...]:
    """Accepts one value or a list of them, so that `stop="x"` is not read as a list of characters."""
    values = (value,) if isinstance(value, kind) else value
    if not _is_sequence(values):
        raise _invalid(name, f"one {kind.__name__} or a list of them", value)
    if kind is str and not all(isinstance(item, str) and item for item in values):
        raise _invalid(name, "a list of non-empty strings", value)
    if kind is int and not all(_is_int(item) and 0 <= item < MAX_TOKEN_ID for item in values):
        raise _invalid(name, "a list of token ids", value)
    return tuple(values)


DEFAULT_PARAMS = SamplingParams()
