"""Outputs of a request as bytes that can be kept, and a key that says for which requests.

Only the engine's own work is recorded: tokens, log-probabilities, how outputs ended. Text, reasoning and tool calls are
made of it again, by the code that makes those of a request that is computed.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from cbatch.base.errors import RequestError
from cbatch.base.outputs import TokenEvent, TokenLogprobs
from cbatch.base.request import Request
from cbatch.requests.output_processor import OutputProcessor
from cbatch.requests.row_keys import canonical_params
from cbatch.schedule.limits import SequenceLimits

FORMAT = 1
"""Changes if records of other versions cannot be read, or answers of other versions are not to be taken."""

FORMS = "one line"
"""How JSON by schema is written; answers in another form of it are not to be taken, either."""

KEY_BYTES = 16


def content_key(model: str, limits: SequenceLimits | None, request: Request) -> bytes:
    """A hash of all that decides what an engine generates for a request, KEY_BYTES long.

    model:  its fingerprint
    limits: None leaves out what only says where outputs end: `max_tokens`, and the size of the KV cache. Requests with
            the same key get the same tokens as far as both go then

    Names, columns and places of rows do not count, nor does the seed of a request that takes the likeliest tokens.
    """
    limit, params = None, request.params
    has_form = params.constraint is not None
    if limits is None:
        if not (has_form and params.close_forms):  # `max_tokens` decides how a form ends
            params = replace(params, max_tokens=None)
    elif limits.cache_is_small:
        with suppress(RequestError):
            limit = limits.limit_of_cache(len(request.prompt_ids), params.max_tokens)
    seed, choice = None if params.greedy else request.noise_seed, request.choice and [request.choice.name]
    others = [FORMAT, model, seed, limit, request.tools, choice, request.tags]
    others += [request.opens_thinking, request.is_thinking, request.prefix, *filter(None, [request.adapter])]
    others += [FORMS] if has_form else []
    others += [request.tails] if request.tails else []
    digest = hashlib.blake2b(json.dumps(others).encode(), digest_size=KEY_BYTES)
    for part in (canonical_params(params), array("q", request.prompt_ids).tobytes()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def record(outputs: OutputProcessor) -> bytes | None:
    """The outputs of a request that has ended; None if it has failed, or was embedded."""
    if outputs.has_failed or outputs.request.is_pooled:
        return None
    fields = {
        "outputs": [
            {
                "tokens": one.token_ids,
                "text": "".join(one.texts),
                "finish": one.finish_reason,
                "stop": one.stop_reason,
                "closed": one.closed,
                "logprobs": one.logprobs,
                "scores": one.prompt_logprobs,
            }
            for one in outputs.outputs
        ]
    }
    return zlib.compress(json.dumps(fields, separators=(",", ":")).encode(), 1)


def events_of(data: bytes) -> Iterator[TokenEvent]:
    """The events that give the outputs of a record. Raises ValueError, KeyError or TypeError if it is damaged."""
    try:
        fields = json.loads(zlib.decompress(data))
    except zlib.error as error:
        raise ValueError("not compressed data") from error
    for number, one in enumerate(fields["outputs"]):
        tokens: list[int | None] = one["tokens"] or [None]
        older = fields.get("prompt") if number == 0 else None
        packed = one.get("scores", older)
        scores = _unpacked(packed) if packed is not None else None
        logprobs: Sequence[TokenLogprobs | None] = _unpacked(one["logprobs"]) or [None] * len(tokens)
        for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            is_last = place + 1 == len(tokens)
            yield TokenEvent(
                None,
                token,
                one["text"] if is_last else "",
                one["finish"] if is_last else None,
                one["stop"] if is_last else None,
                closed=is_last and one.get("closed", False),
                sample_index=number,
                logprobs=logprob,
                prompt_logprobs=scores if place == 0 else None,
            )


def _unpacked(packed: list[Any]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(at, value, [(other, top) for other, top in tops], *more)  # which older records have not
        for at, value, tops, *more in packed
    ]
