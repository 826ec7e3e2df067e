"""A conversation: its turns, their replies, and what of them the model is shown. No engine, no terminal."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

from cbatch.cli.chat.session.attachment import Attachment, compose, new_paste, pastes_in
from cbatch.cli.chat.session.reply import UNANSWERED_REMARK, Reply
from cbatch.cli.chat.session.tool_round import ToolUse, round_messages

Message = dict[str, Any]

TITLE_CHARACTERS = 48


@dataclass(eq=False, slots=True, weakref_slot=True)
class Turn:
    """A message of the user and the replies to it: several after a retry, one of which is chosen.

    text:           what was typed
    chosen:         index of the reply that counts
    first_compared: index of the first reply shown side by side until one is picked; 0 shows only the chosen one
    fallback:       index of the reply that was chosen before the last retry
    attachments:    files and long pastes that belong to the message
    """

    text: str
    replies: list[Reply] = field(default_factory=list)
    chosen: int = 0
    first_compared: int = 0
    fallback: int = 0
    attachments: list[Attachment] = field(default_factory=list)

    @property
    def message(self) -> str:
        """What the model is shown."""
        return compose(self.text, self.attachments)

    @property
    def is_undecided(self) -> bool:
        """Whether several replies stand side by side and none has been picked."""
        return bool(self.first_compared)

    @property
    def pick_hint(self) -> str:
        """How to pick one of the replies that stand side by side."""
        last = len(self.replies) - 1
        words = f"/pick {self.first_compared} to {last} keeps a reply, /pick {self.fallback} the one before"
        return f"{words}; on an empty line its digit does so, too, or Left, Right and Enter"

    @property
    def reply(self) -> Reply | None:
        return self.replies[self.chosen] if self.replies else None

    @property
    def is_open(self) -> bool:
        return any(reply.is_open for reply in self.replies)

    @property
    def asking(self) -> ToolUse | None:
        """The call that the user has to allow or refuse next."""
        uses = (use for reply in self.replies if reply.is_open for use in reply.uses)
        return next((use for use in uses if use.state == "asking"), None)

    def add_replies(self, count: int) -> list[Reply]:
        """Adds `count` replies and chooses the first; several are shown side by side."""
        first = len(self.replies)
        self.fallback, self.chosen, self.first_compared = self.chosen, first, first if count > 1 else 0
        self.replies += [Reply() for _ in range(count)]
        return self.replies[first:]

    def pick(self, number: int) -> None:
        """Chooses a reply for good."""
        self.chosen = self.fallback = number
        self.first_compared = 0

    def fall_back_if_empty(self) -> None:
        """Goes back to the reply before the last retry if the chosen one came to nothing."""
        reply = self.reply
        if reply is not None and not reply.is_in_history and self.replies[self.fallback].is_in_history:
            self.chosen = self.fallback
        if self.first_compared and not any(reply.is_in_history for reply in self.replies[self.first_compared :]):
            self.first_compared = 0  # there is nothing to compare

    def messages(self) -> list[Message]:
        """What later turns show the model; nothing if there is no reply."""
        reply = self.reply
        if reply is None or not reply.is_in_history:
            return []
        answer = [_message("assistant", reply.text)] if reply.text or not reply.rounds else []
        return [_message("user", self.message), *round_messages(reply.rounds), *answer]

    def finished_copy(self) -> Turn:
        """A copy in which replies that still stream are stopped."""
        copy = Turn(self.text, [reply.finished_copy() for reply in self.replies], self.chosen, fallback=self.fallback)
        copy.attachments = list(self.attachments)
        copy.fall_back_if_empty()
        return copy


@dataclass(eq=False, slots=True, weakref_slot=True)
class Notice:
    """A line from the program, not from the conversation.

    is_passing: whether the next command or message takes it away, so that answers to commands do not pile up
    """

    text: str
    is_error: bool = False
    is_passing: bool = False


@dataclass(eq=False, slots=True, weakref_slot=True)
class Session:
    """One conversation with settings of its own.

    number:    unique in this process, from 1
    model:     hub id or folder of what replies, if it is not the chat's own
    params:    sampling parameters that differ from the model's defaults
    seed:      of this session's replies; None derives one from the chat's
    template_kwargs: variables for the chat template, beside those of the whole chat
    prelude:   messages before the first turn, if the conversation was opened from a file
    items:     turns and notices in the order in which they are shown
    dropped:   how many of the oldest turns the model is no longer shown; the prelude counts as one
    queue:     messages sent while a reply was still streaming, without replies
    draft:     what is typed and not yet sent
    attached:  files that go with the next message
    pastes:    long pastes that stand in the draft, or may come back into it
    attempts:  replies requested so far, which give each reply a seed of its own
    is_unread: whether something came while the user was in another session
    is_almost_full: whether its last reply left little room in the context
    """

    name: str
    number: int = 0
    system: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    prelude: list[Message] = field(default_factory=list)
    items: list[Turn | Notice] = field(default_factory=list)
    dropped: int = 0
    queue: list[Turn] = field(default_factory=list)
    draft: str = ""
    attached: list[Attachment] = field(default_factory=list)
    pastes: list[Attachment] = field(default_factory=list)
    attempts: int = 0
    is_unread: bool = False
    is_almost_full: bool = False
    model: str = ""

    @property
    def turns(self) -> list[Turn]:
        return [item for item in self.items if isinstance(item, Turn)]

    @property
    def last(self) -> Turn | None:
        return next((item for item in reversed(self.items) if isinstance(item, Turn)), None)

    @property
    def is_busy(self) -> bool:
        """Whether a reply is on its way."""
        last = self.last
        return last is not None and last.is_open

    @property
    def system_messages(self) -> list[Message]:
        """What the model is shown first; it is never dropped."""
        return [_message("system", self.system)] if self.system else []

    @property
    def num_droppable(self) -> int:
        """What `dropped` counts: the turns, and the prelude if there is one."""
        return bool(self.prelude) + len(self.turns)

    @property
    def title(self) -> str:
        """The beginning of the first message, in whole words; the name if there is none."""
        words = " ".join((self.turns[0].text if self.turns else "").split())
        if len(words) > TITLE_CHARACTERS:
            words = words[:TITLE_CHARACTERS].rpartition(" ")[0] or words[:TITLE_CHARACTERS]
            words = words.rstrip(" ,;:-") + "…"
        return words or self.name

    @property
    def is_unused(self) -> bool:
        """Whether there is nothing in it that anybody could miss."""
        return not (self.turns or self.queue or self.prelude or self.attached or self.draft.strip())

    def fold_paste(self, text: str) -> Attachment:
        """Keeps a long paste, under a name that no other one of this session has."""
        turns = [*self.turns, *self.queue]
        names = {one.name for one in [*self.pastes, *(one for turn in turns for one in turn.attachments)]}
        made = (new_paste(text, number) for number in count(1))
        paste = next(paste for paste in made if paste.name not in names)
        self.pastes.append(paste)
        return paste

    def attachments_of(self, text: str) -> list[Attachment]:
        """What goes with a message, if it is sent now."""
        return [*self.attached, *pastes_in(text, self.pastes)]

    @property
    def context_tokens(self) -> int:
        """Tokens of the conversation so far, as the last reply has counted them; 0 if there is none."""
        reply = next((turn.reply for turn in reversed(self.turns) if turn.reply and turn.reply.prompt_tokens), None)
        return reply.prompt_tokens + reply.num_tokens if reply is not None else 0

    def add_notice(self, text: str, *, is_error: bool = False, is_passing: bool = False) -> None:
        self.items.append(Notice(text, is_error, is_passing))

    def clear_passing_notices(self) -> None:
        self.items[:] = [item for item in self.items if isinstance(item, Turn) or not item.is_passing]

    def message_groups(self, turn: Turn) -> list[list[Message]]:
        """What the model is shown up to the message of a turn: the prelude, each earlier turn, and the message."""
        turns = self.turns
        groups = [earlier.messages() for earlier in turns[: turns.index(turn)]]
        history = ([self.prelude] if self.prelude else []) + groups
        return [*history[self.dropped :], [_message("user", turn.message)]]

    def messages(self, turn: Turn) -> list[Message]:
        """The conversation up to and with the message of a turn."""
        return [*self.system_messages, *chain.from_iterable(self.message_groups(turn))]

    def drop(self, count: int) -> int:
        """Drops oldest turns until `count` are dropped, but never the last turn. Returns how many were added."""
        before = self.dropped
        self.dropped = max(before, min(count, self.num_droppable - 1))
        return self.dropped - before

    def remove(self, turn: Turn) -> None:
        self.items.remove(turn)
        self.dropped = min(self.dropped, self.num_droppable)

    def copy(self, name: str) -> Session:
        """An independent session at the same point; it gets what has come so far of an open reply."""
        copy = Session(name, 0, self.system, dict(self.params), self.seed, dict(self.template_kwargs))
        copy.pastes = list(self.pastes)
        copy.prelude, copy.model = list(self.prelude), self.model
        copy.dropped, copy.attempts = self.dropped, self.attempts
        kept = (item for item in self.items if isinstance(item, Turn) or not item.is_passing)
        copy.items = [item.finished_copy() if isinstance(item, Turn) else item for item in kept]
        return copy

    def move_queue_to_turns(self) -> None:
        """Turns queued messages into turns without a reply, so that they are not lost when the session ends."""
        self.items += [unanswered(turn) for turn in self.queue]
        self.queue.clear()

    def load_messages(self, messages: list[Message]) -> None:
        """Fills an empty session. Messages that do not alternate between user and assistant become the prelude."""
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
                    self.prelude.append(_message("user", last.message))
                self.prelude.append(message)
                self.items.clear()


def unanswered(turn: Turn) -> Turn:
    """A message that the model was never asked to reply to, from one that was queued."""
    return Turn(turn.text, [Reply(state="stopped", remark=UNANSWERED_REMARK)], attachments=turn.attachments)


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}
