"""Score rows: how likely the model finds continuations of a prompt, or a text. Nothing is generated for them.

Continuations are texts, or token ids, behind the prompt: behind plain text as they are, and behind messages as what the
model answers. If the end of a prompt and the beginning of a continuation are one token, that token is scored.

A model with a classification head says instead what it finds of the whole: of the text with its continuation, and of
messages with the answer, whose turn is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from cbatch.base.errors import invalid_row
from cbatch.base.params import CONSTRAINTS, SamplingParams
from cbatch.base.request import Request, ScoredTail
from cbatch.base.strict_json import json_type, parse_json_value

SCORE, COMPLETION, CHOICES = "score", "completion", "choices"

MAX_CHOICES = 1024

PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("query", "documents"))
PAIR_FIELDS, RANKING_FIELDS = frozenset([*PAIRS[0], *PAIRS[1]]), frozenset([*PAIRS[2], "top_n"])
"""Fields of vLLM's `/v1/score`, which has two names for a text and what follows it, and of `/v1/rerank`."""

Ids = Sequence[int]


def take_continuations(row: Request, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Sets the continuations of a score row. Returns its other fields. Raises RequestError.

    Without `completion` and `choices`, the last message is scored if it is the model's own; else the prompt itself is,
    which is then plain text.
    """
    others = {name: value for name, value in fields.items() if name not in (SCORE, COMPLETION, CHOICES)}
    given = [name for name in (COMPLETION, CHOICES) if fields.get(name) is not None]
    if len(given) > 1:
        raise row.invalid("the row has both completion and choices")
    if given:
        value = fields[given[0]]
        row.continuations = _choices(row, value) if given[0] == CHOICES else [_continuation(row, COMPLETION, value)]
        return others
    messages = others.get("messages")
    if messages is None:
        row.continuations = [None]
        return others | {"raw": True} if "prompt" in others else others
    last = messages[-1] if isinstance(messages, list) and len(messages) > 1 else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        raise row.invalid("a score row with messages needs completion, choices, or a last message of the assistant")
    row.continuations = [_continuation(row, "content of the last message", last.get("content"))]
    return others | {"messages": messages[:-1]}


def take_pair(row: Request, body: Mapping[str, Any]) -> dict[str, Any]:
    """Sets the continuations of a request line in the form of vLLM's `/v1/score` or `/v1/rerank`. Raises RequestError.

    Returns its other fields, with its first text as the prompt of a text completion.
    """
    ranks = row.call is not None and row.call.top_n is not None
    names = PAIRS[2] if ranks else PAIRS[0] if body.get(PAIRS[1][0]) is None else PAIRS[1]
    first, second = (body.get(name) for name in names)
    first = first[0] if isinstance(first, list) and len(first) == 1 else first
    if not isinstance(first, str):
        raise row.invalid(f"{names[0]} must be one string: give each its own line; not {json_type(first)}")
    row.continuations = _choices(row, [second] if isinstance(second, str) else second, names[1])
    known = RANKING_FIELDS if ranks else PAIR_FIELDS
    return {name: value for name, value in body.items() if name not in known} | {"prompt": first}


def continuations_in(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a score row among the columns of a table, in whose cells a list may be JSON text."""
    found = {name: columns[name] for name in (COMPLETION, CHOICES) if columns.get(name) not in (None, "")}
    if isinstance(found.get(CHOICES), str):
        with suppress(ValueError):
            found[CHOICES] = parse_json_value(found[CHOICES])
    return found


def _choices(row: Request, value: Any, name: str = CHOICES) -> list[str | Ids]:
    if not isinstance(value, list):
        raise row.invalid(f"{name} must be a list of texts, not {json_type(value)}")
    if not 1 <= len(value) <= MAX_CHOICES:
        raise row.invalid(f"{name} must be 1 to {MAX_CHOICES:,} texts, not {len(value):,}")
    return [_continuation(row, f"choice {number}", one) for number, one in enumerate(value, start=1)]


def _continuation(row: Request, name: str, value: Any) -> str | Ids:
    if not isinstance(value, str) and not (isinstance(value, list) and all(type(one) is int for one in value)):
        raise row.invalid(f"{name} must be a string or token ids, not {json_type(value)}")
    return value


def scoring_params(params: SamplingParams) -> SamplingParams:
    """The parameters of a score row: of those it was given, the few that say what is reported, and of which model.

    Raises RequestError for those that ask for an answer of a certain form.
    """
    if given := [name for name in CONSTRAINTS if getattr(params, name) is not None]:
        raise invalid_row(f"{given[0]} has no meaning in a score row, for which nothing is generated")
    asked = params.prompt_logprobs if params.logprobs is None else params.logprobs
    return SamplingParams(max_tokens=0, prompt_logprobs=asked or 0, logprobs=asked, lora=params.lora)


def set_tails(
    request: Request, encode: Callable[[Request], Ids], first_id: int | None, check_length: Callable[[int], object]
) -> None:
    """Sets the token ids of a request whose continuations are scored. Raises RequestError.

    encode:       makes token ids of a request's prompt
    first_id:     comes before a first token that is scored, as in training; None if the model has no such token
    check_length: raises RequestError for so many tokens that they cannot be computed
    """
    prompt_ids = request.prompt_ids
    context = list(encode(request)) if any(then is not None for then in request.continuations) else []
    groups: dict[tuple[int, tuple[int, ...]], list[tuple[int, int]]] = {}
    for number, then in enumerate(request.continuations):
        if then is None:
            whole = list(encode(request))
            start = int(len(whole) > 1)
        elif not isinstance(then, str):
            whole, start = [*context, *then], len(context)
        elif prompt_ids:
            raise invalid_row("behind token ids, continuations must be token ids, too")
        else:
            asked: dict[str, Any] = {"answer": then} if request.messages is not None else {}
            whole = list(encode(replace(request, **asked or {"text": (request.text or "") + then})))
            start = _first_differing(context, whole)
        if start == 0 and whole != [first_id]:
            if first_id is None:
                raise invalid_row("nothing comes before the first token: the model has no token that begins a text")
            whole, start = [first_id, *whole], 1
        if not 0 < start < len(whole):
            which = f"continuation {number + 1} has" if len(request.continuations) > 1 else "there is"
            raise invalid_row(f"{which} no token to score")
        check_length(len(whole) - 1)
        groups.setdefault((start, tuple(whole[:-1])), []).append((whole[-1], number))
    computed = [ids for _, ids in groups]
    shared = _first_differing(min(computed), max(computed))  # in the order of lists all others lie between them
    request.prompt_ids = computed[0][:shared]
    request.tails = [
        ScoredTail(ids[shared:], start, *(tuple(part) for part in zip(*ends, strict=True)))
        for (start, ids), ends in groups.items()
    ]


def set_classified(request: Request, encode: Callable[[Request], Ids]) -> None:
    """Sets the token ids of a request whose continuations are classified, each a tail. Raises RequestError.

    encode: makes the token ids of a prompt, cut if it asks for that
    """
    tails, dropped = list[ScoredTail](), 0
    for then in request.continuations:
        alone = replace(request, continuations=(), tails=())
        if then is not None and not isinstance(then, str):
            alone.prompt_ids, alone.text, alone.messages = [*encode(request), *then], None, None
        elif request.messages is not None and then is not None:
            alone.messages = [*request.messages, {"role": "assistant", "content": then}]
            alone.template = replace(request.template, add_generation_prompt=False)
        elif then is not None:
            alone.text = (request.text or "") + then
            if request.prompt_ids:
                raise invalid_row("behind token ids, continuations must be token ids, too")
        if not (ids := encode(alone)):
            raise invalid_row("there is no token to classify")
        tails.append(ScoredTail(ids, 1, (), ()))
        dropped += alone.dropped_tokens
    request.prompt_ids, request.tails, request.dropped_tokens = (), tails, dropped


def check_ranking(labels: Sequence[str]) -> None:
    """Raises RequestError unless documents can be ranked by the labels of the model's classification head."""
    if len(labels) != 1:
        has = f"a head with {len(labels)} labels" if labels else "no classification head"
        raise invalid_row(
            f"/v1/rerank needs a model of a class ForSequenceClassification with one label, and this one has {has}; "
            "score rows with choices take any model"
        )


def _first_differing(ids: Ids, others: Ids) -> int:
    """The first place at which one differs from the other, or the end of the first."""
    places = (at for at, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other)
    return next(places, min(len(ids), len(others)))
