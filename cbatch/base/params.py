"""Sampling parameters of a request, and how its randomness is seeded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeGuard, TypeVar

from cbatch.base.errors import RequestError
from cbatch.base.spelling import similar_name

Given = TypeVar("Given", contravariant=True)
Held = TypeVar("Held", covariant=True)


class Converted(Generic[Given, Held]):
    """Annotates a field that may be given as one type and is converted to another in `__post_init__`.

    Type checkers read a descriptor: `Given` is what the constructor takes, `Held` is what the attribute is. At run time
    there is none, so the field is as quick as any other. Its default must be typed as Any (`NO_ITEMS`, `NOTHING`).
    """

    if TYPE_CHECKING:

        def __get__(self, instance: object, owner: type) -> Held: ...

        def __set__(self, instance: object, value: Given) -> None: ...


NO_ITEMS: Any = ()
NOTHING: Any = None

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

CONSTRAINT_RULE = (
    "Excludes the other constraints; the output ends when it is complete, whatever min_tokens and ignore_eos say"
)

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


def _invalid(name: str, wanted: str, value: object) -> RequestError:
    too_large = isinstance(value, int) and value.bit_length() > 100  # Python refuses to print very long ones
    return RequestError("invalid_row", f"{name} must be {wanted}, not {'this' if too_large else repr(value)[:60]}.")


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


def _optional(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _whole(low: int, high: int | None = None) -> Check:
    wanted = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"

    def check(name: str, value: object) -> int:
        if not _is_int(value) or value < low or (high is not None and value > high):
            raise _invalid(name, wanted, value)
        return value

    return check


def _number(low: float, high: float, *, above: bool = False) -> Check:
    """`above`: whether `low` itself is too low"""
    wanted = f"a number {'above' if above else 'of at least'} {low:g} and at most {high:g}"

    def check(name: str, value: object) -> float:
        is_number = _is_int(value) or isinstance(value, float)
        if not is_number or not low <= value <= high or (above and value == low):  # type: ignore[operator]
            raise _invalid(name, wanted, value)
        return float(value)  # type: ignore[arg-type]

    return check


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _invalid(name, "true or false", value)
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _invalid(name, "a non-empty string", value)
    return value


def _adapter(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _invalid(name, "the name of an adapter", value)
    return value


def _top_k(name: str, value: object) -> int:
    return max(int(_whole(-1, 2**31 - 1)(name, value)), 0)


def _num_logprobs(name: str, value: object) -> int | None:
    """False is OpenAI's way to ask for none."""
    return None if value is None or value is False else int(_whole(0, 20)(name, value))


def _ids(name: str, value: object) -> tuple[int, ...]:
    return _tuple_of(name, value, int)


def _few_texts(name: str, value: object) -> tuple[str, ...]:
    texts = _tuple_of(name, value, str)
    if len(texts) > MAX_STRINGS:
        raise RequestError("invalid_row", f"{name} has {len(texts):,} strings; at most {MAX_STRINGS:,} are allowed.")
    return texts


def _choice(name: str, value: object) -> tuple[str, ...]:
    if not (_is_sequence(value) and value):
        raise _invalid(name, "a list of at least one string", value)
    return _tuple_of(name, value, str)


def _response_format(name: str, value: object) -> str | None:
    """As text it is hashable, and the properties keep their order."""
    text = value if isinstance(value, str) else _as_json(name, value)
    return text if _constraint_of_format(text) else None


def _bias(name: str, value: object) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias, ordered by id; keys may be strings, as in JSON."""
    pairs = list(value.items() if isinstance(value, Mapping) else value if _is_sequence(value) else [None])
    try:
        found = {int(token): float(bias) for token, bias in pairs if _is_bias(token, bias)}
        is_right = len(found) == len(pairs) <= MAX_BIASED and all(0 <= token < MAX_TOKEN_ID for token in found)
    except (TypeError, ValueError, OverflowError):
        found, is_right = {}, False
    if not is_right or any(not abs(bias) <= MAX_BIAS for bias in found.values()):
        wanted = f"an object of up to {MAX_BIASED:,} token ids with numbers from -{MAX_BIAS:g} to {MAX_BIAS:g}"
        raise _invalid(name, wanted, value)
    return tuple(sorted(found.items()))


def _allowed(name: str, value: object) -> tuple[int, ...]:
    """Token ids, each once and ordered."""
    if not (token_ids := _tuple_of(name, value, int)):
        raise _invalid(name, "a list of at least one token id", value)
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


Check = Callable[[str, Any], Any]
"""Takes the name and the value of a parameter, and returns the value as it is held. Raises RequestError."""


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """What is known of a sampling parameter beside its name, type and default, which asks for nothing.

    help:           what it does, for people
    changes_logits: whether it changes logits before a token is sampled
    filters:        `kernels` if it drops unlikely tokens in the fused kernels and in torch, `torch` if only there: rows
                    that ask for it take that path
    """

    help: str
    check: Check
    changes_logits: bool = False
    filters: Literal["", "kernels", "torch"] = ""


def _param(default: Any, check: Check, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"param": ParamInfo(help, check, **more)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when its output ends.

    Names and meanings follow the OpenAI API and vLLM. Lists become tuples, so that parameters can be hashed and do not
    change. `response_format`, `regex`, `choice` and `grammar` exclude each other; such an output ends when it is
    complete, whatever `min_tokens` and `ignore_eos` say. Raises RequestError (`invalid_row`) for a wrong type or a
    value out of range.
    """

    max_tokens: int | None = _param(
        512,
        lambda name, value: value,  # `__post_init__` checks it
        "most tokens to generate; None: up to the end of the context; 0: none, to score or echo the prompt",
    )
    min_tokens: int = _param(
        0,
        _whole(0),
        "end tokens and stop strings do not end the output before this many tokens",
        changes_logits=True,
    )
    n: int = _param(1, _whole(1, 128), "number of outputs, each with its own randomness")
    temperature: float = _param(
        0.0, _number(0, MAX_TEMPERATURE), "0 is greedy; 1 samples from the model's own distribution"
    )
    top_k: int = _param(0, _top_k, "sample among the k most likely tokens; 0 (or -1): among all", filters="kernels")
    top_p: float = _param(
        1.0,
        _number(0, 1, above=True),
        "sample among the most likely tokens that together reach this probability",
        filters="kernels",
    )
    min_p: float = _param(
        0.0, _number(0, 1), "drop tokens less likely than this share of the most likely one", filters="kernels"
    )
    seed: int | None = _param(
        None,
        _optional(_whole(-(2**63), 2**64 - 1)),
        "None: made of the seed of the call or run and the prompt's place in it (`derive_seed`), so that the same call "
        "gives the same outputs",
    )
    stop: Converted[str | Sequence[str], tuple[str, ...]] = _param(
        NO_ITEMS, _few_texts, "strings that end the output; they are not part of the text"
    )
    stop_token_ids: Converted[int | Sequence[int], tuple[int, ...]] = _param(NO_ITEMS, _ids, "further end tokens")
    ignore_eos: bool = _param(False, _flag, "continue past the model's end tokens, up to max_tokens")
    presence_penalty: float = _param(
        0.0, _number(-2, 2), "subtracted from the logit of every token generated so far", changes_logits=True
    )
    frequency_penalty: float = _param(
        0.0, _number(-2, 2), "subtracted once for each time the token was generated", changes_logits=True
    )
    repetition_penalty: float = _param(
        1.0,
        _number(0.01, 100),
        "divides positive and multiplies negative logits of tokens in prompt or output (CTRL, "
        "https://arxiv.org/abs/1909.05858)",
        changes_logits=True,
    )
    logit_bias: Converted[LogitBias, tuple[tuple[int, float], ...]] = _param(
        NO_ITEMS, _bias, "added to the logits of token ids, -100 to 100; a mapping or pairs", changes_logits=True
    )
    bad_words: Converted[str | Sequence[str], tuple[str, ...]] = _param(
        NO_ITEMS, _few_texts, "strings whose tokens may not be generated in sequence"
    )
    allowed_token_ids: Converted[int | Sequence[int] | None, tuple[int, ...] | None] = _param(
        NOTHING,
        _optional(_allowed),
        "the only tokens that may be generated; None: all. End tokens count, so an output without any of them in the "
        "list ends by max_tokens or a stop string",
        changes_logits=True,
    )
    logprobs: int | None = _param(
        None,
        _num_logprobs,
        "report the log-probability of each token and of the k most likely ones, from the raw logits",
    )
    prompt_logprobs: int | None = _param(None, _num_logprobs, "the same for the tokens of the prompt")
    echo: bool = _param(False, _flag, "begin the text with the prompt")
    skip_special_tokens: bool = _param(True, _flag, "leave special tokens out of the text")
    response_format: Converted[str | Mapping[str, Any] | None, str | None] = _param(
        NOTHING,
        _optional(_response_format),
        '`{"type": "json_object"}`, or `json_schema` with a schema, as in the OpenAI API; kept as JSON text',
    )
    regex: str | None = _param(None, _optional(_text), "a pattern that the whole output matches")
    choice: Converted[Sequence[str] | None, tuple[str, ...] | None] = _param(
        NOTHING, _optional(_choice), "the output is one of these strings"
    )
    grammar: str | None = _param(
        None,
        _optional(_text),
        "a grammar that the output follows, in llguidance's dialect of Lark",
    )
    lora: str = _param(
        "",
        _adapter,
        "name of the LoRA adapter that the model computes with (`EngineConfig.lora`); empty: without one",
    )

    def __post_init__(self) -> None:
        scores = self.prompt_logprobs is not None or self.echo is True
        _optional(_whole(0 if scores else 1))("max_tokens", self.max_tokens)
        for name, info in PARAMS.items():
            object.__setattr__(self, name, info.check(name, getattr(self, name)))
        if self.max_tokens == 0 and self.n != 1:
            raise RequestError("invalid_row", "n must be 1 if max_tokens is 0: nothing is generated.")
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise RequestError("invalid_row", f"{' and '.join(given)} cannot be combined.")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def changes_logits(self) -> bool:
        """Whether logits change before a token is sampled, not counting bad words and constraints."""
        return self.asks_for(_CHANGES_LOGITS)

    def asks_for(self, names: Iterable[str]) -> bool:
        """Whether one of these parameters differs from its default."""
        return any(getattr(self, name) != _DEFAULTS[name] for name in names)

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

    def merged(self, overrides: Mapping[str, Any]) -> SamplingParams:
        """These parameters with some replaced; None in `overrides` keeps the value.

        Raises RequestError: `unknown_parameter` for a name that is no parameter, else as the constructor does.
        """
        if not overrides.keys() <= PARAMS.keys():
            raise _unknown(next(name for name in overrides if name not in PARAMS))
        given = {name: value for name, value in overrides.items() if value is not None}
        return SamplingParams(**with_overrides({name: getattr(self, name) for name in PARAM_NAMES}, given))


PARAMS: dict[str, ParamInfo] = {field.name: field.metadata["param"] for field in fields(SamplingParams)}
PARAM_NAMES: tuple[str, ...] = tuple(PARAMS)
_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
_CHANGES_LOGITS = tuple(name for name, info in PARAMS.items() if info.changes_logits)
DEFAULT_PARAMS = SamplingParams()

SamplingParams.__doc__ = f"{SamplingParams.__doc__}\n" + "".join(
    f"    {name}: {info.help}\n" for name, info in PARAMS.items()
)


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


def _unknown(name: object) -> RequestError:
    meant = similar_name(name, PARAM_NAMES) if isinstance(name, str) else None
    advice = f"; did you mean {meant!r}?" if meant else "."
    return RequestError("unknown_parameter", f"There is no sampling parameter {repr(name)[:60]}{advice}")
