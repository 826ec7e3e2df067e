"""What a model has answered, as fields of a result: those that our own rows and OpenAI's bodies have in common."""

from __future__ import annotations

import codecs
import hashlib
import math
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cbatch.engine import TokenLogprobs, ToolCall

TokenBytes = Callable[[int], bytes | None]
"""What a token stands for; None where the model has no tokenizer."""


def chat_logprobs(logprobs: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> list[dict[str, Any]]:
    """The list of tokens in OpenAI's chat form of log-probabilities."""
    return [
        _entry(one.token_id, one.logprob, token_bytes)
        | {"top_logprobs": [_entry(token, logprob, token_bytes) for token, logprob in one.top]}
        for one in logprobs
    ]


def prompt_logprobs_fields(first_id: int, logprobs: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> dict[str, Any]:
    """Log-probabilities of a prompt's tokens, and their sum; nothing comes before the first one, so it has none."""
    first = _entry(first_id, None, token_bytes) | {"top_logprobs": []}
    return {
        "sum": _rounded(math.fsum(one.logprob for one in logprobs)),
        "content": [first, *chat_logprobs(logprobs, token_bytes)],
    }


def text_completion_logprobs(
    first_id: int | None, logprobs: Sequence[TokenLogprobs], token_bytes: TokenBytes, hidden: Container[int]
) -> dict[str, Any]:
    """OpenAI's older form, of text completions.

    first_id: a token before the others that has no probability; 0 stands for that, since the form allows no null
    hidden:   tokens that take no place in the text
    """
    tokens = [_entry(one.token_id, one.logprob, token_bytes) for one in logprobs]
    top = [{_name(_entry(token, None, token_bytes)): _rounded(value) for token, value in one.top} for one in logprobs]
    if first_id is not None:
        tokens.insert(0, _entry(first_id, 0.0, token_bytes))
        top.insert(0, {})
    ids = ([] if first_id is None else [first_id]) + [one.token_id for one in logprobs]
    decoder, length, offsets = codecs.getincrementaldecoder("utf-8")("replace"), 0, []
    for token_id, entry in zip(ids, tokens, strict=True):
        offsets.append(length)
        if token_id not in hidden:
            length += len(decoder.decode(bytes(entry["bytes"]))) if entry["bytes"] is not None else len(entry["token"])
    return {
        "tokens": [_name(token) for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def tool_call_fields(calls: Sequence[ToolCall], key: str, choice: int) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's form. Nine letters and digits make an id, since Mistral's templates take no others."""
    ids = (hashlib.blake2b(f"{key}/{choice}/{number}".encode()).hexdigest()[:9] for number in range(len(calls)))
    return [
        {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for name, call in zip(ids, calls, strict=True)
    ]


def _entry(token_id: int, logprob: float | None, token_bytes: TokenBytes) -> dict[str, Any]:
    data = token_bytes(token_id)
    return {
        "token": data.decode("utf-8", "replace") if data is not None else f"token_id:{token_id}",
        "logprob": _rounded(logprob) if logprob is not None else None,
        "bytes": list(data) if data is not None else None,
    }


def _name(entry: dict[str, Any]) -> str:
    """A token in this form: its text, or, where it is a part of a character, its bytes as OpenAI writes them."""
    if entry["bytes"] is None or "\ufffd" not in entry["token"]:
        return str(entry["token"])
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry["bytes"])


def _rounded(logprob: float) -> float:
    """Five places: of those behind, most depend on which rows ran beside this one."""
    return round(logprob, 5)
