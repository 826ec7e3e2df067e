"""A conversation: its turns, their replies, and what of them the model is shown. No engine, no terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cbatch.base.errors import invalid_row
from cbatch.base.params import LOOP
from cbatch.base.units import format_count
from cbatch.media.pictures import NO_IMAGES

if TYPE_CHECKING:
    from cbatch.base.errors import RequestError
    from cbatch.requests.output_processor import StreamEvent

Message = dict[str, Any]

PASTE_LINES, PASTE_CHARACTERS = 12, 1500
"""A paste of at least so many lines or characters is folded into an attachment."""

TITLE_CHARACTERS = 48

_FENCE = re.compile(r"^ {0,3}(`{3,})", re.MULTILINE)


@dataclass(eq=False, slots=True)
class Attachment:
    """A file before a message, or a paste, whose name stands for it in the message: `[pasted 1: 40 lines]`.

    text:       that of the file; of a picture, its size in words
    digest:     of the bytes of a picture or video, whose name is an absolute path; else empty
    kind:       `image` or `video`, if it has a digest
    num_tokens: None until the model's tokenizer is there
    """

    name: str
    text: str
    is_paste: bool = False
    digest: str = ""
    kind: str = "image"
    num_tokens: int | None = None

    @property
    def label(self) -> str:
        """Its name and size, as the screen shows it."""
        size = self.text if self.digest else f"{len(self.text):,} characters"
        if self.num_tokens is not None:
            size = f"{size}, {self.num_tokens:,} tokens" if self.digest else f"{self.num_tokens:,} tokens"
        return f"{self.name if self.is_output else self.name.rpartition('/')[2]}, {size}"

    @property
    def is_output(self) -> bool:
        """Whether it is what a command has written; its name is that line after a dollar sign."""
        return self.name.startswith("$ ")


def is_long_paste(text: str) -> bool:
    return text.count("\n") >= PASTE_LINES or len(text) >= PASTE_CHARACTERS


def compose(text: str, attachments: Sequence[Attachment]) -> str:
    """The message that the model sees: files first, then what was typed, with each paste in its place."""
    blocks = []
    for one in attachments:
        if one.is_paste:
            text = text.replace(one.name, one.text)
            continue
        longest = max((len(fence) for fence in _FENCE.findall(one.text)), default=2)
        fence = "`" * max(longest + 1, 3)  # which the text does not contain
        language = one.name.rpartition(".")[2] if "." in one.name and not one.is_output else ""
        end = "" if one.text.endswith("\n") or not one.text else "\n"
        opening = fence + (language if language.isalnum() else "")
        head = f"Output of {one.name[2:]}" if one.is_output else f"File {one.name}"
        blocks.append(f"{head}:\n{opening}\n{one.text}{end}{fence}")
    return "\n\n".join([*blocks, text] if text else blocks)


def pastes_in(text: str, pastes: Iterable[Attachment]) -> list[Attachment]:
    """Those whose place is in a text."""
    return [paste for paste in pastes if paste.name in text]


REFUSED = "The user does not allow this call."
CANCELLED = "The user stopped this call."


@dataclass(eq=False, slots=True)
class ToolUse:
    """One call of a tool: the JSON that the model wrote, and what it is told once the call is `done`."""

    name: str
    arguments: str
    state: Literal["asking", "running", "done"] = "asking"
    result: str = ""

    def finish(self, result: str) -> None:
        self.state, self.result = "done", result

    def __str__(self) -> str:
        return f"{self.name}({self.arguments})"


@dataclass(eq=False, slots=True)
class ToolRound:
    """A reply that called tools: its text, and the calls; the model replies again after their results."""

    text: str
    uses: list[ToolUse] = field(default_factory=list)


def round_messages(rounds: Sequence[ToolRound]) -> list[Message]:
    """The model's calls and their results, as it is shown them."""
    messages: list[Message] = []
    names = map("{:09}".format, count(1))  # nine letters or digits, which some templates insist on
    for each in rounds:
        calls, results = [], []
        for use, name in zip(each.uses, names, strict=False):
            function = {"name": use.name, "arguments": use.arguments}
            calls.append({"id": name, "type": "function", "function": function})
            results.append({"role": "tool", "tool_call_id": name, "name": use.name, "content": use.result})
        messages += [{"role": "assistant", "content": each.text, "tool_calls": calls}, *results]
    return messages


ReplyState = Literal["waiting", "streaming", "calling", "stop", "length", "stopped", "error"]
"""Waiting for its first token, streaming, waiting for tools, or how it ended; `stopped` means by the user."""

FINAL_STATES: tuple[ReplyState, ...] = ("stop", "length", "stopped", "error")
STOPPED_REMARK = "stopped; /continue resumes it"
UNANSWERED_REMARK = "no reply; /retry asks for one"
LOOP_REMARK = "stopped because it repeats itself; /continue goes on, /set loop_guard false lets replies do so"
CONTEXT_FULL = "context_full"
"""The code of a reply that reached the end of the context."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Reply:
    """One reply, while it streams and after.

    text:         the visible part, which the model is shown in later turns
    raw:          text and reasoning as the model wrote them, if it uses think tags
    params:       sampling parameters that differ from the model's defaults
    remark:       why it ended early, and what the user can do about it
    rounds:       what the model called before this text
    label:        what is special about it among those it stands beside, such as `temperature=0.7`
    model:        hub id or folder of what wrote it, if it is not the chat's own
    num_requests: how often it was asked for or continued; only then its text may become shorter
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
        return [use for each in self.rounds for use in each.uses]

    @property
    def is_open(self) -> bool:
        """Whether more of it may come."""
        return self.state not in FINAL_STATES

    @property
    def is_in_history(self) -> bool:
        """Whether later turns show it to the model: it ended well, or it has some text."""
        return self.state == "stop" or bool(self.text or self.rounds)

    @property
    def can_continue(self) -> bool:
        is_cut = self.state in ("stopped", "length") or self.code == LOOP
        return is_cut or (self.state == "error" and bool(self.generated))

    def begin(self, now: float) -> None:
        """Prepares it for a request; text that is there already will be continued."""
        self.text = self.text.rstrip("\ufffd")  # a character that was cut in the middle
        self.raw = self.raw.rstrip("\ufffd")
        self.state, self.error, self.code, self.remark = "waiting", "", "", ""
        self.requested_at, self.first_token_at, self.num_tokens = now, None, 0
        self.num_requests += 1

    def append(self, event: StreamEvent, when: float) -> None:
        """Adds what an event brings. `when`: its token came"""
        if event.reasoning or event.raw != event.text or self.raw:  # from here on the text alone does not tell
            self.raw = self.generated + event.raw
        self.text += event.text
        self.reasoning += event.reasoning
        done = event.completion
        if done is not None and done.note:
            self.remark = done.note
            if done.text:  # what came as reasoning was the answer
                self.text, self.reasoning = self.reasoning, ""
        if done is not None and done.stop_reason == LOOP and LOOP not in self.params.get("stop", ()):
            self.code, self.remark = LOOP, LOOP_REMARK
        if event.token_id is not None:
            self.state = "streaming"
            self.num_tokens += 1
            self.first_token_at = when if self.first_token_at is None else self.first_token_at
            self.last_token_at = when

    def finish(
        self, state: ReplyState, error: RequestError | None, limit: int | None, *, has_failed: bool, can_trim: bool
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
            self.remark = "this message alone is too long; /undo takes it back, and /fit cuts its files"
        elif self.code == "prompt_too_long":
            self.remark = "/trim drops the oldest turns and asks again; /undo takes the message back"
        elif state == "length" and limit is not None and self.num_tokens >= limit:
            self.remark = f"cut off after max_tokens = {limit:,}; /continue resumes it"
        elif state == "length":
            self.code = CONTEXT_FULL
            self.remark = "cut off because the context is full; /trim drops the oldest turns and resumes it"

    def stop(self) -> None:
        """Ends it where it is."""
        self.state = "stopped"
        for use in self.uses:
            if use.state != "done":
                use.finish(CANCELLED)
        self.remark = STOPPED_REMARK if self.generated else UNANSWERED_REMARK


@dataclass(eq=False, slots=True, weakref_slot=True)
class Turn:
    """A message of the user and the replies to it: several after a retry, one of which is chosen.

    chosen:         index of the reply that counts
    first_compared: index of the first reply shown side by side until one is picked; 0 shows only the chosen one
    fallback:       index of the reply that was chosen before the last retry
    """

    text: str
    replies: list[Reply] = field(default_factory=list)
    chosen: int = 0
    first_compared: int = 0
    fallback: int = 0
    attachments: list[Attachment] = field(default_factory=list)

    @property
    def message(self) -> str:
        """The text of the message that the model is shown."""
        return compose(self.text, [one for one in self.attachments if not one.digest])

    def user_message(self) -> Message:
        """The message that the model is shown: if there are pictures, its parts as a row has them, these first."""
        parts = [{"type": one.kind, "path": one.name, "digest": one.digest} for one in self.attachments if one.digest]
        text = [{"type": "text", "text": self.message}] if self.message else []
        return {"role": "user", "content": [*parts, *text] if parts else self.message}

    @property
    def is_undecided(self) -> bool:
        """Whether several replies stand side by side and none has been picked."""
        return bool(self.first_compared)

    @property
    def pick_hint(self) -> str:
        """The command that picks one of the replies that stand side by side."""
        return f"/pick {self.first_compared} to {len(self.replies) - 1}"

    @property
    def reply(self) -> Reply | None:
        return self.replies[self.chosen] if self.replies else None

    @property
    def is_open(self) -> bool:
        return any(reply.is_open for reply in self.replies)

    def with_text(self, text: str) -> Turn:
        """Another message with the files of this one, and those pastes that it still names."""
        kept = [one for one in self.attachments if not one.is_paste or one.name in text]
        return Turn(text, attachments=kept)

    def add_replies(self, count: int) -> list[Reply]:
        """Adds `count` replies and chooses the first; several are shown side by side."""
        first = len(self.replies)
        self.fallback, self.chosen, self.first_compared = self.chosen, first, first if count > 1 else 0
        self.replies += [Reply() for _ in range(count)]
        return self.replies[first:]

    def fall_back_if_empty(self) -> None:
        """Goes back to the reply before the last retry if the chosen one came to nothing."""
        reply = self.reply
        if reply is not None and not reply.is_in_history and self.replies[self.fallback].is_in_history:
            self.chosen = self.fallback
        if self.first_compared and not any(reply.is_in_history for reply in self.replies[self.first_compared :]):
            self.first_compared = 0  # there is nothing to compare

    def messages(self) -> list[Message]:
        """The messages that later turns show the model; none if there is no reply."""
        reply = self.reply
        if reply is None or not reply.is_in_history:
            return []
        answer = [_message("assistant", reply.text)] if reply.text or not reply.rounds else []
        return [self.user_message(), *round_messages(reply.rounds), *answer]


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
    items:     turns and notices in the order in which they are shown
    dropped:   how many of the oldest turns the model is no longer shown
    queue:     messages that wait until a reply is complete, or one of several is picked
    draft:     what is typed; `attached` files go with it, and `pastes` stand in it, or may come back into it
    attempts:  replies requested so far, which give each reply a seed of its own
    path:      the file that it is saved to, once it has one
    """

    name: str
    number: int = 0
    system: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
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
    path: Path | None = None

    @property
    def turns(self) -> list[Turn]:
        return [item for item in self.items if isinstance(item, Turn)]

    @property
    def last(self) -> Turn | None:
        return next((item for item in reversed(self.items) if isinstance(item, Turn)), None)

    @property
    def is_busy(self) -> bool:
        """Whether a reply is on its way."""
        return self.last is not None and self.last.is_open

    @property
    def must_wait(self) -> bool:
        """Whether a message has to wait: a reply is on its way, or one of several is to be picked."""
        return self.is_busy or (self.last is not None and self.last.is_undecided)

    @property
    def asking(self) -> ToolUse | None:
        """The call that the user has to allow or refuse next."""
        replies = self.last.replies if self.last is not None else []
        uses = (use for reply in replies if reply.is_open for use in reply.uses)
        return next((use for use in uses if use.state == "asking"), None)

    @property
    def system_messages(self) -> list[Message]:
        """The messages that the model is shown first; they are never dropped."""
        return [_message("system", self.system)] if self.system else []

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
        return not (self.turns or self.queue or self.attached or self.draft.strip())

    def fold_paste(self, text: str) -> Attachment:
        """Keeps a long paste, under a name that no other one of this session has."""
        attachments = chain(self.pastes, *(turn.attachments for turn in [*self.turns, *self.queue]))
        names = {one.name for one in attachments}
        size = format_count(text.count("\n") + (not text.endswith("\n")), "line")
        name = next(name for number in count(1) if (name := f"[pasted {number}: {size}]") not in names)
        self.pastes.append(Attachment(name, text, is_paste=True))
        return self.pastes[-1]

    def unfold(self, text: str) -> str:
        """A text with pastes in the places of what stands for them."""
        return compose(text, pastes_in(text, self.pastes))

    def add_notice(self, text: str, *, is_error: bool = False, is_passing: bool = False) -> None:
        self.items.append(Notice(text, is_error, is_passing))

    def clear_passing_notices(self) -> None:
        self.items[:] = [item for item in self.items if isinstance(item, Turn) or not item.is_passing]

    def message_groups(self, turn: Turn) -> list[list[Message]]:
        """The messages up to that of a turn: those of each earlier turn, and the message."""
        turns = self.turns
        groups = [earlier.messages() for earlier in turns[: turns.index(turn)]]
        return [*groups[self.dropped :], [turn.user_message()]]

    def messages(self, turn: Turn) -> list[Message]:
        """The conversation up to and with the message of a turn."""
        return [*self.system_messages, *chain.from_iterable(self.message_groups(turn))]

    def messages_with(self, text: str) -> list[Message]:
        """The conversation with a message that follows."""
        turn = Turn(text)
        return replace(self, items=[*self.items, turn]).messages(turn)

    def drop(self, count: int) -> int:
        """Drops oldest turns until `count` are dropped, but never the last turn. Returns how many were added."""
        before = self.dropped
        self.dropped = max(before, min(count, len(self.turns) - 1))
        return self.dropped - before

    def remove(self, turn: Turn) -> None:
        self.items.remove(turn)
        self.dropped = min(self.dropped, len(self.turns))

    def finish(self) -> None:
        """Stops replies that are still open; queued messages become turns without a reply."""
        for turn in self.turns:
            for reply in turn.replies:
                if reply.is_open:
                    reply.stop()
            turn.fall_back_if_empty()
        unanswered = Reply(state="stopped", remark=UNANSWERED_REMARK)
        self.items += [replace(turn, replies=[deepcopy(unanswered)]) for turn in self.queue]
        self.queue = []

    def copied(self, name: str) -> Session:
        """An independent session that ends with the last complete reply."""
        made = deepcopy(self)
        if (last := made.last) is not None and last.is_open:
            last.chosen = last.fallback  # the reply before a retry
            if last.replies[last.chosen].is_open:
                made.remove(last)
        made.name, made.number, made.path, made.draft = name, 0, None, ""
        made.queue, made.attached = [], []
        made.is_unread = made.is_almost_full = False
        made.clear_passing_notices()
        made.finish()
        for turn in made.turns:
            turn.first_compared = 0
        return made


def as_plain_text(messages: Sequence[Message]) -> str:
    """A conversation for a model without a chat template: each message on a new line, its reply directly after it."""
    if any(isinstance(message["content"], list) for message in messages):
        raise invalid_row(NO_IMAGES)
    parts = [("\n" if message["role"] == "user" else "") + message["content"] for message in messages]
    return "".join(parts).removeprefix("\n")


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}
