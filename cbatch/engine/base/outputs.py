"""What comes of a request: an event for each token, and the output that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from cbatch.engine.base.errors import RequestError

FinishReason = Literal["stop", "length", "error"]


class TokenLogprobs(NamedTuple):
    """A token with its log-probability, and the likeliest tokens in its place with theirs, likeliest first.

    They are those of the model: natural logarithms, before temperature, penalties and filters.
    """

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]]


class Sample(NamedTuple):
    """What a step gives one request: its next token, or the error that leaves it without."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: RequestError | None = None


class TokenEvent(NamedTuple):
    """One new token of one request; the last one carries the reason for the end.

    text is the delta that became safe to show, which may be empty. `Engine.step` fills it in only for requests with
    stop strings, so that detokenizing takes no time of the engine's thread; whoever reads the events makes the text of
    the others (see `Engine.detokenizer`). The events of `Engine.stream` all have their text.
    sample_index tells the outputs of one prompt apart. logprobs is there where it was asked for, prompt_logprobs (from
    the second token of the prompt on) with the first event. cached_tokens of the prompt did not have to be computed. An
    output of no tokens has one event, without a token. A request that failed has finish_reason `error`, an `error`, and
    no token; one that was refused at the door never had an id.
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
    """What has come of a prompt. finish_reason is `stop`, `length` or `error`; then `error` says what went wrong.

    cached_tokens:   how many of the prompt's tokens the prefix cache held
    logprobs:        of each token of the output, where they were asked for
    prompt_logprobs: of each token of the prompt from the second on, where they were asked for
    others:          further outputs for the same prompt, where more than one was asked for
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
        """Adds what one event brings, to the output that it is of."""
        while len(self.others) < event.sample_index:
            self.others.append(Completion())
        (self.others[event.sample_index - 1] if event.sample_index else self)._take(event)

    def _take(self, event: TokenEvent) -> None:
        self.text += event.text
        if event.token_id is not None:
            self.token_ids.append(event.token_id)
        if event.error is None:
            self.cached_tokens = event.cached_tokens
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        self.finish_reason = event.finish_reason
        self.stop_reason = event.stop_reason
        self.error = event.error
