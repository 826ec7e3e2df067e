"""A conversation: its turns, the answers they got, and what of it the model is shown. No engine, no terminal."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from cbatch.engine import OutputParser

ReplyState = Literal["asked", "streaming", "stop", "length", "stopped", "error"]
"""Of an answer: waiting for its first token, coming, or how it ended; `stopped` is by the user."""

FINAL_STATES: tuple[ReplyState, ...] = ("stop", "length", "stopped", "error")
STOPPED_REMARK = "stopped; /continue goes on"
CONTEXT_FULL = "context_full"
"""The code of an answer that was cut off where the context ends."""

UNANSWERED_REMARK = "no answer; /retry asks for one"
Message = dict[str, Any]


@dataclass(eq=False, slots=True, weakref_slot=True)
class Reply:
    """One answer of the model, while it comes and after.

    text:           the answer proper, which the model is shown later
    reasoning:      what it thought before that, between think tags
    raw:            both as the model wrote them, where it has think tags
    is_thinking:    whether the prompt had opened those
    params:         sampling parameters that were asked for with it, beside the model's own
    error, code:    what went wrong, if something did
    remark:         why it was cut off, and what can be done about that
    asked_at, first_at, last_at: when it was asked for, when its first and its last token came; clock of `monotonic`
    """

    text: str = ""
    reasoning: str = ""
    raw: str = ""
    is_thinking: bool = False
    seed: int = 0
    state: ReplyState = "asked"
    error: str = ""
    code: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    remark: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_tokens: int = 0
    requested_at: float = 0.0
    first_token_at: float | None = None
    last_token_at: float = 0.0

    @property
    def generated(self) -> str:
        """What the model wrote, to go on from there."""
        return self.raw or self.text

    def append(self, delta: str, form: OutputParser | None, *, is_whole: bool) -> str:
        """Adds what has come, and returns what of it is the answer proper."""
        if form is None or form.think_tags is None:
            self.text += delta
            return delta
        before = len(self.text)
        self.raw = self.generated + delta
        if is_whole:
            parts = form.parse(self.raw, is_thinking=self.is_thinking)
            self.reasoning, self.text = parts.reasoning or "", parts.text
        else:
            reasoning, self.text = form.split(self.raw, is_thinking=self.is_thinking)
            self.reasoning = reasoning or ""
        return self.text[before:]

    @property
    def is_open(self) -> bool:
        """Whether more of it may come."""
        return self.state in ("asked", "streaming")

    @property
    def is_in_history(self) -> bool:
        """Whether it is part of what the model is shown later: it ended well, or after some text."""
        return self.state == "stop" or bool(self.text)

    @property
    def can_continue(self) -> bool:
        """Whether it was cut off."""
        return self.state in ("stopped", "length") or (self.state == "error" and bool(self.generated))

    def explain_ending(self, limit: int | None, *, has_failed: bool) -> None:
        """Says what can be done where it did not come to its own end.

        limit: the most tokens that it could have; None is the rest of the context
        """
        if has_failed:
            self.remark = "the engine has failed; what was said is kept, and /load opens it in another chat"
        elif self.code == "prompt_too_long":
            self.remark = "/trim leaves out the oldest turns and asks again; /undo takes the message back"
        elif self.state == "length" and limit is not None and self.num_tokens >= limit:
            self.remark = f"cut off after {limit:,} tokens (max_tokens); /continue goes on"
        elif self.state == "length":
            self.code = CONTEXT_FULL
            self.remark = "cut off, the context is full; /trim leaves out the oldest turns and goes on"

    def mark_stopped(self) -> None:
        """Ends it where it is, by the user's will or that of circumstances."""
        self.state = "stopped"
        self.remark = STOPPED_REMARK if self.generated else UNANSWERED_REMARK


@dataclass(eq=False, slots=True, weakref_slot=True)
class Turn:
    """What the user said, and the answers to it: several after a retry, of which one is chosen.

    compares: the first of those that are shown side by side, until one is picked; 0 for none
    fallback: the one that was chosen before the last retry
    """

    text: str
    replies: list[Reply] = field(default_factory=list)
    chosen: int = 0
    first_compared: int = 0
    fallback: int = 0

    @property
    def reply(self) -> Reply | None:
        return self.replies[self.chosen] if self.replies else None

    @property
    def is_open(self) -> bool:
        return any(reply.is_open for reply in self.replies)

    def add_replies(self, count: int) -> list[Reply]:
        """So many more, of which the first is chosen, and all are shown where there are several."""
        first = len(self.replies)
        self.fallback, self.chosen, self.first_compared = self.chosen, first, first if count > 1 else 0
        self.replies += [Reply() for _ in range(count)]
        return self.replies[first:]

    def pick(self, number: int) -> None:
        """Chooses one for good."""
        self.chosen = self.fallback = number
        self.first_compared = 0

    def settle(self) -> None:
        """Where the chosen answer came to nothing, the one before it is taken back."""
        reply = self.reply
        if reply is not None and not reply.is_in_history and self.replies[self.fallback].is_in_history:
            self.chosen = self.fallback

    def messages(self) -> list[Message]:
        """As the model is shown it when it is in the past; a turn without an answer is not."""
        reply = self.reply
        if reply is None or not reply.is_in_history:
            return []
        return [_message("user", self.text), _message("assistant", reply.text)]


@dataclass(eq=False, slots=True, weakref_slot=True)
class Notice:
    """A line from the program, not from the conversation."""

    text: str
    is_error: bool = False


@dataclass(eq=False, slots=True, weakref_slot=True)
class Session:
    """One conversation with settings of its own.

    number:   of the sessions of this process, from 1; never given twice
    params:   sampling parameters that differ from the model's own
    prelude:  messages before the first turn, of a conversation that began in a file
    items:    turns, and the program's notes between them, in the order in which they are shown
    dropped:  how many turns, from the oldest, the model is no longer shown; the prelude counts as one
    queue:    what the user said while an answer was still coming
    attached: texts of files that go before the next message
    attempts: answers asked for so far, so that each has randomness of its own
    is_unread: whether something came while the user was elsewhere
    """

    name: str
    number: int = 0
    system: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    prelude: list[Message] = field(default_factory=list)
    items: list[Turn | Notice] = field(default_factory=list)
    dropped: int = 0
    queue: list[str] = field(default_factory=list)
    attached: list[str] = field(default_factory=list)
    attempts: int = 0
    is_unread: bool = False

    @property
    def turns(self) -> list[Turn]:
        return [item for item in self.items if isinstance(item, Turn)]

    @property
    def last(self) -> Turn | None:
        return next((item for item in reversed(self.items) if isinstance(item, Turn)), None)

    @property
    def is_busy(self) -> bool:
        """Whether an answer is coming."""
        last = self.last
        return last is not None and last.is_open

    def add_notice(self, text: str, *, is_error: bool = False) -> None:
        self.items.append(Notice(text, is_error))

    @property
    def system_messages(self) -> list[Message]:
        """What the model is shown before everything else, and what is never dropped."""
        return [_message("system", self.system)] if self.system else []

    def history_before(self, turn: Turn) -> list[list[Message]]:
        """The messages before a turn that the model is shown: the prelude, and one list for each turn."""
        turns = self.turns
        groups = [earlier.messages() for earlier in turns[: turns.index(turn)]]
        return (([self.prelude] if self.prelude else []) + groups)[self.dropped :]

    def messages(self, turn: Turn) -> list[Message]:
        """The conversation up to a turn's question."""
        history = [message for group in self.history_before(turn) for message in group]
        return [*self.system_messages, *history, _message("user", turn.text)]

    @property
    def num_droppable(self) -> int:
        """What `dropped` counts: the prelude, where there is one, and the turns."""
        return bool(self.prelude) + len(self.turns)

    def drop(self, count: int) -> int:
        """Leaves out the `count` oldest turns, never the last one, and those that are out. Returns how many went."""
        before = self.dropped
        self.dropped = max(before, min(count, self.num_droppable - 1))
        return self.dropped - before

    def remove(self, turn: Turn) -> None:
        """Takes a turn out."""
        self.items.remove(turn)
        self.dropped = min(self.dropped, self.num_droppable)

    def copy(self, name: str) -> Session:
        """A session of its own that has come to the same point; of an answer that is coming, what is there."""
        copy = Session(name, 0, self.system, dict(self.params), list(self.prelude))
        copy.dropped, copy.attempts = self.dropped, self.attempts
        copy.items = [_copy_item(item) for item in self.items]
        return copy

    def move_queue_to_turns(self) -> None:
        """Makes turns of what is still to be said, for whoever opens the session later."""
        self.items += [unanswered_turn(text) for text in self.queue]
        self.queue.clear()

    def load_messages(self, messages: list[Message]) -> None:
        """Fills an empty session with a conversation; what does not alternate as a chat does is its prelude."""
        rest = list(messages)
        if rest and rest[0]["role"] == "system":
            self.system = str(rest.pop(0)["content"])
        for message in rest:
            last = self.last
            if message["role"] == "user" and (last is None or last.replies):
                self.items.append(Turn(str(message["content"])))
            elif message["role"] == "assistant" and last is not None and not last.replies:
                last.replies.append(Reply(str(message["content"]), state="stop"))
            else:
                self.prelude += [part for turn in self.turns for part in turn.messages()]
                if last is not None and not last.replies:
                    self.prelude.append(_message("user", last.text))
                self.prelude.append(message)
                self.items.clear()


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _copy_item(item: Turn | Notice) -> Turn | Notice:
    if isinstance(item, Notice):
        return item
    copy = Turn(item.text, [finished_copy(reply) for reply in item.replies], item.chosen, fallback=item.fallback)
    copy.settle()
    return copy


def unanswered_turn(text: str) -> Turn:
    """A turn that has not been asked yet."""
    return Turn(text, [Reply(state="stopped", remark=UNANSWERED_REMARK)])


def finished_copy(reply: Reply) -> Reply:
    """A copy, in which an answer that is still coming is cut off."""
    copy = replace(reply)
    if copy.is_open:
        copy.mark_stopped()
    return copy
