"""Events of the engine for a request, one for each token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from cbatch.base.errors import RequestError

FinishReason = Literal["stop", "length", "tool_calls", "error"]

MIN_LOGPROB = -9999.0
"""Stands for the logarithm of 0 of a token: JSON has no infinity. OpenAI uses the same number."""


class TokenLogprobs(NamedTuple):
    """The log-probability of a token, and the most likely tokens in its place with theirs, most likely first.

    Natural logarithms of the model's own distribution, before temperature, penalties and filters.

    is_likeliest: whether no token is likelier; None if that is not known
    """

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]]
    is_likeliest: bool | None = None


class Sample(NamedTuple):
    """The result of a step for one request: its next token, or an error.

    other: log-probabilities of the token that may take its place (see `OutputGuide`)
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: RequestError | None = None
    other: TokenLogprobs | None = None


class KnownOutput(NamedTuple):
    """Tokens that an output has had already when its request is added, and their log-probabilities if it wants any."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()

    def samples(self) -> Iterator[Sample]:
        """The same as what steps would give."""
        return map(Sample, self.token_ids, self.logprobs) if self.logprobs else map(Sample, self.token_ids)


class TokenEvent(NamedTuple):
    """One new token of one request. The last event of a request has a finish_reason.

    request_id:      None if the request was refused
    token_id:        None in the event of a failed request, and in the only event of an output without tokens
    text:            new text, perhaps empty: unfinished characters and possible stop strings are held back. The engine
                     fills it in only for requests with stop strings, so that its thread does not detokenize; the
                     request's `OutputProcessor` makes the text of the others.
    finish_reason:   `stop`, `length` or `error`; None while the output goes on
    stop_reason:     the stop string that ended the output, or `loop`
    error:           why the request failed
    cached_tokens:   tokens of the prompt that were in the prefix cache
    sample_index:    number of the output among several for one prompt
    logprobs:        of this token, if asked for
    prompt_logprobs: of the prompt's tokens from the second on, if asked for; in the first event
    pooled:          [hidden size], the mean of the hidden states that an embedding is made of
    is_known:        whether the request had this token already when it was added
    closed:          whether the output has come to `max_tokens`, and its form is complete all the same
    """

    request_id: int | None
    token_id: int | None
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    error: RequestError | None = None
    cached_tokens: int = 0
    sample_index: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    pooled: Any = None
    is_known: bool = False
    closed: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model asks for.

    name:      of the function
    arguments: a JSON object, as text
    id:        names the call, so that the function's result can refer to it
    """

    name: str
    arguments: str
    id: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The form of OpenAI's chat completions."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    def __str__(self) -> str:
        return f"{self.name}({self.arguments})"
