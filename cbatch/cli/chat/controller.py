"""The open sessions and their answers. Everything here happens on the front end's thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from cbatch.cli.chat.engine_client import EngineClient, ReplyRequest
from cbatch.cli.chat.session.session import CONTEXT_FULL, Notice, Reply, Session, Turn
from cbatch.cli.chat.session.session_list import SessionList
from cbatch.cli.chat.session.store import SessionStore
from cbatch.cli.common.exits import UserError
from cbatch.engine import RequestError, TokenEvent, derive_seed

RETRY_TEMPERATURE = 0.7
"""Of another answer where the session is greedy, and would give the same one."""


TokenCallback = Callable[[Session, Reply, str], None]


class ChatController(SessionList):
    """Opens and closes sessions, has their turns answered, and keeps them on disk.

    Methods raise UserError with a sentence for the user where something cannot be done.
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
        """A room with one session.

        system, params: of new sessions
        auto_trim:      whether the oldest turns go by themselves where the context is full
        store:          where sessions are kept, if they are
        """
        super().__init__()
        self.client = client
        self.store = store
        self._system, self._params, self._seed, self._auto_trim = system, params or {}, seed, auto_trim
        self.on_token: TokenCallback = lambda session, reply, text: None
        """Told of every token, after it is part of its answer."""
        self._requests: dict[Reply, ReplyRequest] = {}
        self.new_session("main")

    def new_session(self, name: str | None = None) -> Session:
        """A new session, which becomes the current one."""
        return self.add(Session(self.new_name(name), system=self._system, params=dict(self._params)))

    def fork(self, session: Session, name: str | None = None) -> Session:
        """A new session that has come to the same point."""
        copy = self.add(session.copy(self.new_name(name)))
        self.save(copy)
        return copy

    def rename(self, session: Session, name: str) -> None:
        session.name = self.new_name(name)
        self.save(session)

    def close(self, session: Session) -> None:
        """Ends a session and takes it out; there is always one left."""
        self.end(session)
        place = self.sessions.index(session)
        self.sessions.remove(session)
        if not self.sessions:
            self.new_session()
        elif session is self.current:
            self.switch(self.sessions[min(place, len(self.sessions) - 1)])

    def send(self, session: Session, text: str) -> None:
        """Says something in a session; while an answer is coming, it is said after that."""
        if session.attached:
            text = "\n\n".join([*(part.rstrip("\n") for part in session.attached), text])
            session.attached.clear()
        self._send(session, text)

    def stop(self, session: Session) -> bool:
        """Cuts off what is coming, after which what waits is said. False where nothing was."""
        if not self._stop_replies(session):
            return False
        self._after_replies(session)
        session.is_unread = False
        return True

    def end(self, session: Session) -> None:
        """Cuts off what is coming, says nothing more, and keeps what is there."""
        self._stop_replies(session)
        session.move_queue_to_turns()
        self.save(session)

    def retry(self, session: Session, count: int) -> int:
        """Has the last turn answered again, `count` times. Returns the number of the first of those answers."""
        if self.client.engine_thread is None:
            raise UserError("The model is still being loaded.")
        turn = self._require_last_turn(session)
        self._stop_replies(session)
        turn.first_compared = 0
        turn.settle()
        params = session.params
        if self.is_greedy(session):
            params = {**params, "temperature": RETRY_TEMPERATURE}
        for reply in turn.add_replies(count):
            self._request_reply(session, turn, reply, params)
        return turn.chosen

    def is_greedy(self, session: Session) -> bool:
        """Whether it would give the same answer again."""
        return self.client.params(session.params).greedy

    def pick(self, session: Session, number: int) -> None:
        """Keeps one of several answers, counted from 0."""
        turn = self._require_last_turn(session)
        if not 0 <= number < len(turn.replies):
            raise UserError(f"There are answers 0 to {len(turn.replies) - 1} to pick from.")
        self._stop_replies(session)
        turn.pick(number)
        self.save(session)

    def continue_reply(self, session: Session, *, may_trim: bool = False) -> None:
        """Has an answer continued that was cut off."""
        turn = self._require_last_turn(session)
        reply = turn.reply
        if turn.is_open:
            raise UserError("An answer is coming; /stop cuts it off.")
        if reply is None or not reply.can_continue:
            raise UserError("The last answer is complete; there is nothing to continue.")
        params = reply.params if reply.generated else session.params
        self._request_reply(session, turn, reply, params, may_trim=may_trim)

    def undo(self, session: Session) -> str:
        """Takes back the last message, and its answers if it was asked, and returns its text."""
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
        """Asks something else in the place of a turn, which must still be the last one."""
        if session.last is not turn or session.queue:
            raise UserError("The conversation has gone on since; nothing is changed.")
        self._stop_replies(session)
        session.remove(turn)
        self._send(session, text)

    def trim(self, session: Session, count: int | None) -> int:
        """Leaves out the `count` oldest turns; None: as many as it takes for the last one to be answered, or go on."""
        if count is not None:
            gone = session.drop(session.dropped + count)
            self.save(session)
            return gone
        turn = self._require_last_turn(session)
        reply = turn.reply
        if reply is not None and reply.code == "prompt_too_long" and not reply.generated:
            (again,) = turn.add_replies(1)
            self._request_reply(session, turn, again, session.params, may_trim=True)
        elif reply is not None and reply.code in ("prompt_too_long", CONTEXT_FULL):
            self.continue_reply(session, may_trim=True)
        else:
            raise UserError("The context is not full; /trim N leaves out the N oldest turns all the same.")
        return 0

    def save(self, session: Session) -> None:
        """Has a session written to the disk, where sessions are kept, once there is something in it."""
        if self.store is not None and (session.turns or self.store.saved_path(session) is not None):
            self.store.save_later(session)

    def save_open_replies(self) -> None:
        """Has what has come so far of open answers written; to be called now and then."""
        for session in self.sessions:
            if session.is_busy:
                self.save(session)

    def end_all(self) -> None:
        """Ends all sessions."""
        for session in self.sessions:
            self.end(session)

    def _send(self, session: Session, text: str) -> None:
        if session.is_busy:
            session.queue.append(text)
            self.save(session)
            return
        last = session.last
        if last is not None:
            last.first_compared = 0
            last.settle()
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
                reply.mark_stopped()
        last.settle()
        return True

    def _require_last_turn(self, session: Session) -> Turn:
        """The one that commands are about."""
        if session.queue:
            raise UserError("A message waits for its turn; /undo takes it back.")
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
        reply.text = reply.text.rstrip("\ufffd")  # a character that was cut off in the middle
        reply.raw = reply.raw.rstrip("\ufffd")
        reply.state, reply.error, reply.code, reply.remark = "asked", "", "", ""
        reply.requested_at, reply.first_token_at, reply.num_tokens = time.monotonic(), None, 0
        request = ReplyRequest(
            system_messages=session.system_messages,
            history=session.history_before(turn),
            question={"role": "user", "content": turn.text},
            params=reply.params,
            seed=reply.seed,
            reply_prefix=reply.generated,
            may_trim=may_trim or self._auto_trim,
            on_start=partial(self._on_start, session, turn, reply, session.dropped),
            on_event=partial(self._take, session, reply),
        )
        self._requests[reply] = request
        self.client.submit(request)

    def _on_start(
        self, session: Session, turn: Turn, reply: Reply, before: int, prompt_tokens: int, dropped: int, thinks: bool
    ) -> None:
        reply.prompt_tokens = prompt_tokens
        reply.is_thinking |= thinks
        if gone := session.drop(before + dropped):
            turns = "oldest turn is" if gone == 1 else f"{gone} oldest turns are"
            text = f"The context is full: the {turns} left out from here on."
            session.items.insert(session.items.index(turn), Notice(text))

    def _take(self, session: Session, reply: Reply, event: TokenEvent, when: float) -> None:
        new = reply.append(self._text_of(reply, event), self.client.form, is_whole=event.finish_reason is not None)
        if event.token_id is not None:
            reply.state = "streaming"
            reply.num_tokens += 1
            reply.cached_tokens = event.cached_tokens
            reply.first_token_at = when if reply.first_token_at is None else reply.first_token_at
            reply.last_token_at = when
            self.on_token(session, reply, new)
        if event.finish_reason is not None:
            del self._requests[reply]
            reply.state = event.finish_reason
            if event.error is not None:
                reply.error, reply.code = str(event.error), event.error.code
            limit = self.client.params(reply.params).max_tokens
            reply.explain_ending(limit, has_failed=self.client.failure is not None)
            self._after_replies(session)

    def _text_of(self, reply: Reply, event: TokenEvent) -> str:
        try:
            return event.text
        except RequestError as error:
            reply.error = str(error)
            return ""

    def _after_replies(self, session: Session) -> None:
        """What follows when an answer has come to its end."""
        if session.is_busy:
            return
        turn = session.last
        if turn is not None and (reply := turn.reply) is not None:
            turn.settle()
            if turn.reply is not reply and reply.error:  # nobody sees it there any more
                session.add_notice(reply.error, is_error=True)
        session.is_unread = session is not self.current
        self.save(session)
        if session.queue and self.client.failure is None:
            self._send(session, session.queue.pop(0))
