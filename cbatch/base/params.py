"""Sampling parameters of a request, and how its randomness is seeded."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial, wraps
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict, TypeGuard, TypeVar, get_args

from cbatch.base.errors import RequestError, invalid_row
from cbatch.base.option import Option, differing, documented
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

LOOP_REPEATS, LOOP_TOKENS = 10, 64
"""An output that ends in so many repetitions, of so many tokens together, is a loop: rows of zeros are shorter."""

LOOP = "loop"
"""The `stop_reason` of an output that `loop_guard` has ended."""

CONSTRAINTS = ("response_format", "regex", "choice", "grammar")
"""Parameters that constrain the output; a request has at most one of them."""

_FORMATS = "an object whose type is text, json_object or json_schema, or a class of pydantic"

LogitBias = Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]]
"""Token ids, which are strings in JSON, and what is added to their logits."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: tuple[str, ...] = get_args(Effort)
"""Values of `reasoning_effort`, and apart from the first of ollama's `think`."""

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "tool_call"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A form that an output as a whole must have.

    json_object  any JSON object; `source` is empty
    json_schema  JSON that is valid for a schema; `source` is the schema as JSON text. Properties come in the order of
                 the schema, and no others unless it has `additionalProperties`
    regex        text that a pattern matches as a whole, in the syntax of Rust's regex crate, without look-around
                 and backreferences; \\d is 0 to 9
    choice       one of several strings; `source` is a JSON list of them
    grammar      text of a context-free grammar with a rule `start`, in llguidance's dialect of Lark
    tool_call    calls of a request's tools in the model's own format; `source` is what `request_constraint` makes

    JSON is one line, with a space after each colon and comma; if it is `pretty`, a space or a line break with up to 40
    spaces may stand between its parts instead.
    """

    kind: Kind
    source: str = ""
    pretty: bool = False


def _invalid(name: str, wanted: str, value: object) -> RequestError:
    too_large = isinstance(value, int) and value.bit_length() > 100  # Python refuses to print very long ones
    return invalid_row(f"{name} must be {wanted}, not {'this' if too_large else repr(value)[:60]}.")


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
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


def _if(is_right: Callable[[Any], bool], wanted: str) -> Check:
    """A check that takes a value as it is. `wanted`: what an error says instead"""

    def check(name: str, value: Any) -> Any:
        if not is_right(value):
            raise _invalid(name, wanted, value)
        return value

    return check


def _whole(low: int, high: int | None = None) -> Accepted:
    wanted = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    check = _if(lambda value: _is_int(value) and low <= value and (high is None or value <= high), wanted)
    return check, f"integer from {low}" if high is None else f"{low} to {high}"


def _number(low: float, high: float, *, above: bool = False) -> Accepted:
    """`above`: whether `low` itself is too low"""
    check = _if(
        lambda value: (
            (_is_int(value) or isinstance(value, float)) and low <= value <= high and not (above and value == low)
        ),
        f"a number {'above' if above else 'of at least'} {low:g} and at most {high:g}",
    )
    shown = f"above {low:g}, at most {high:g}" if above else f"{low:g} to {high:g}"
    return lambda name, value: float(check(name, value)), shown


_flag = _if(lambda value: isinstance(value, bool), "true or false")
_text = _if(lambda value: isinstance(value, str) and value != "", "a non-empty string")
_adapter = _if(lambda value: isinstance(value, str), "the name of an adapter")


def _num_logprobs(name: str, value: object) -> int | None:
    """False is OpenAI's way to ask for none."""
    return None if value is None or value is False else int(_LOGPROBS[0](name, value))


def _few_texts(name: str, value: object) -> tuple[str, ...]:
    texts = _tuple_of(name, value, str)
    if len(texts) > MAX_STRINGS:
        raise invalid_row(f"{name} has {len(texts):,} strings; at most {MAX_STRINGS:,} are allowed.")
    return texts


def _choice(name: str, value: object) -> tuple[str, ...]:
    if not (_is_sequence(value) and value):
        raise _invalid(name, "a list of at least one string", value)
    return _tuple_of(name, value, str)


def _response_format(name: str, value: object) -> str | None:
    """As text it is hashable, and the properties keep their order. Pydantic's classes stand for their schema."""
    if hasattr(value, "model_json_schema"):
        value = {"type": "json_schema", "json_schema": {"schema": value.model_json_schema()}}
    if not isinstance(value, str | Mapping):
        raise _invalid(name, _FORMATS, value)
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
    if not (token_ids := _tuple_of(name, value, int)):
        raise _invalid(name, "a list of at least one token id", value)
    return tuple(sorted(set(token_ids)))


def _is_bias(token: object, bias: object) -> bool:
    is_id = token.isascii() and token.isdigit() if isinstance(token, str) else _is_int(token)
    return is_id and (_is_int(bias) or isinstance(bias, float))


@lru_cache(maxsize=256)
def _constraint_of_format(text: str) -> Constraint | None:
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
        wanted = _FORMATS
        if isinstance(value, dict) and value.keys() & {"properties", "$ref", "anyOf", "enum", "items"}:
            wanted += " (a schema itself is guided_json)"
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

Accepted = tuple[Check, str]
"""A check, and the type and range that it accepts, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Param(Option):
    """The description of a sampling parameter beside its name, type and default, which asks for nothing.

    check:          makes the value that is held of the one that is given
    wanted:         type and range, for people
    changes_logits: whether it changes logits before a token is sampled
    filters:        `kernels` if it drops unlikely tokens in the fused kernels and in torch, `torch` if only there: rows
                    that ask for it take that path
    is_option:      whether commands have an option of this name; the others are set by --param
    only_in_run:    whether it asks for what a chat cannot show, such as several texts
    """

    check: Check
    wanted: str
    changes_logits: bool = False
    filters: Literal["", "kernels", "torch"] = ""
    is_option: bool = False
    only_in_run: bool = False


def _param(default: Any, accepted: Accepted, help: str, more: str = "", **about: Any) -> Any:
    check, wanted = accepted
    param = Param(help=help, more=more, check=check, wanted=wanted, group="Sampling", **about)
    return field(default=default, metadata={"option": param})


_COMMON: Any = {"is_option": True}
_RUN: Any = {"is_option": True, "only_in_run": True}
_FLAG = _flag, "true or false"
_TEXTS = _few_texts, f"string or list, at most {MAX_STRINGS:,}"
_IDS = partial(_tuple_of, kind=int), "token id or list"
_LOGPROBS = _whole(0, 20)
_TRUNCATION = _if(
    lambda value: isinstance(value, str) and re.fullmatch(r"(left|right|middle)(:[1-9]\d{0,8})?", value) is not None,
    "left, right or middle, or one of them with a number of tokens, such as left:2000",
)
_K = _num_logprobs, _LOGPROBS[1]
_EFFORT = _if(lambda value: isinstance(value, str) and value in EFFORTS, f"one of {', '.join(EFFORTS)}")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SamplingParams:
    """How the tokens of one request are chosen, and when its output ends.

    Names and meanings follow the OpenAI API and vLLM. Lists become tuples, so that parameters can be hashed and do not
    change. `response_format`, `regex`, `choice` and `grammar` exclude each other; such an output ends when it is
    complete, whatever `min_tokens` and `ignore_eos` say. Raises RequestError (`invalid_row`) for a wrong type or a
    value out of range.
    """

    max_tokens: int | None = _param(
        512,
        (lambda name, value: value, _whole(1)[1]),  # `__post_init__` checks it
        "Most tokens to generate.",
        "Fewer if context or cache are full. None: up to the end of the context. 0 is allowed with `prompt_logprobs` "
        "or `echo`: nothing is generated.",
        **_COMMON,
    )
    min_tokens: int = _param(
        0,
        _whole(0),
        "Fewest tokens to generate.",
        "End tokens and stop strings do not end the output before.",
        changes_logits=True,
        **_COMMON,
    )
    thinking_budget: int | None = _param(
        None,
        (_optional(_whole(0)[0]), _whole(0)[1]),
        "Most tokens of reasoning.",
        "Then the reasoning is closed and the answer begins.",
        **_COMMON,
    )
    reasoning_effort: Effort | None = _param(
        None,
        (_optional(_EFFORT), "word"),
        "How much the model is to reason, if its chat template knows levels.",
        f"One of {', '.join(f'`{one}`' for one in EFFORTS)}; `none` turns off the thinking of other templates, too.",
        **_COMMON,
    )
    n: int = _param(
        1,
        _whole(1, 128),
        "Number of outputs for each prompt.",
        "They share the work of their prompt; each has randomness of its own.",
        **_RUN,
    )
    temperature: float = _param(
        0.0,
        _number(0, MAX_TEMPERATURE),
        "Sampling temperature; 0 always takes the likeliest token.",
        "1 samples from the model's own distribution.",
        **_COMMON,
    )
    top_k: int = _param(
        0,
        (lambda name, value: max(_whole(-1, 2**31 - 1)[0](name, value), 0), "integer"),
        "Sample from the K likeliest tokens.",
        "0 or -1: from all.",
        filters="kernels",
        **_COMMON,
    )
    top_p: float = _param(
        1.0,
        _number(0, 1, above=True),
        "Sample from the likeliest tokens whose probabilities add up to this.",
        filters="kernels",
        **_COMMON,
    )
    min_p: float = _param(
        0.0,
        _number(0, 1),
        "Drop tokens whose probability is below this fraction of the likeliest token's.",
        filters="kernels",
        **_COMMON,
    )
    top_n_sigma: float = _param(
        0.0,
        _number(0, 100),
        "Keep tokens whose logit is at most this many standard deviations of the logits below the largest.",
        "0 keeps all. It comes before `top_k` ([top-nσ](https://arxiv.org/abs/2411.07641)).",
        filters="torch",
    )
    seed: int | None = _param(
        None,
        (_optional(_whole(-(2**63), 2**64 - 1)[0]), "64-bit integer"),
        "Seed of the request's randomness.",
        "None: made of the seed of the run and the row's `id`, or its place if it has none (`derive_seed`).",
    )
    stop: Converted[str | Sequence[str], tuple[str, ...]] = _param(
        NO_ITEMS,
        _TEXTS,
        "Stop at this text (repeatable).",
        "It is not part of the text.",
        metavar="TEXT",
        many=True,
        **_COMMON,
    )
    stop_token_ids: Converted[int | Sequence[int], tuple[int, ...]] = _param(NO_ITEMS, _IDS, "Further end tokens.")
    ignore_eos: bool = _param(False, _FLAG, "Continue after end tokens.", "Up to `max_tokens`.", **_COMMON)
    loop_guard: bool = _param(
        False,
        _FLAG,
        "Stop an output that ends in ten or more repetitions of the same tokens.",
        f"They are at least {LOOP_TOKENS} tokens together; the `stop_reason` is `loop`. On in a chat.",
        **_COMMON,
    )
    presence_penalty: float = _param(
        0.0,
        _number(-2, 2),
        "Penalize tokens that were generated before.",
        "Subtracted once from their logits.",
        changes_logits=True,
        **_COMMON,
    )
    frequency_penalty: float = _param(
        0.0,
        _number(-2, 2),
        "Penalize tokens by how often they were generated.",
        "Subtracted from the logit each time.",
        changes_logits=True,
        **_COMMON,
    )
    repetition_penalty: float = _param(
        1.0,
        _number(0.01, 100),
        "Penalize tokens that are in the prompt or the output; 1 is no penalty.",
        "Divides positive logits and multiplies negative ones ([CTRL](https://arxiv.org/abs/1909.05858)).",
        changes_logits=True,
        **_COMMON,
    )
    logit_bias: Converted[LogitBias, tuple[tuple[int, float], ...]] = _param(
        NO_ITEMS,
        (_bias, f"object, at most {MAX_BIASED:,} token ids"),
        "Numbers from -100 to 100 that are added to the logits of token ids.",
        "In Python also pairs.",
        changes_logits=True,
    )
    bad_words: Converted[str | Sequence[str], tuple[str, ...]] = _param(
        NO_ITEMS, _TEXTS, "Strings whose tokens may not be generated one after the other."
    )
    allowed_token_ids: Converted[int | Sequence[int] | None, tuple[int, ...] | None] = _param(
        NOTHING,
        (_optional(_allowed), "token id or list"),
        "The only tokens that may be generated.",
        "End tokens count: without one in the list, the output ends by `max_tokens` or a stop string.",
        changes_logits=True,
    )
    logprobs: int | None = _param(
        None,
        _K,
        "Return the log-probabilities of each output token and of the K likeliest in its place.",
        "From the raw logits.",
        metavar="K",
        **_RUN,
    )
    prompt_logprobs: int | None = _param(
        None, _K, "Return those of the prompt's tokens, likewise.", metavar="K", **_RUN
    )
    echo: bool = _param(False, _FLAG, "Begin the text with the prompt.", only_in_run=True)
    skip_special_tokens: bool = _param(True, _FLAG, "Leave special tokens out of the text.")
    response_format: Converted[str | Mapping[str, Any] | type | None, str | None] = _param(
        NOTHING,
        (_optional(_response_format), "object"),
        'Make the output JSON: `{"type": "json_object"}`, or `json_schema` with a schema.',
        "As OpenAI has it; kept as JSON text. In Python also a class of pydantic.",
    )
    regex: str | None = _param(
        None,
        (_optional(_text), "string"),
        "Make every output match this pattern.",
        "The syntax of Rust's `regex` crate, without look-around and back-references.",
        metavar="PATTERN",
        **_COMMON,
    )
    choice: Converted[Sequence[str] | None, tuple[str, ...] | None] = _param(
        NOTHING, (_optional(_choice), "list of strings"), "The output is one of these strings."
    )
    grammar: str | None = _param(
        None,
        (_optional(_text), "string"),
        "The output fits a context-free grammar in llguidance's dialect of Lark.",
        "Its first rule is `start`.",
    )
    truncate_prompt: str | None = _param(
        None,
        (_optional(_TRUNCATION), "`left`, `right` or `middle`, perhaps with `:N`"),
        "Drop this side of a prompt that is too long; with :N, keep N tokens.",
        "Tokens of the longest user message are dropped, or of a raw prompt, so that N tokens are left in all, and the "
        "context has room for `max_tokens`, or for half of it if that is less. The row says how many were dropped.",
        metavar="left|right|middle[:N]",
        **_RUN,
    )
    close_forms: bool = _param(
        True,
        _FLAG,
        "End a form before `max_tokens` does.",
        "Once what is left just suffices for that, only tokens come that lead to the end of the JSON, regex or choice; "
        "the row says `closed`, with the `finish_reason` `length`.",
        is_option=True,
    )
    pretty_json: bool = _param(
        False,
        _FLAG,
        "Let JSON by schema have line breaks and indentation.",
        "Otherwise it is one line, with a space after each colon and comma.",
        is_option=True,
    )
    lora: str = _param(
        "",
        (_adapter, "string"),
        "Name of the [LoRA adapter](lora.md) that the model computes with.",
        "One of `--lora`, in Python of `EngineConfig.lora`; empty: the model itself.",
    )

    def __post_init__(self) -> None:
        scores = self.prompt_logprobs is not None or self.echo is True
        _optional(_whole(0 if scores else 1)[0])("max_tokens", self.max_tokens)
        for name, info in PARAMS.items():
            object.__setattr__(self, name, info.check(name, getattr(self, name)))
        if self.max_tokens == 0 and self.n != 1:
            raise invalid_row("n must be 1 if max_tokens is 0: nothing is generated.")
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise invalid_row(f"{' and '.join(given)} cannot be combined.")

    __repr__ = differing

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
            found = _constraint_of_format(self.response_format)
            return replace(found, pretty=True) if found is not None and self.pretty_json else found
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


PARAMS: dict[str, Param] = {field.name: field.metadata["option"] for field in fields(SamplingParams)}
PARAM_NAMES: tuple[str, ...] = tuple(PARAMS)
_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
_CHANGES_LOGITS = tuple(name for name, info in PARAMS.items() if info.changes_logits)
ALIASES = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
    "repeat_penalty": "repetition_penalty",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Other names of sampling parameters, whose values mean the same."""


def _takes_aliases(make: Callable[..., None]) -> Callable[..., None]:
    """The constructor of SamplingParams, with its arguments by their other names, too."""

    @wraps(make)
    def init(self: SamplingParams, **given: Any) -> None:
        if not given.keys() <= PARAMS.keys():
            own: dict[str, Any] = {}
            for name, value in given.items():
                meant = ALIASES.get(name, name)
                if meant not in PARAMS:
                    raise _unknown(name, "; params as a mapping take the names of OpenAI, vLLM and ollama.")
                if own.setdefault(meant, value) != value:
                    raise invalid_row(f"{name} is {value!r}, but another name of it is {own[meant]!r}.")
            given = own
        make(self, **given)

    return init


SamplingParams.__init__ = _takes_aliases(SamplingParams.__init__)  # type: ignore[method-assign]
DEFAULT_PARAMS = SamplingParams()

documented(SamplingParams)


SamplingOptions = TypedDict("SamplingOptions", {  # noqa: UP013
    "max_tokens": int | None, "min_tokens": int, "thinking_budget": int | None, "reasoning_effort": Effort | None,
    "n": int, "temperature": float, "top_k": int, "top_p": float, "min_p": float, "top_n_sigma": float,
    "stop": str | Sequence[str], "stop_token_ids": int | Sequence[int], "ignore_eos": bool, "loop_guard": bool,
    "presence_penalty": float, "frequency_penalty": float, "repetition_penalty": float, "logit_bias": LogitBias,
    "bad_words": str | Sequence[str], "allowed_token_ids": int | Sequence[int] | None, "logprobs": int | None,
    "prompt_logprobs": int | None, "echo": bool, "skip_special_tokens": bool,
    "response_format": str | Mapping[str, Any] | type | None, "regex": str | None, "choice": Sequence[str] | None,
    "grammar": str | None, "truncate_prompt": str | None, "close_forms": bool, "pretty_json": bool, "lora": str,
}, total=False)  # fmt: skip
"""The fields of `SamplingParams`, except `seed`, as arguments of a call."""


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


def _unknown(name: object, otherwise: str = ".") -> RequestError:
    meant = similar_name(name, PARAM_NAMES) if isinstance(name, str) else None
    advice = f"; did you mean {meant!r}?" if meant else otherwise
    return RequestError("unknown_parameter", f"There is no sampling parameter {repr(name)[:60]}{advice}")
