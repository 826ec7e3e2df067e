"""From a finished request to its row of output, in cbatch's own form or in that of the OpenAI Batch API."""

from __future__ import annotations

import codecs
import hashlib
import math
from collections.abc import Container, Sequence
from typing import Any

from cbatch.engine.base.errors import RequestError
from cbatch.engine.base.outputs import Completion, TokenLogprobs
from cbatch.engine.engine import Engine
from cbatch.engine.requests import openai_batch
from cbatch.engine.requests.input_processor import RowRequest
from cbatch.engine.text.tool_calls import ToolCall


class ResultFormatter:
    """Formats the rows of output of one run on one engine."""

    def __init__(self, engine: Engine, *, token_ids: bool = False, timings: bool = False) -> None:
        """
        token_ids: add the output's token ids
        timings:   add times and cached tokens, which differ from run to run
        """
        self._tokenizer = engine.tokenizer
        self._shows_token_ids = token_ids
        self._shows_timings = timings

    def row(self, request: RowRequest) -> dict[str, Any]:
        """The row of output for a finished request."""
        choices = request.completion.choices
        usage = {
            "prompt_tokens": request.prompt_tokens,
            "completion_tokens": sum(len(choice.token_ids) for choice in choices),
        }
        fields = self._openai_row(request, usage) if request.row.call else self._plain_row(request, usage)
        if request.row.extra:
            fields["extra"] = request.row.extra
        if self._shows_timings:
            first = request.first_token_at - request.taken_at if request.first_token_at is not None else None
            fields |= {
                "cached_tokens": request.completion.cached_tokens,
                "ttft_s": first,
                "elapsed_s": request.finished_at - request.taken_at,
            }
        return fields

    def _plain_row(self, request: RowRequest, usage: dict[str, int]) -> dict[str, Any]:
        fields: dict[str, Any] = {"index": request.row.index, "id": request.row.id}
        if request.error is not None:
            return fields | {"error": _error_fields(request.error), "key": request.key}
        choices = []
        for number, completion in enumerate(request.completion.choices):
            choice = self._choice(request, number)
            if request.params.logprobs is not None:
                choice["logprobs"] = {"content": self._tokens(completion.logprobs)}
            choices.append(choice)
        fields |= choices[0]
        if len(choices) > 1:
            fields["choices"] = [{"index": number, **choice} for number, choice in enumerate(choices)]
        if (scores := self._prompt_logprobs(request)) is not None:
            fields["prompt_logprobs"] = scores
        return fields | {"usage": usage, "key": request.key}

    def _choice(self, request: RowRequest, number: int) -> dict[str, Any]:
        """What one output says, and how it ended."""
        completion = request.completion.choices[number]
        fields: dict[str, Any] = {"text": None, "finish_reason": completion.finish_reason}
        if self._tokenizer is not None:
            fields["text"] = completion.text
            if request.tags:
                parsed = self._tokenizer.output_parser.parse(
                    completion.text, is_thinking=request.is_thinking, tools=request.row.tools
                )
                fields["text"] = parsed.text
                if parsed.reasoning is not None:
                    fields["reasoning"] = parsed.reasoning
                if parsed.tool_calls:
                    fields["tool_calls"] = tool_call_fields(parsed.tool_calls, request.key, number)
                    if completion.finish_reason == "stop":
                        fields["finish_reason"] = "tool_calls"
            fields["text"] = request.echo + fields["text"]
        if completion.stop_reason is not None:
            fields["stop_reason"] = completion.stop_reason
        if self._shows_token_ids:
            fields["token_ids"] = completion.token_ids
        return fields

    def _openai_row(self, request: RowRequest, usage: dict[str, int]) -> dict[str, Any]:
        call = request.row.call
        assert call is not None
        if request.error is not None:
            return openai_batch.result_line(request.row, request.key, None, _error_fields(request.error))
        choices = []
        for number, completion in enumerate(request.completion.choices):
            fields = self._choice(request, number)
            logprobs = self._openai_logprobs(request, completion, is_chat=call.is_chat)
            choice = openai_batch.choice(call.is_chat, number, fields, logprobs)
            choices.append(choice | ({"token_ids": fields["token_ids"]} if self._shows_token_ids else {}))
        body = openai_batch.response_body(call, request.key, choices, usage)
        scores = self._prompt_logprobs(request)
        if scores is not None and (call.is_chat or not request.params.echo):
            body["prompt_logprobs"] = scores
        return openai_batch.result_line(request.row, request.key, body, None)

    def _openai_logprobs(self, request: RowRequest, completion: Completion, *, is_chat: bool) -> dict[str, Any] | None:
        if request.params.logprobs is None:
            return None
        if is_chat:
            return {"content": self._tokens(completion.logprobs), "refusal": None}
        scored, echoed = completion.logprobs, request.completion.prompt_logprobs
        if echoed is not None and request.params.echo and request.prompt_ids:
            # The first token of a prompt has no log-probability, and this form allows no null: 0 stands for it.
            scored = [TokenLogprobs(request.prompt_ids[0], 0.0, ()), *echoed, *scored]
        hidden: Container[int] = ()  # tokens that are not part of the text
        if self._tokenizer is not None and request.params.skip_special_tokens:
            hidden = self._tokenizer.special_ids
        tokens = [self._token(one.token_id, one.logprob) for one in scored]
        decoder, length, offsets = codecs.getincrementaldecoder("utf-8")("replace"), 0, []
        for one, token in zip(scored, tokens, strict=True):
            offsets.append(length)
            if one.token_id not in hidden:
                data = token["bytes"]
                length += len(token["token"]) if data is None else len(decoder.decode(bytes(data)))
        return {
            "tokens": [_token_name(token) for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [
                {_token_name(self._token(top)): _rounded(value) for top, value in one.top} for one in scored
            ],
            "text_offset": offsets,
        }

    def _prompt_logprobs(self, request: RowRequest) -> dict[str, Any] | None:
        """The log-probabilities of the prompt's tokens, and their sum, if the row asked for them."""
        scores = request.completion.prompt_logprobs
        if scores is None or not request.prompt_ids:
            return None
        first = self._token(request.prompt_ids[0]) | {"top_logprobs": []}  # it has none: nothing comes before it
        return {
            "sum": _rounded(math.fsum(one.logprob for one in scores)),
            "content": [first, *self._tokens(scores)],
        }

    def _tokens(self, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Tokens and their log-probabilities in the form of OpenAI's chat completions."""
        return [
            self._token(one.token_id, one.logprob)
            | {"top_logprobs": [self._token(token_id, logprob) for token_id, logprob in one.top]}
            for one in logprobs
        ]

    def _token(self, token_id: int, logprob: float | None = None) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id) if self._tokenizer is not None else None
        return {
            "token": data.decode("utf-8", "replace") if data is not None else f"token_id:{token_id}",
            "logprob": _rounded(logprob) if logprob is not None else None,
            "bytes": list(data) if data is not None else None,
        }


def _error_fields(error: RequestError) -> dict[str, str]:
    return {"code": error.code, "message": str(error)}


def tool_call_fields(calls: Sequence[ToolCall], key: str, choice: int) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's form. An id has nine letters and digits, because Mistral's templates take no others."""
    ids = (hashlib.blake2b(f"{key}/{choice}/{number}".encode()).hexdigest()[:9] for number in range(len(calls)))
    return [
        {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for name, call in zip(ids, calls, strict=True)
    ]


def _token_name(entry: dict[str, Any]) -> str:
    """The text of a token, or its bytes in OpenAI's notation if it is only a part of a character."""
    if entry["bytes"] is None or "\ufffd" not in entry["token"]:
        return str(entry["token"])
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry["bytes"])


def _rounded(logprob: float) -> float:
    """Rounded to five places, because most further ones depend on which rows ran beside this one."""
    return round(logprob, 5)
