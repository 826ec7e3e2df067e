"""The open sessions and their answers. Everything here happens on the front end's thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from cbatch.cli.chat.engine_client import Call, EngineClient
from cbatch.cli.chat.session.session import CONTEXT_FULL, Answer, Note, Session, Turn
from cbatch.cli.chat.session.session_list import SessionList
from cbatch.cli.chat.session.store import Store
from cbatch.engine import ConfigError, RequestError, TokenEvent, derive_seed

RETRY_TEMPERATURE = 0.7
"""Of another answer where the session is greedy, and would give the same one."""


OnToken = Callable[[Session, Answer, str], None]


class Room(SessionList):
    """Opens and closes sessions, has their turns answered, and keeps them on disk.

    Methods raise ConfigError with a sentence for the user where something cannot be done.
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        system: str | None = None,
        params: dict[str, Any] | None = None,
        seed: int = 0,
        auto_trim: bool = False,
        store: Store | None = None,
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
        self.on_token: OnToken = lambda session, answer, text: None
        """Told of every token, after it is part of its answer."""
        self._calls: dict[Answer, Call] = {}
        self.open("main")

    def open(self, name: str | None = None) -> Session:
        """A new session, which becomes the current one."""
        return self.enter(Session(self.new_name(name), system=self._system, params=dict(self._params)))

    def fork(self, session: Session, name: str | None = None) -> Session:
        """A new session that has come to the same point."""
        twin = self.enter(session.copy(self.new_name(name)))
        self.keep(twin)
        return twin

    def rename(self, session: Session, name: str) -> None:
        session.name = self.new_name(name)
        self.keep(session)

    def close(self, session: Session) -> None:
        """Ends a session and takes it out; there is always one left."""
        self.end(session)
        place = self.sessions.index(session)
        self.sessions.remove(session)
        if not self.sessions:
            self.open()
        elif session is self.current:
            self.switch(self.sessions[min(place, len(self.sessions) - 1)])

    def ask(self, session: Session, text: str) -> None:
        """Says something in a session; while an answer is coming, it is said after that."""
        if session.attached:
            text = "\n\n".join([*(part.rstrip("\n") for part in session.attached), text])
            session.attached.clear()
        self._say(session, text)

    def stop(self, session: Session) -> bool:
        """Cuts off what is coming, after which what waits is said. False where nothing was."""
        if not self._cut_off(session):
            return False
        self._after(session)
        session.is_unread = False
        return True

    def end(self, session: Session) -> None:
        """Cuts off what is coming, says nothing more, and keeps what is there."""
        self._cut_off(session)
        session.settle_queue()
        self.keep(session)

    def retry(self, session: Session, count: int) -> int:
        """Has the last turn answered again, `count` times. Returns the number of the first of those answers."""
        if self.client.driver is None:
            raise ConfigError("The model is still being loaded.")
        turn = self._last_turn(session)
        self._cut_off(session)
        turn.compares = 0
        turn.settle()
        params = session.params
        if self.is_greedy(session):
            params = {**params, "temperature": RETRY_TEMPERATURE}
        for answer in turn.add_answers(count):
            self._call(session, turn, answer, params)
        return turn.chosen

    def is_greedy(self, session: Session) -> bool:
        """Whether it would give the same answer again."""
        return self.client.params(session.params).greedy

    def pick(self, session: Session, number: int) -> None:
        """Keeps one of several answers, counted from 0."""
        turn = self._last_turn(session)
        if not 0 <= number < len(turn.answers):
            raise ConfigError(f"There are answers 0 to {len(turn.answers) - 1} to pick from.")
        self._cut_off(session)
        turn.pick(number)
        self.keep(session)

    def go_on(self, session: Session, *, may_drop: bool = False) -> None:
        """Has an answer continued that was cut off."""
        turn = self._last_turn(session)
        answer = turn.answer
        if turn.is_open:
            raise ConfigError("An answer is coming; /stop cuts it off.")
        if answer is None or not answer.can_go_on:
            raise ConfigError("The last answer is complete; there is nothing to continue.")
        self._call(session, turn, answer, answer.params if answer.written else session.params, may_drop=may_drop)

    def undo(self, session: Session) -> str:
        """Takes back the last message, and its answers if it was asked, and returns its text."""
        if session.queue:
            text = session.queue.pop()
            self.keep(session)
            return text
        turn = self._last_turn(session)
        self._cut_off(session)
        session.remove(turn)
        self.keep(session)
        return turn.text

    def replace(self, session: Session, turn: Turn, text: str) -> None:
        """Asks something else in the place of a turn, which must still be the last one."""
        if session.last is not turn or session.queue:
            raise ConfigError("The conversation has gone on since; nothing is changed.")
        self._cut_off(session)
        session.remove(turn)
        self._say(session, text)

    def trim(self, session: Session, count: int | None) -> int:
        """Leaves out the `count` oldest turns; None: as many as it takes for the last one to be answered, or go on."""
        if count is not None:
            gone = session.drop(session.dropped + count)
            self.keep(session)
            return gone
        turn = self._last_turn(session)
        answer = turn.answer
        if answer is not None and answer.code == "prompt_too_long" and not answer.written:
            (again,) = turn.add_answers(1)
            self._call(session, turn, again, session.params, may_drop=True)
        elif answer is not None and answer.code in ("prompt_too_long", CONTEXT_FULL):
            self.go_on(session, may_drop=True)
        else:
            raise ConfigError("The context is not full; /trim N leaves out the N oldest turns all the same.")
        return 0

    def keep(self, session: Session) -> None:
        """Has a session written to the disk, where sessions are kept, once there is something in it."""
        if self.store is not None and (session.turns or self.store.path_kept(session) is not None):
            self.store.save_later(session)

    def keep_open(self) -> None:
        """Has what has come so far of open answers written; to be called now and then."""
        for session in self.sessions:
            if session.is_busy:
                self.keep(session)

    def leave(self) -> None:
        """Ends all sessions."""
        for session in self.sessions:
            self.end(session)

    def _say(self, session: Session, text: str) -> None:
        if session.is_busy:
            session.queue.append(text)
            self.keep(session)
            return
        last = session.last
        if last is not None:
            last.compares = 0
            last.settle()
        turn = Turn(text)
        (answer,) = turn.add_answers(1)
        session.items.append(turn)
        self._call(session, turn, answer, session.params)
        self.keep(session)

    def _cut_off(self, session: Session) -> bool:
        last = session.last
        if last is None or not last.is_open:
            return False
        for answer in last.answers:
            if answer.is_open:
                self.client.cancel(self._calls.pop(answer))
                answer.cut_off()
        last.settle()
        return True

    def _last_turn(self, session: Session) -> Turn:
        """The one that commands are about."""
        if session.queue:
            raise ConfigError("A message waits for its turn; /undo takes it back.")
        turn = session.last
        if turn is None:
            raise ConfigError("There is no message yet.")
        return turn

    def _call(
        self, session: Session, turn: Turn, answer: Answer, params: dict[str, Any], *, may_drop: bool = False
    ) -> None:
        if not answer.written:
            session.attempts += 1
            name = f"{session.number}/{session.attempts}"
            answer.seed, answer.params = derive_seed(self._seed, "turn", name), dict(params)
        answer.text = answer.text.rstrip("\ufffd")  # a character that was cut off in the middle
        answer.raw = answer.raw.rstrip("\ufffd")
        answer.state, answer.error, answer.code, answer.remark = "asked", "", "", ""
        answer.asked_at, answer.first_at, answer.num_tokens = time.monotonic(), None, 0
        call = Call(
            head=session.head,
            past=session.past(turn),
            last={"role": "user", "content": turn.text},
            overrides=answer.params,
            seed=answer.seed,
            so_far=answer.written,
            may_drop=may_drop or self._auto_trim,
            on_start=partial(self._started, session, turn, answer, session.dropped),
            on_event=partial(self._take, session, answer),
        )
        self._calls[answer] = call
        self.client.ask(call)

    def _started(
        self, session: Session, turn: Turn, answer: Answer, before: int, prompt_tokens: int, dropped: int, thinks: bool
    ) -> None:
        answer.prompt_tokens = prompt_tokens
        answer.is_thinking |= thinks
        if gone := session.drop(before + dropped):
            turns = "oldest turn is" if gone == 1 else f"{gone} oldest turns are"
            text = f"The context is full: the {turns} left out from here on."
            session.items.insert(session.items.index(turn), Note(text))

    def _take(self, session: Session, answer: Answer, event: TokenEvent, when: float) -> None:
        new = answer.take(self._text_of(answer, event), self.client.form, is_whole=event.finish_reason is not None)
        if event.token_id is not None:
            answer.state = "streaming"
            answer.num_tokens += 1
            answer.cached_tokens = event.cached_tokens
            answer.first_at = when if answer.first_at is None else answer.first_at
            answer.last_at = when
            self.on_token(session, answer, new)
        if event.finish_reason is not None:
            del self._calls[answer]
            answer.state = event.finish_reason
            if event.error is not None:
                answer.error, answer.code = str(event.error), event.error.code
            answer.advise(self.client.params(answer.params).max_tokens, has_failed=self.client.failure is not None)
            self._after(session)

    def _text_of(self, answer: Answer, event: TokenEvent) -> str:
        try:
            return event.text
        except RequestError as error:
            answer.error = str(error)
            return ""

    def _after(self, session: Session) -> None:
        """What follows when an answer has come to its end."""
        if session.is_busy:
            return
        turn = session.last
        if turn is not None and (answer := turn.answer) is not None:
            turn.settle()
            if turn.answer is not answer and answer.error:  # nobody sees it there any more
                session.note(answer.error, is_error=True)
        session.is_unread = session is not self.current
        self.keep(session)
        if session.queue and self.client.failure is None:
            self._say(session, session.queue.pop(0))
