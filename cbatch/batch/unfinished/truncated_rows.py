"""Rows of an earlier run whose `max_tokens` was lower: which of them stay, and which go on from where they ended.

A row that ended by itself is the same with a higher limit, but for its key. One that the limit has ended goes on with
its tokens, if it holds them (`--token-ids`); else it is computed anew, because a text does not tell its tokens. So is
one whose answer the limit may have changed on the way: by a try that it cut off, or a call, whose id comes of the key.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from cbatch.batch.jsonl import format_result, format_row
from cbatch.batch.row_check import CHECK

MOST_LIMITS = 4
"""Limits of earlier runs that are looked for; each costs a key for each row."""

Fields = dict[str, Any]


def earlier_limits(rows: Iterable[bytes], max_tokens: int) -> list[int]:
    """Limits below `max_tokens` that have probably ended outputs of these rows, the most frequent first."""
    found: Counter[int] = Counter()
    for row in rows:
        limit = _limit(json.loads(row))
        if limit is not None and limit < max_tokens:
            found[limit] += 1
    return [limit for limit, _ in found.most_common(MOST_LIMITS)]


def with_key(row: bytes, key: str) -> bytes | None:
    """A row as a run with a higher limit would write it, whose key is this one. None if it has to be computed."""
    fields = json.loads(row)
    if not _has_one_answer(fields) or any(one["finish_reason"] != "stop" for one in _outputs(fields)):
        return None
    fields.pop(CHECK, None)
    if row not in (format_result(fields), format_row(fields)):
        return None  # it was written by something else
    if "response" in fields:
        response, before = fields["response"], fields["key"]
        fields["id"] = f"batch_req_{key}"
        response["request_id"] = f"req_{key}"
        response["body"]["id"] = response["body"]["id"].replace(before, key)
    return format_result(fields | {"key": key})


def known_tokens(row: bytes) -> tuple[tuple[int, ...], ...]:
    """The tokens of each output of a row, with which it can go on; empty if the row does not hold all of them."""
    fields = json.loads(row)
    if not _has_one_answer(fields):
        return ()
    outputs = _outputs(fields)
    if "prompt_logprobs" in _body(fields) or any(one.get("logprobs") is not None for one in outputs):
        return ()  # which stand there rounded
    if any("token_ids" not in one for one in outputs):
        return ()
    return tuple(tuple(one["token_ids"]) for one in outputs)


def _has_one_answer(fields: Fields) -> bool:
    """Whether a row is the answer to one request, in which nothing but the key depends on the key."""
    if fields.get("error") is not None or fields.get("tool_messages"):
        return False
    if fields.get("validation", {"tries": 1})["tries"] != 1:
        return False
    return not any(one.get("tool_calls") or one.get("message", {}).get("tool_calls") for one in _outputs(fields))


def _limit(fields: Fields) -> int | None:
    """The number of tokens after which an output of a row was ended; None if none was, or it cannot be told."""
    if not _has_one_answer(fields):
        return None
    outputs = _outputs(fields)
    ended = [one for one in outputs if one["finish_reason"] == "length"]
    if not ended:
        return None
    if "token_ids" in ended[0]:
        return len(ended[0]["token_ids"])
    tokens = _body(fields)["usage"]["completion_tokens"]
    return int(tokens) // len(outputs) if len(ended) == len(outputs) else None


def _body(fields: Fields) -> Fields:
    """The fields of an answer: of the row, or of the body of an OpenAI response."""
    body: Fields = fields["response"]["body"] if "response" in fields else fields
    return body


def _outputs(fields: Fields) -> list[Fields]:
    body = _body(fields)
    outputs: list[Fields] = body.get("choices", [fields])
    return outputs
