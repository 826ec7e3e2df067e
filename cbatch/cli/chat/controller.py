"""The open sessions and their replies. Everything here happens on the front end's thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from cbatch.cli.chat.engine_client import EncodedPrompt, EngineClient, ReplyRequest
from cbatch.cli.chat.session.reply import CONTEXT_FULL, Reply
from cbatch.cli.chat.session.session import Notice, Session, Turn
from cbatch.cli.chat.session.session_list import SessionList
from cbatch.cli.chat.session.store import SessionStore
from cbatch.cli.common.exits import UserError
from cbatch.engine import derive_seed

if TYPE_CHECKING:
    from cbatch.engine import StreamEvent

RETRY_TEMPERATURE = 0.7
"""Used for a retry in a greedy session, which would give the same reply again."""


class ChatController(SessionList):
    """Opens and closes sessions, requests replies to their messages, and saves them.

    Methods raise UserError if something cannot be done.
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        system: str | None = None,
        params: dict[str, Any] | None = None,
        seed: int = 0,
        auto_trim: bool = False,
        store: SessionStore | None = None,
    ) -> None:
        """Starts with one empty session.

        system, params: defaults of new sessions
        auto_trim:      whether the oldest turns are dropped when the context is full
        store:          where sessions are saved; None saves nothing
        """
        super().__init__()
        self.client = client
        self.store = store
        self._system, self._params, self._seed, self._auto_trim = system, params or {}, seed, auto_trim
        self.on_token: Callable[[Session, Reply, str], None] = lambda session, reply, text: None
        """Called for every token, after it became part of its reply, with the new visible text."""
        self._requests: dict[Reply, ReplyRequest] = {}
        self.new_session("main")

    def new_session(self, name: str | None = None) -> Session:
        """Opens an empty session and makes it the current one."""
        return self.add(Session(self.new_name(name), system=self._system, params=dict(self._params)))

    def fork(self, session: Session, name: str | None = None) -> Session:
        """Opens a copy of a session and makes it the current one."""
        copy = self.add(session.copy(self.new_name(name)))
        self.save(copy)
        return copy

    def rename(self, session: Session, name: str) -> None:
        session.name = self.new_name(name)
        self.save(session)

    def close(self, session: Session) -> None:
        """Ends a session and removes it from the list. After the last one a new session opens."""
        self.end(session)
        index = self.sessions.index(session)
        self.sessions.remove(session)
        if not self.sessions:
            self.new_session()
        elif session is self.current:
            self.switch(self.sessions[min(index, len(self.sessions) - 1)])

    def send(self, session: Session, text: str) -> None:
        """Sends a message, after the texts attached to it; it is queued while a reply is on its way."""
        if session.attached:
            text = "\n\n".join([*(part.rstrip("\n") for part in session.attached), text])
            session.attached.clear()
        self._send(session, text)

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
        session.move_queue_to_turns()
        self.save(session)

    def end_all(self) -> None:
        for session in self.sessions:
            self.end(session)

    def retry(self, session: Session, count: int) -> int:
        """Requests `count` more replies to the last message. Returns the number of the first of them."""
        if self.client.engine is None:
            raise UserError("The model is still loading.")
        turn = self._require_last_turn(session)
        self._stop_replies(session)
        turn.first_compared = 0
        turn.fall_back_if_empty()
        params = session.params
        if self.is_greedy(session):
            params = {**params, "temperature": RETRY_TEMPERATURE}
        for reply in turn.add_replies(count):
            self._request_reply(session, turn, reply, params)
        return turn.chosen

    def is_greedy(self, session: Session) -> bool:
        """Whether it would give the same reply again."""
        return self.client.params(session.params).greedy

    def pick(self, session: Session, number: int) -> None:
        """Keeps one of several replies, counted from 0."""
        turn = self._require_last_turn(session)
        if not 0 <= number < len(turn.replies):
            last = len(turn.replies) - 1
            raise UserError(f"Pick one of the replies 0 to {last}." if last else "There is only one reply.")
        self._stop_replies(session)
        turn.pick(number)
        self.save(session)

    def continue_reply(self, session: Session, *, may_trim: bool = False) -> None:
        """Resumes a reply that was cut off."""
        turn = self._require_last_turn(session)
        reply = turn.reply
        if turn.is_open:
            raise UserError("A reply is still coming; /stop ends it.")
        if reply is None or not reply.can_continue:
            raise UserError("The last reply is complete; there is nothing to continue.")
        params = reply.params if reply.generated else session.params
        self._request_reply(session, turn, reply, params, may_trim=may_trim)

    def undo(self, session: Session) -> str:
        """Takes back the last message, with its replies unless it was still queued. Returns its text."""
        if session.queue:
            text = session.queue.pop()
            self.save(session)
            return text
        turn = self._require_last_turn(session)
        self._stop_replies(session)
        session.remove(turn)
        self.save(session)
        return turn.text

    def replace(self, session: Session, turn: Turn, text: str) -> None:
        """Sends another message in place of a turn, which must still be the last one."""
        if session.last is not turn or session.queue:
            raise UserError("The conversation has moved on; nothing was changed.")
        self._stop_replies(session)
        session.remove(turn)
        self._send(session, text)

    def trim(self, session: Session, count: int | None) -> int:
        """Drops the `count` oldest turns; None drops as many as the last reply needs, and requests it again.

        Returns how many turns were dropped at once.
        """
        if count is not None:
            num_dropped = session.drop(session.dropped + count)
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
        if self.store is not None and (session.turns or self.store.saved_path(session) is not None):
            self.store.save_later(session)

    def save_open_replies(self) -> None:
        """Saves what has come so far of open replies; call it now and then."""
        for session in self.sessions:
            if session.is_busy:
                self.save(session)

    def _send(self, session: Session, text: str) -> None:
        if session.is_busy:
            session.queue.append(text)
            self.save(session)
            return
        last = session.last
        if last is not None:
            last.first_compared = 0
            last.fall_back_if_empty()
        turn = Turn(text)
        (reply,) = turn.add_replies(1)
        session.items.append(turn)
        self._request_reply(session, turn, reply, session.params)
        self.save(session)

    def _stop_replies(self, session: Session) -> bool:
        last = session.last
        if last is None or not last.is_open:
            return False
        for reply in last.replies:
            if reply.is_open:
                self.client.cancel(self._requests.pop(reply))
                reply.stop()
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
        self, session: Session, turn: Turn, reply: Reply, params: dict[str, Any], *, may_trim: bool = False
    ) -> None:
        if not reply.generated:
            session.attempts += 1
            name = f"{session.number}/{session.attempts}"
            reply.seed, reply.params = derive_seed(self._seed, "turn", name), dict(params)
        reply.begin(time.monotonic())
        request = ReplyRequest(
            system_messages=session.system_messages,
            message_groups=session.message_groups(turn),
            params=reply.params,
            seed=reply.seed,
            reply_prefix=reply.generated,
            may_trim=may_trim or self._auto_trim,
            on_start=partial(self._on_start, session, turn, reply, session.dropped),
            on_event=partial(self._on_event, session, reply),
        )
        self._requests[reply] = request
        self.client.submit(request)

    def _on_start(self, session: Session, turn: Turn, reply: Reply, dropped_before: int, prompt: EncodedPrompt) -> None:
        reply.prompt_tokens = len(prompt.token_ids)
        if count := session.drop(dropped_before + prompt.num_dropped):
            turns = "the oldest turn" if count == 1 else f"the {count} oldest turns"
            text = f"The context is full: from here on the model no longer sees {turns}."
            session.items.insert(session.items.index(turn), Notice(text))

    def _on_event(self, session: Session, reply: Reply, event: StreamEvent, when: float) -> None:
        reply.append(event)
        if event.token_id is not None:
            reply.count_token(when)
            self.on_token(session, reply, event.text)
        if event.finish_reason is not None:
            del self._requests[reply]
            limit, has_failed = self.client.params(reply.params).max_tokens, self.client.failure is not None
            if event.completion is not None:
                reply.cached_tokens = event.completion.usage.cached_tokens
            state = "stop" if event.finish_reason == "tool_calls" else event.finish_reason
            reply.finish(state, event.error, limit, has_failed=has_failed)
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
        self.save(session)
        if session.queue and self.client.failure is None:
            self._send(session, session.queue.pop(0))
