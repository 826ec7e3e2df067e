"""The open sessions and their replies. Everything here happens on the front end's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from cbatch.base.params import derive_seed
from cbatch.cli.chat.engine_client import EngineClient, ReplyRequest
from cbatch.cli.chat.session.session import CONTEXT_FULL, Notice, Reply, Session, Turn, pastes_in, round_messages
from cbatch.cli.chat.session.store import SessionStore
from cbatch.cli.chat.toolbox import ToolBox
from cbatch.cli.common.console import safe
from cbatch.cli.common.exits import UserError

if TYPE_CHECKING:
    from cbatch.api import Engine
    from cbatch.requests.output_processor import StreamEvent


RETRY_TEMPERATURE = 0.7
"""Used for a retry in a greedy session, which would give the same reply again."""

LIMITS = ("max_tokens", "min_tokens")
"""Parameters that a continued reply takes from its session as it is now; the others are those it began with."""

ALMOST_FULL = 0.85
"""Share of the context from which on the user is warned."""


class Variant(NamedTuple):
    """One of several replies to the same message: parameters and a model that differ from the session's."""

    params: Mapping[str, Any] = {}
    label: str = ""
    model: str | None = None


def oldest_turns(count: int) -> str:
    return "the oldest turn" if count == 1 else f"the {count} oldest turns"


def _is_name(text: str) -> bool:
    """Whether a session can have this name: one word, not a number, and nothing that steers a terminal."""
    return len(text.split()) == 1 and not text.isdecimal() and len(text) <= 60 and safe(text) == text


@dataclass(eq=False)
class ChatController:
    """Opens and closes sessions, requests replies to their messages, and saves them. Starts with one empty session.

    client:     of the model that the chat begins with
    model_name: its hub id or folder; empty for the bundled one
    open_model: loads others by hub id or folder, with the chat's other options; None allows none
    system, params, seed: defaults of new sessions; None derives the seed from `run_seed`
    auto_trim:  whether the oldest turns are dropped when the context is full
    store:      where sessions are saved; None saves nothing
    on_token:   called for every token, after it became part of its reply, with the new visible text
    on_switch:  called when another session has become the current one
    sessions:   those that are open, in order; `current` is the one on the screen
    closed:     those that were open in this chat
    clients:    of all models that are loaded or being loaded, by what `Session.model` calls them

    Methods raise UserError if something cannot be done.
    """

    client: EngineClient
    model_name: str = ""
    open_model: Callable[[str], Engine] | None = None
    tools: ToolBox = field(default_factory=ToolBox)
    system: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    run_seed: int = 0
    auto_trim: bool = False
    store: SessionStore | None = None
    on_token: Callable[[Session, Reply, str], None] = lambda session, reply, text: None
    on_switch: Callable[[], None] = lambda: None
    sessions: list[Session] = field(default_factory=list)
    closed: list[Session] = field(default_factory=list)
    _num_opened: int = 0
    _requests: dict[Reply, ReplyRequest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clients = {"": self.client}
        self.new_session("main")

    def new_session(self, name: str | None = None) -> Session:
        """Opens an empty session and makes it the current one."""
        made = Session(self._new_name(name), system=self.system, params=dict(self.params), seed=self.seed)
        return self._add(made)

    def open_saved(self, session: Session) -> None:
        """Adds a session from a file. It takes the place of the one that the chat began with, if nobody used that."""
        if not self.has_model(session.model):
            session.add_notice(f"Replies came from {session.model}; /model {session.model} loads it again.")
            session.model = ""
        replaced = next((each for each in self.sessions if each.number == 1 and each.is_unused), None)
        taken = {other.name for other in self.sessions if other is not replaced}
        own = session.name if _is_name(session.name) else "loaded"
        names = (own if n == 1 else f"{own}-{n}" for n in count(1))
        session.name = next(name for name in names if name not in taken)
        self._add(session)
        if replaced is not None:
            self.close(replaced)

    def fork(self, session: Session, name: str | None = None) -> Session:
        """Opens a copy of a session and makes it the current one."""
        copy = self._add(session.copied(self._new_name(name)))
        self.save(copy)
        return copy

    def rename(self, session: Session, name: str) -> None:
        session.name = self._new_name(name)
        self.save(session)

    def close(self, session: Session) -> None:
        """Ends a session and removes it from the list. After the last one a new session opens."""
        self.end(session)
        self.closed.append(session)
        index = self.sessions.index(session)
        self.sessions.remove(session)
        if not self.sessions:
            self.new_session()
        elif session is self.current:
            self.switch(self.sessions[min(index, len(self.sessions) - 1)])

    def _add(self, session: Session) -> Session:
        self._num_opened += 1
        session.number = self._num_opened
        self.sessions.append(session)
        self.switch(session)
        return session

    def switch(self, session: Session) -> None:
        """Puts a session on the screen."""
        self.current = session
        session.is_unread = False
        self.on_switch()

    def switch_to(self, index: int) -> None:
        """Switches to the session with this index in the list, if there is one."""
        if index < len(self.sessions):
            self.switch(self.sessions[index])

    def switch_by(self, offset: int) -> None:
        """Switches to a session after or before the current one; the list wraps around."""
        self.switch_to((self.sessions.index(self.current) + offset) % len(self.sessions))

    def find(self, which: str) -> Session:
        """The session of this name, or with this number in the list, from 1. Raises UserError if there is none."""
        numbered = {str(number): session for number, session in enumerate(self.sessions, start=1)}
        found = {**numbered, **{session.name: session for session in self.sessions}}.get(which)
        if found is None:
            raise UserError(f"There is no session {which}; /list shows all sessions.")
        return found

    def _new_name(self, name: str | None) -> str:
        """Checks a name for a session, or makes one up for None. Raises UserError if it is taken or cannot be one."""
        taken = {session.name for session in self.sessions}
        if name is None:
            return next(name for n in count(self._num_opened + 1) if (name := f"s{n}") not in taken)
        if name in taken:
            raise UserError(f"There is a session {name} already.")
        if not _is_name(name):
            raise UserError("A name is one word of at most 60 characters, and not a number.")
        return name

    def send(self, session: Session, text: str) -> None:
        """Sends a message, with what is attached to it; it waits while a reply is on its way, or is to be picked."""
        turn = Turn(text, attachments=[*session.attached, *pastes_in(text, session.pastes)])
        session.attached = []
        self._send(session, turn)

    def stop(self, session: Session) -> bool:
        """Stops the open replies, then sends what is queued. Returns whether a reply was open."""
        if not self._stop_replies(session):
            return False
        self._after_replies(session)
        session.is_unread = False
        return True

    def end(self, session: Session) -> None:
        """Stops the open replies, sends nothing more, and saves."""
        self._stop_replies(session)
        session.finish()
        self.save(session)

    def end_all(self) -> None:
        for session in sorted(self.sessions, key=lambda each: each is self.current):  # the newest file is the last
            self.end(session)

    def retry(self, session: Session, variants: Sequence[Variant]) -> int:
        """Requests one more reply to the last message for each variant. Returns the number of the first of them."""
        self.client_of(session).require_engine()
        turn = self._require_last_turn(session)
        for variant in variants:
            if variant.model is not None:
                self.load_model(variant.model, session)
        self._stop_replies(session)
        turn.first_compared = 0
        turn.fall_back_if_empty()
        for variant, reply in zip(variants, turn.add_replies(len(variants)), strict=True):
            reply.label = variant.label
            client = self.client_for(session.model if variant.model is None else variant.model)
            is_greedy = client.params(session.params).greedy
            params = {**session.params, **({"temperature": RETRY_TEMPERATURE} if is_greedy else {}), **variant.params}
            self._request_reply(session, turn, reply, params, model=variant.model)
        return turn.chosen

    @property
    def model_names(self) -> list[str]:
        """All models that are loaded or being loaded; the first is the chat's own."""
        return [self.model_name, *list(self.clients)[1:]]

    def has_model(self, name: str) -> bool:
        return name in self.clients or name == self.model_name

    def client_for(self, name: str) -> EngineClient:
        """The client of a model. An empty name, or that of a model that is gone, stands for the chat's own."""
        return self.clients.get(name, self.client)

    def client_of(self, session: Session) -> EngineClient:
        """The client that replies in a session."""
        return self.client_for(session.model)

    def use_model(self, session: Session, name: str) -> None:
        """Has another model reply in a session from now on; it is loaded first if it is not there yet."""
        self.load_model(name, session)
        session.model = name
        self.save(session)

    def load_model(self, name: str, session: Session) -> None:
        """Begins to load a model unless it is there; what is asked of it meanwhile waits. A session is told the end."""
        if self.has_model(name):
            return
        if self.open_model is None:
            raise UserError("Another model can be loaded in a terminal only.")

        def on_open(error: BaseException | None) -> None:
            if name not in self.clients:  # it was closed meanwhile
                return
            told = session if session in self.sessions else self.current
            if error is None:
                told.add_notice(f"{name} is loaded", is_passing=True)
            else:
                del self.clients[name]
                self._leave_model(name, str(error) or repr(error), told)
            told.is_unread = told is not self.current

        self.clients[name] = self.client.beside(partial(self.open_model, name), on_open)

    def unload_model(self, name: str) -> None:
        """Closes a model; its sessions go back to the chat's own."""
        client = self.clients.get(name)
        if client is None or client is self.client:
            what = "is the chat's own model" if self.has_model(name) else "is not loaded"
            raise UserError(f"{name or 'This'} {what}.")
        writing = {reply for reply, request in self._requests.items() if request.client is client}
        stopped = [each for each in self.sessions if each.last is not None and writing & {*each.last.replies}]
        for session in stopped:
            self._stop_replies(session)
        del self.clients[name]
        client.unload()
        self._leave_model(name, f"{name} is closed.")
        for session in stopped:
            self._after_replies(session)

    def _leave_model(self, name: str, why: str, *others: Session) -> None:
        """Has the sessions of a model that is gone go back to the chat's own, and tells them and others why."""
        users = [session for session in self.sessions if session.model == name]
        for session in users:
            session.model = ""
        for session in dict.fromkeys([*users, *others]):
            text = f"{why} Replies of this session come from the chat's first model." if session in users else why
            session.add_notice(text, is_error=True)

    def context_share(self, session: Session) -> float:
        """How full the context of a session is, from 0 to 1, as its last reply has counted it."""
        engine = self.client_of(session).engine
        reply = next((turn.reply for turn in reversed(session.turns) if turn.reply and turn.reply.prompt_tokens), None)
        if engine is None or reply is None:
            return 0.0
        return min((reply.prompt_tokens + reply.num_tokens) / engine.limits.max_model_len, 1.0)

    def share_read(self, session: Session) -> float | None:
        """How much of the prompt has been read for the reply that is to come; None if it has begun, or none is."""
        reply = session.last.reply if session.last is not None else None
        request = self._requests.get(reply) if reply is not None and reply.state == "waiting" else None
        engine, encoded = (request.client.engine, request.encoded) if request is not None else (None, None)
        if engine is None or encoded is None:
            return None
        return min(engine.core.num_computed(encoded) / len(encoded.prompt_ids), 1.0)

    def pick(self, session: Session, number: int) -> None:
        """Keeps one of several replies, counted from 0."""
        turn = session.last
        if turn is None:
            raise UserError("There is no message yet.")
        if not 0 <= number < len(turn.replies):
            last = len(turn.replies) - 1
            raise UserError(f"Pick one of the replies 0 to {last}." if last else "There is only one reply.")
        self._stop_replies(session, but=turn.replies[number])
        turn.chosen, turn.fallback, turn.first_compared = number, number, 0
        self._send_next(session)
        self.save(session)

    def continue_reply(self, session: Session, *, may_trim: bool = False) -> None:
        """Resumes a reply that was cut off."""
        turn = self._require_last_turn(session)
        reply = turn.reply
        if turn.is_open:
            raise UserError("A reply is still coming; /stop ends it.")
        if reply is None or not reply.can_continue:
            raise UserError("The last reply is complete; there is nothing to continue.")
        if not self.has_model(reply.model):
            raise UserError(f"This reply came from {reply.model}; /model {reply.model} loads it, /retry asks anew.")
        params = session.params
        if reply.generated:
            limits = {name: session.params[name] for name in LIMITS if name in session.params}
            params = {**{name: value for name, value in reply.params.items() if name not in LIMITS}, **limits}
        self._request_reply(session, turn, reply, params, may_trim=may_trim)

    def undo(self, session: Session) -> str:
        """Takes back the last message, with its replies unless it was still queued. Returns its text.

        What was attached to it is attached to the next message.
        """
        if session.queue:
            turn = session.queue.pop()
        else:
            turn = self._require_last_turn(session)
            self._stop_replies(session)
            session.remove(turn)
        session.attached = [*(file for file in turn.attachments if not file.is_paste), *session.attached]
        session.pastes += [paste for paste in turn.attachments if paste.is_paste and paste not in session.pastes]
        self.save(session)
        return turn.text

    def replace(self, session: Session, turn: Turn, text: str) -> None:
        """Sends another message in place of a turn, which must still be the last one."""
        if session.last is not turn or session.queue:
            raise UserError("The conversation has moved on; nothing was changed.")
        self._stop_replies(session)
        session.remove(turn)
        self._send(session, turn.with_text(text))

    def branch(self, session: Session, turn: Turn, text: str) -> None:
        """Opens a copy of a session that ends before a turn, and sends another message in place of that."""
        number = session.turns.index(turn)
        copy = session.copied(self._new_name(None))
        del copy.items[copy.items.index(copy.turns[number]) :]
        copy.dropped = min(copy.dropped, len(copy.turns))
        self._send(self._add(copy), turn.with_text(text))

    def trim(self, session: Session, num_turns: int | None) -> int:
        """Drops the `num_turns` oldest turns; None drops as many as the last reply needs, and requests it again.

        Returns how many turns were dropped at once.
        """
        if num_turns is not None:
            num_dropped = session.drop(session.dropped + num_turns)
            self.save(session)
            return num_dropped
        turn = self._require_last_turn(session)
        reply = turn.reply
        if reply is not None and reply.code == "prompt_too_long" and not reply.generated:
            (again,) = turn.add_replies(1)
            self._request_reply(session, turn, again, session.params, may_trim=True)
        elif reply is not None and reply.code in ("prompt_too_long", CONTEXT_FULL):
            self.continue_reply(session, may_trim=True)
        else:
            raise UserError("The context is not full; /trim N drops the N oldest turns anyway.")
        return 0

    def save(self, session: Session) -> None:
        """Has a session written to disk soon, if sessions are saved and there is something in it."""
        if self.store is not None and (session.turns or session.path is not None):
            self.store.save_later(session)

    def _send(self, session: Session, turn: Turn) -> None:
        if session.must_wait:
            session.queue.append(turn)
            self.save(session)
            return
        if (last := session.last) is not None:
            last.fall_back_if_empty()
        (reply,) = turn.add_replies(1)
        session.items.append(turn)
        self._request_reply(session, turn, reply, session.params)
        self.save(session)

    def _stop_replies(self, session: Session, but: Reply | None = None) -> bool:
        """Stops the open replies to the last message, but one. Returns whether any was open."""
        last = session.last
        if last is None or not last.is_open:
            return False
        for reply in last.replies:
            if reply.is_open and reply is not but:
                if (request := self._requests.pop(reply, None)) is not None:
                    request.client.cancel(request)
                self.tools.stop(reply)
                reply.stop()
        if but is None:
            last.fall_back_if_empty()
        return True

    def _require_last_turn(self, session: Session) -> Turn:
        """The turn that commands act on. Raises UserError if there is none, or a message is queued behind it."""
        if session.queue:
            raise UserError("A message is still queued; /undo takes it back.")
        turn = session.last
        if turn is None:
            raise UserError("There is no message yet.")
        return turn

    def _request_reply(
        self,
        session: Session,
        turn: Turn,
        reply: Reply,
        params: dict[str, Any],
        *,
        may_trim: bool = False,
        model: str | None = None,
    ) -> None:
        if not reply.generated:
            reply.model = session.model if model is None else model
            session.attempts += 1
            own = session.seed is not None  # the same replies whatever the session's number
            name = str(session.attempts) if own else f"{session.number}/{session.attempts}"
            reply.seed = derive_seed(self.run_seed if session.seed is None else session.seed, "turn", name)
        client = self.client_for(reply.model)
        reply.params = dict(params)
        reply.begin(time.monotonic())
        *earlier, last = session.message_groups(turn)
        dropped_before = session.dropped

        def on_start(prompt_tokens: int, num_dropped: int) -> None:
            reply.prompt_tokens = prompt_tokens
            if count := session.drop(dropped_before + num_dropped):
                text = f"The context is full: from here on the model no longer sees {oldest_turns(count)}."
                session.items.insert(session.items.index(turn), Notice(text))

        request = self._requests[reply] = ReplyRequest(
            client=client,
            system_messages=session.system_messages,
            message_groups=[*earlier, [*last, *round_messages(reply.rounds)]],
            params=reply.params,
            seed=reply.seed,
            template_kwargs=session.template_kwargs,
            tools=self.tools.offered_to(reply),
            reply_prefix=reply.generated,
            may_trim=may_trim or self.auto_trim,
            on_start=on_start,
            on_event=partial(self._on_event, session, turn, reply),
        )
        client.submit(request)

    def answer_call(self, session: Session, *, is_allowed: bool, always: bool = False) -> None:
        """Allows or refuses the call that was asked about; `always` also allows all others of that tool."""
        if session.asking is None:
            raise UserError("No call waits for an answer.")
        self.tools.answer(session.asking, is_allowed=is_allowed, always=always)

    def _on_event(self, session: Session, turn: Turn, reply: Reply, event: StreamEvent, when: float) -> None:
        reply.append(event, when)
        if event.token_id is not None:
            self.on_token(session, reply, event.text)
        if event.finish_reason is not None:
            client = self._requests.pop(reply).client
            limit, has_failed = client.params(reply.params).max_tokens, client.failure is not None
            if event.completion is not None:
                reply.cached_tokens = event.completion.usage.cached_tokens
            if event.finish_reason == "tool_calls" and event.completion is not None and self.tools.tools:
                go_on = partial(self._request_reply, session, turn, reply, reply.params, model=reply.model)
                self.tools.begin_round(reply, event.completion.tool_calls, self.client.post, go_on)
                self.save(session)
                session.is_unread = session is not self.current
                return
            state = "stop" if event.finish_reason == "tool_calls" else event.finish_reason
            engine, size = self.client_of(session).engine, sum(one.num_tokens or 0 for one in turn.attachments)
            is_alone = engine is not None and size >= engine.limits.sequence.longest
            can_trim = len(session.turns) - session.dropped > 1 and not is_alone
            reply.finish(state, event.error, limit, has_failed=has_failed, can_trim=can_trim)
            self._after_replies(session)

    def _after_replies(self, session: Session) -> None:
        """Saves and sends the next queued message, once all replies to the last one have ended."""
        if session.is_busy:
            return
        turn = session.last
        if turn is not None and (reply := turn.reply) is not None:
            turn.fall_back_if_empty()
            if turn.reply is not reply and reply.error:  # the reply is hidden now, and its error with it
                session.add_notice(reply.error, is_error=True)
        session.is_unread = session is not self.current
        share, before = self.context_share(session), session.is_almost_full
        session.is_almost_full = share >= ALMOST_FULL
        if session.is_almost_full and not before and not self.auto_trim:
            text = f"The context is {share:.0%} full. /trim N drops the N oldest turns; --auto-trim does it by itself."
            session.add_notice(text, is_passing=True)
        self.save(session)
        self._send_next(session)

    def _send_next(self, session: Session) -> None:
        """Sends the next message that waits, if it no longer has to."""
        if session.queue and not session.must_wait and self.client_of(session).failure is None:
            self._send(session, session.queue.pop(0))
