"""Rows that are embedded: what they ask for, and what their results are, in cbatch's form and in OpenAI's.

https://platform.openai.com/docs/api-reference/embeddings describes the latter.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cbatch.base.errors import ModelError, invalid_row
from cbatch.base.params import SamplingParams
from cbatch.base.request import EmbedOptions, Request, ScoredTail
from cbatch.base.strict_json import json_type

EMBED, EMBEDDINGS = "embed", "/v1/embeddings"
FIELDS = ("input", EMBED, "dimensions", "prompt_name", "encoding_format")
"""Fields of such a row; the last four are columns like any other in rows that are not embedded."""

MOST_INPUTS = 2048
"""Texts in a row, as in OpenAI's API."""

_PARAMS = ("lora", "truncate_prompt")
"""Parameters that say something about a text."""


def fill_embedding(row: Request, fields: Mapping[str, Any]) -> None:
    """Sets what a row embeds, from its fields or from the body of a request. Raises RequestError."""
    row.extra = {name: value for name, value in row.extra.items() if name not in FIELDS}
    sources = [name for name in ("input", "prompt", "prompt_token_ids", "messages") if name in fields]
    if len(sources) != 1 or sources == ["messages"]:
        raise row.invalid(f"a row that is embedded has input, and not {' and '.join(sources) or 'nothing'}")
    dimensions, name = fields.get("dimensions"), fields.get("prompt_name")
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        raise row.invalid("dimensions must be a whole number of at least 1")
    if not isinstance(name, str | None):
        raise row.invalid(f"prompt_name must be a string, not {json_type(name)}")
    if (encoding := fields.get("encoding_format") or "float") not in ("float", "base64"):
        raise row.invalid("encoding_format must be float or base64")
    inputs, is_list = _inputs(row, fields[sources[0]], sources[0])
    row.embed = EmbedOptions(
        inputs=inputs, is_list=is_list, dimensions=dimensions, prompt_name=name, is_base64=encoding == "base64"
    )  # fmt: skip


def _inputs(row: Request, value: Any, name: str) -> tuple[list[str | list[int]], bool]:
    """The texts or token ids, and whether they are a list of them."""
    is_list = isinstance(value, list) and not (value and type(value[0]) is int)
    inputs = value if is_list else [value]
    for number, one in enumerate(inputs, start=1):
        is_ids = isinstance(one, list) and bool(one) and all(type(token) is int for token in one)
        if not is_ids and (not isinstance(one, str) or not one):
            what = "empty" if one in ("", []) else json_type(one)
            raise row.invalid(f"{name} must be a text, token ids, or a list of these; number {number} is {what}")
    if not 0 < len(inputs) <= MOST_INPUTS:
        raise row.invalid(f"{name} must be a list of 1 to {MOST_INPUTS:,} texts, not {len(inputs):,}")
    return inputs, is_list


def check_embedding(row: Request, embed: EmbedOptions, pooling: Callable[[], Any]) -> list[object]:
    """The facts that decide a row's result beside its input. Raises RequestError for what cannot be embedded.

    pooling: gives the model's `Pooling`, or raises ModelError
    """
    strange = [name for name in row.given if name not in _PARAMS] + ["tools"] * bool(row.tools)
    if strange or row.validation:
        raise invalid_row(f"{strange[0] if strange else '--validate'} has no meaning for what is embedded")
    try:
        made = pooling()
        if made.labels:
            raise invalid_row("the model classifies, and does not embed: ask for scores (score, --score)")
        made.prompt(embed.prompt_name)
    except ModelError as error:
        raise invalid_row(str(error)) from error
    return [made.identity, embed.is_list, embed.dimensions, embed.prompt_name, embed.is_base64]


def params_of(params: SamplingParams) -> SamplingParams:
    """Of effective parameters, those that count for an embedding."""
    return SamplingParams(max_tokens=1, **{name: getattr(params, name) for name in _PARAMS})


def encode_inputs(request: Request, pooling: Any, encode: Callable[[Request], Sequence[int]]) -> None:
    """Sets the token ids of a request that is embedded, each text behind its instruction. Raises RequestError.

    encode: makes the token ids of a prompt, cut if it asks for that
    """
    assert request.embed is not None
    prompt, tails = pooling.prompt(request.embed.prompt_name), list[ScoredTail]()
    for one in request.embed.inputs:
        source: dict[str, Any] = {"text": prompt + one} if isinstance(one, str) else {"prompt_ids": one}
        alone = replace(request, embed=None, **source)
        tails.append(ScoredTail(encode(alone), 1, (), ()))
        request.dropped_tokens += alone.dropped_tokens
    request.tails = tails


def row_fields(embed: EmbedOptions, embeddings: Sequence[Any]) -> dict[str, Any]:
    """The fields of a row that hold its embeddings, one or a list."""
    made = [_shown(one, embed) for one in embeddings]
    return {"embeddings": made} if embed.is_list else {"embedding": made[0]}


def api_body(embed: EmbedOptions, embeddings: Sequence[Any], model: str, prompt_tokens: int) -> dict[str, Any]:
    """The body of OpenAI's response."""
    shown = [_shown(one, embed) for one in embeddings]
    data = [{"object": "embedding", "index": number, "embedding": one} for number, one in enumerate(shown)]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def embeddings_in(fields: Mapping[str, Any]) -> list[Any] | None:
    """The embeddings of a row of output, in either form, each [dimensions] float32; None if it has none."""
    body = (fields.get("response") or {}).get("body") or fields
    several = [one["embedding"] for one in body.get("data", ()) if "embedding" in one] or body.get("embeddings")
    found = several if several is not None else [body["embedding"]] if body.get("embedding") is not None else None
    if found is None:
        return None
    import numpy as np

    numbers = (base64.b64decode(one) if isinstance(one, str) else one for one in found)
    return [np.frombuffer(one, "<f4") if isinstance(one, bytes) else np.array(one, np.float32) for one in numbers]


def nine_digits(numbers: Sequence[float]) -> list[float]:
    """Numbers of float32 as rows have them: nine digits say each exactly."""
    return [float(f"{number:.9g}") for number in numbers]


def _shown(embedding: Any, embed: EmbedOptions) -> list[float] | str:
    """Of [dimensions] float32."""
    if embed.is_base64:
        return base64.b64encode(embedding.astype("<f4").tobytes()).decode()
    return nine_digits(embedding.tolist())
