"""What one request asks of the sampler, and how its randomness is seeded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from cbatch.engine.errors import RequestError

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing logits by them would overflow."""


MAX_TEMPERATURE = 1000.0
"""Beyond this every token is as likely as any other, and float32 soon ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Names and meanings follow the OpenAI API and vLLM. Raises `RequestError` (`invalid_row`) for a wrong
    type or a value out of range.

    max_tokens:     most tokens to generate; None is the rest of the context.
    min_tokens:     end tokens and stop strings do not end the output before this many tokens.
    temperature:    0 is greedy, 1 samples from the model's own distribution.
    top_k:          sample among the k likeliest tokens; 0 (or -1) is all.
    top_p:          sample among the likeliest tokens that together reach this probability.
    min_p:          drop tokens less likely than this share of the likeliest one.
    seed:           None lets the caller derive one; see `derive_seed`.
    stop:           strings that end the output; they are not part of the text.
    stop_token_ids: further end tokens.
    ignore_eos:     go on to max_tokens, past the model's end tokens.
    """

    max_tokens: int | None = 512
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, low=1)
        if self.seed is not None:
            _check_int("seed", self.seed, low=-(2**63), high=2**64 - 1)
        _check_int("min_tokens", self.min_tokens, low=0)
        _check_int("top_k", self.top_k, low=-1, high=2**31 - 1)
        _check_number("temperature", self.temperature, low=0.0, high=MAX_TEMPERATURE)
        _check_number("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _check_number("min_p", self.min_p, low=0.0, high=1.0)
        for name in ("temperature", "top_p", "min_p"):
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        if not isinstance(self.ignore_eos, bool):
            raise _invalid("ignore_eos", "true or false", self.ignore_eos)
        object.__setattr__(self, "stop", _tuple_of("stop", self.stop, str))
        object.__setattr__(self, "stop_token_ids", _tuple_of("stop_token_ids", self.stop_token_ids, int))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def merged(self, overrides: Mapping[str, Any]) -> SamplingParams:
        """These parameters with some replaced; a None in `overrides` keeps what stands here."""
        given = {name: value for name, value in overrides.items() if value is not None}
        if not given:
            return self
        return SamplingParams(**({name: getattr(self, name) for name in PARAM_NAMES} | given))


PARAM_NAMES: tuple[str, ...] = tuple(field.name for field in fields(SamplingParams))


def derive_seed(run_seed: int, kind: str, name: str | float) -> int:
    """The seed of a row that gives none, 64 bits: a hash of the run's seed and what names the row.

    kind: `id` or `index`, so that the row with id 3 and the row at index 3 do not share their randomness.
    """
    text = f"{run_seed}/{kind}/{type(name).__name__}/{name}"
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")


def _invalid(name: str, wanted: str, value: object) -> RequestError:
    too_large = isinstance(value, int) and value.bit_length() > 100  # Python refuses to print really long ones
    return RequestError("invalid_row", f"{name} must be {wanted}, not {'this' if too_large else repr(value)[:60]}.")


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    wanted = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise _invalid(name, wanted, value)


def _check_number(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    wanted = f"a number {'above' if open_low else 'of at least'} {low:g} and at most {high:g}"
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _invalid(name, wanted, value)
    if not low <= value <= high or (open_low and value == low):
        raise _invalid(name, wanted, value)


def _tuple_of(name: str, value: object, kind: type) -> tuple[Any, ...]:
    """Accepts one value or a list of them, so that `stop="x"` is not read as a list of characters."""
    values = (value,) if isinstance(value, kind) else value
    if not isinstance(values, list | tuple):
        raise _invalid(name, f"one {kind.__name__} or a list of them", value)
    for item in values:
        if not isinstance(item, kind) or isinstance(item, bool) or item == "" or (isinstance(item, int) and item < 0):
            raise _invalid(name, "a list of non-empty strings" if kind is str else "a list of token ids", value)
    return tuple(values)
