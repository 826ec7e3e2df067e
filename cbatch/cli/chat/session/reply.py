"""One reply of the model: its text, how it was sampled, and how it ended. No engine, no terminal."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from cbatch.cli.chat.session.tool_round import ToolRound, ToolUse

if TYPE_CHECKING:
    from cbatch.base.errors import RequestError
    from cbatch.requests.output_processor import StreamEvent

ReplyState = Literal["waiting", "streaming", "calling", "stop", "length", "stopped", "error"]
"""Waiting for its first token, streaming, waiting for tools, or how it ended; `stopped` means by the user."""

FINAL_STATES: tuple[ReplyState, ...] = ("stop", "length", "stopped", "error")
STOPPED_REMARK = "stopped; /continue resumes it"
UNANSWERED_REMARK = "no reply; /retry asks for one"
CONTEXT_FULL = "context_full"
"""The code of a reply that reached the end of the context."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Reply:
    """One reply, while it streams and after.

    text:           the visible part, which the model is shown in later turns
    reasoning:      what the model wrote between its think tags
    raw:            both as the model wrote them, if it uses think tags
    seed, params:   how it is sampled; params holds only what differs from the model's defaults
    error, code:    what went wrong, if anything
    remark:         why it ended early, and what the user can do about it
    model:          hub id or folder of what wrote it, if it is not the chat's own
    rounds:         what the model called before this text
    label:          what is special about it among those it stands beside, such as `temperature=0.7`
    num_requests:   how often it was asked for or continued; only then its text may become shorter
    requested_at, first_token_at, last_token_at: seconds on the `monotonic` clock
    """

    text: str = ""
    reasoning: str = ""
    raw: str = ""
    seed: int = 0
    state: ReplyState = "waiting"
    error: str = ""
    code: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    remark: str = ""
    rounds: list[ToolRound] = field(default_factory=list)
    label: str = ""
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_tokens: int = 0
    num_requests: int = 0
    requested_at: float = 0.0
    first_token_at: float | None = None
    last_token_at: float = 0.0

    @property
    def generated(self) -> str:
        """Everything the model wrote; a continuation starts from here."""
        return self.raw or self.text

    @property
    def uses(self) -> list[ToolUse]:
        """Every call of a tool."""
        return [use for each in self.rounds for use in each.uses]

    @property
    def is_open(self) -> bool:
        """Whether more of it may come."""
        return self.state in ("waiting", "streaming", "calling")

    @property
    def is_in_history(self) -> bool:
        """Whether later turns show it to the model: it ended well, or it has some text."""
        return self.state == "stop" or bool(self.text or self.rounds)

    @property
    def can_continue(self) -> bool:
        """Whether it was cut off."""
        return self.state in ("stopped", "length") or (self.state == "error" and bool(self.generated))

    def begin(self, now: float) -> None:
        """Prepares it for a request; text that is there already will be continued."""
        self.text = self.text.rstrip("\ufffd")  # a character that was cut in the middle
        self.raw = self.raw.rstrip("\ufffd")
        self.state, self.error, self.code, self.remark = "waiting", "", "", ""
        self.requested_at, self.first_token_at, self.num_tokens = now, None, 0
        self.num_requests += 1

    def append(self, event: StreamEvent) -> None:
        """Adds what an event brings."""
        if event.reasoning or event.raw != event.text or self.raw:  # from here on the text alone does not tell
            self.raw = self.generated + event.raw
        self.text += event.text
        self.reasoning += event.reasoning

    def count_token(self, now: float) -> None:
        """Records that a token came."""
        self.state = "streaming"
        self.num_tokens += 1
        self.first_token_at = now if self.first_token_at is None else self.first_token_at
        self.last_token_at = now

    def finish(
        self,
        state: ReplyState,
        error: RequestError | None,
        limit: int | None,
        *,
        has_failed: bool,
        can_trim: bool = True,
    ) -> None:
        """Ends it, and says in `remark` what the user can do if it ended early.

        limit:      the most tokens it could have; None means the rest of the context
        has_failed: whether the engine has failed for good
        can_trim:   whether there are older turns to drop
        """
        self.state = state
        if error is not None:
            self.error, self.code = str(error), error.code
        if has_failed:
            self.remark = "the engine has failed; the conversation is kept, and /load opens it in a new chat"
        elif self.code == "prompt_too_long" and not can_trim:
            self.remark = "this message alone is too long; /undo takes it back, so that you can shorten it"
        elif self.code == "prompt_too_long":
            self.remark = "/trim drops the oldest turns and asks again; /undo takes the message back"
        elif state == "length" and limit is not None and self.num_tokens >= limit:
            self.remark = f"cut off after max_tokens = {limit:,}; /continue resumes it"
        elif state == "length":
            self.code = CONTEXT_FULL
            self.remark = "cut off because the context is full; /trim drops the oldest turns and resumes it"

    def begin_round(self, uses: list[ToolUse]) -> ToolRound:
        """Takes what it is so far for a round of calls; the next text follows their results."""
        made = ToolRound(self.text, uses)
        self.rounds.append(made)
        self.text = self.raw = ""
        self.state = "calling"
        return made

    def stop(self) -> None:
        """Ends it where it is."""
        self.state = "stopped"
        for each in self.rounds:
            each.cancel()
        self.remark = STOPPED_REMARK if self.generated else UNANSWERED_REMARK

    def finished_copy(self) -> Reply:
        """A copy, which is stopped if more was still to come."""
        copy = replace(self, rounds=[ToolRound(each.text, [replace(use) for use in each.uses]) for each in self.rounds])
        if copy.is_open:
            copy.stop()
        return copy
