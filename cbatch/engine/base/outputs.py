"""Outputs of requests: an event for each token, and the completion they add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from cbatch.engine.base.errors import RequestError

FinishReason = Literal["stop", "length", "error"]


class TokenLogprobs(NamedTuple):
    """The log-probability of a token, and the most likely tokens in its place with theirs, most likely first.

    Natural logarithms of the model's own distribution, before temperature, penalties and filters.
    """

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]]


class Sample(NamedTuple):
    """What a step gives one request: its next token, or an error."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: RequestError | None = None


class TokenEvent(NamedTuple):
    """One new token of one request. The last event of a request has a finish_reason.

    request_id:      None if the request was refused
    token_id:        None in the event of a failed request, and in the only event of an output without tokens
    text:            new text, perhaps empty: unfinished characters and possible stop strings are held back.
                     `Engine.step` fills it in only for requests with stop strings, so that the engine's thread does not
                     detokenize; a detokenizer of the reader makes the text of the others (`Engine.detokenizer`).
                     Events of `Engine.stream` always have it.
    finish_reason:   `stop`, `length` or `error`; None while the output goes on
    stop_reason:     the stop string that ended the output
    error:           why the request failed
    cached_tokens:   tokens of the prompt that were in the prefix cache
    sample_index:    number of the output among several for one prompt
    logprobs:        of this token, if asked for
    prompt_logprobs: of the prompt's tokens from the second on, if asked for; in the first event
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


@dataclass(slots=True)
class Completion:
    """The output for one prompt.

    finish_reason:   `stop`, `length`, or `error`: then `error` says why
    stop_reason:     the stop string that ended the output
    cached_tokens:   tokens of the prompt that were in the prefix cache
    logprobs:        of each token of the output, if asked for
    prompt_logprobs: of each token of the prompt from the second on, if asked for
    others:          further outputs for the same prompt (`n`)
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None
    error: RequestError | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    others: list[Completion] = field(default_factory=list)

    @property
    def choices(self) -> list[Completion]:
        """All outputs for the prompt, this one first."""
        return [self, *self.others]

    def take(self, event: TokenEvent) -> None:
        """Adds an event to the output that it belongs to."""
        while len(self.others) < event.sample_index:
            self.others.append(Completion())
        output = self.others[event.sample_index - 1] if event.sample_index else self
        output.text += event.text
        if event.token_id is not None:
            output.token_ids.append(event.token_id)
        if event.error is None:
            output.cached_tokens = event.cached_tokens
        if event.logprobs is not None:
            output.logprobs.append(event.logprobs)
        if event.prompt_logprobs is not None:
            output.prompt_logprobs = event.prompt_logprobs
        output.finish_reason, output.stop_reason, output.error = event.finish_reason, event.stop_reason, event.error
