"""A finished output, put together from its events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cbatch.engine.errors import RequestError
from cbatch.engine.request import Text, TokenEvent, TokenLogprobs


@dataclass(slots=True)
class Completion:
    """What has come of a prompt. finish_reason is `stop`, `length` or `error`; then `error` says what went wrong.

    cached_tokens:   how many of the prompt's tokens the prefix cache held
    logprobs:        of each token of the output, where they were asked for
    prompt_logprobs: of each token of the prompt from the second on, where they were asked for
    others:          further outputs for the same prompt, where more than one was asked for
    """

    said: Text = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None
    error: RequestError | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    others: list[Completion] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole output so far. Raises RequestError where it cannot be made."""
        return self.said if isinstance(self.said, str) else self.said.read()

    def settle(self) -> None:
        """Makes the text now. Raises RequestError where it cannot be made."""
        self.said = self.text

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
        self.said = self.said + event.said
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
