"""One generation in flight, and the event it emits for each token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from cbatch.engine.errors import RequestError
from cbatch.engine.params import SamplingParams

FinishReason = Literal["stop", "length", "error"]


class TextSink(Protocol):
    """Turns a request's tokens into text as they come (see `detokenizer.TextStream`)."""

    @property
    def stop_reason(self) -> str | None:
        """The stop string that was found, if one was."""

    def push(self, token_id: int, *, may_stop: bool) -> str:
        """Text that is safe to show now that this token is known."""

    def flush(self) -> str:
        """What was still held back, at the end of the output."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One new token of one request; the last one carries the reason for the end.

    text is the delta that became safe to show, which may be empty. cached_tokens of the prompt did not have to be
    computed. A request that failed has finish_reason `error`, an `error`, and no token; one that was refused at the
    door never had an id.
    """

    request_id: int | None
    token_id: int | None
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    error: RequestError | None = None
    cached_tokens: int = 0


@dataclass(eq=False, slots=True)
class Request:
    """Prompt and generated tokens in one list; how many of them are in the KV cache; which blocks hold them.

    Invariant: the keys and values of `token_ids[:num_computed]` are in the cache, in the slots of `blocks`;
    of `token_ids[:num_cached]` they were there already when it first entered.
    There is no prefill or decode state: a request wants `num_tokens - num_computed` more tokens computed,
    and when the last one has been, it gets a new token. Ids grow with arrival, so a smaller id is older.
    """

    id: int
    token_ids: list[int]
    params: SamplingParams
    max_new_tokens: int
    seed: int = 0
    sample_index: int = 0
    priority: int = 0
    stop_ids: frozenset[int] = frozenset()
    text: TextSink | None = None
    num_prompt: int = field(init=False)
    num_computed: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    blocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens known but not yet in the cache, at least 1 between steps."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether one token of work gives the next token; true for the last token of a prefill too."""
        return self.num_pending == 1 and self.num_computed > 0

    @property
    def is_running(self) -> bool:
        """Whether it holds a seat: running requests own blocks, waiting ones own none."""
        return bool(self.blocks)

    def accept(self, token_id: int) -> TokenEvent:
        """Appends a sampled token and says what came of it."""
        self.token_ids.append(token_id)
        may_stop = self.num_generated >= self.params.min_tokens
        if may_stop and token_id in self.stop_ids:
            return self._last(token_id, "", "stop")
        text = self.text.push(token_id, may_stop=may_stop) if self.text else ""
        if self.text and self.text.stop_reason is not None:
            return self._event(token_id, text, "stop", self.text.stop_reason)
        if self.num_generated >= self.max_new_tokens:
            return self._last(token_id, text, "length")
        return self._event(token_id, text)

    def fail(self, error: RequestError) -> TokenEvent:
        """The event of a request that ends without a further token."""
        return TokenEvent(self.id, None, finish_reason="error", error=error)

    def _last(self, token_id: int, text: str, reason: FinishReason) -> TokenEvent:
        return self._event(token_id, text + (self.text.flush() if self.text else ""), reason)

    def _event(
        self, token_id: int, text: str, reason: FinishReason | None = None, stop_reason: str | None = None
    ) -> TokenEvent:
        return TokenEvent(self.id, token_id, text, reason, stop_reason, cached_tokens=self.num_cached)
