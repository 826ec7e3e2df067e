"""The open sessions and their answers. Everything here happens on the front end's thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from cbatch.cli.chat.session import Answer, Note, Session, Turn
from cbatch.cli.chat.speaker import Call, Speaker
from cbatch.cli.chat.store import Store
from cbatch.engine import ConfigError, SamplingParams, TokenEvent, derive_seed

RETRY_TEMPERATURE = 0.7
"""Of another answer where the session is greedy, and would give the same one."""


OnToken = Callable[[Session, Answer, str], None]


class Room:
    """Opens and closes sessions, has their turns answered, and keeps them on disk.

    Methods raise ConfigError with a sentence for the user where something cannot be done.
    """

    def __init__(
        self,
        speaker: Speaker,
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
        self.speaker = speaker
        self.store = store
        self.sessions: list[Session] = []
        self._system, self._params, self._seed, self._auto_trim = system, params or {}, seed, auto_trim
        self.on_token: OnToken = lambda session, answer, text: None
        """Told of every token, after it is part of its answer."""
        self._calls: dict[Answer, Call] = {}
        self._num_opened = 0
        self.current = self.open("main")

    def open(self, name: str | None = None) -> Session:
        """A new session, which becomes the current one."""
        return self._enter(Session(self._new_name(name), system=self._system, params=dict(self._params)))

    def fork(self, session: Session, name: str | None = None) -> Session:
        """A new session that has come to the same point."""
        return self._enter(session.copy(self._new_name(name), 0))

    def add(self, session: Session) -> Session:
        """Takes in a session that was made elsewhere, under its name or one like it."""
        taken = {other.name for other in self.sessions}
        names = (session.name if n == 1 else f"{session.name}-{n}" for n in range(1, len(taken) + 2))
        session.name = next(name for name in names if name not in taken)
        return self._enter(session)

    def switch(self, session: Session) -> None:
        self.current = session
        session.is_unread = False

    def find(self, which: str) -> Session:
        """The session of this name, or at this place in the list, counted from 1."""
        for session in self.sessions:
            if session.name == which:
                return session
        if which.isdecimal() and 1 <= int(which) <= len(self.sessions):
            return self.sessions[int(which) - 1]
        raise ConfigError(f"There is no session {which}; /list shows them.")

    def rename(self, session: Session, name: str) -> None:
        session.name = self._new_name(name)
        self.keep(session)

    def close(self, session: Session) -> None:
        """Stops its answers and takes it out; there is always one left."""
        session.queue.clear()
        self.stop(session)
        place = self.sessions.index(session)
        self.sessions.remove(session)
        if not self.sessions:
            self.open()
        elif session is self.current:
            self.switch(self.sessions[min(place, len(self.sessions) - 1)])

    def ask(self, session: Session, text: str) -> None:
        """Says something in a session; while an answer is coming, it is said after that."""
        if session.attached:
            text = "\n\n".join([*session.attached, text])
            session.attached.clear()
        self._say(session, text)

    def stop(self, session: Session) -> bool:
        """Cuts off what is coming. False where nothing was."""
        last = session.last
        if last is None or not last.is_open:
            return False
        for answer in last.answers:
            if answer.is_open:
                self.speaker.cancel(self._calls.pop(answer))
                answer.state = "stopped"
                answer.remark = "stopped; /continue goes on" if answer.text else "stopped before the first token"
        self._after(session)
        return True

    def retry(self, session: Session, count: int) -> bool:
        """Has the last turn answered again, `count` times. True where that is sampled, though the session is greedy."""
        turn = self._last_settled(session)
        kept = turn.answer
        assert kept is not None
        params = session.params
        is_greedy = self.speaker.params(params).greedy
        if is_greedy:
            params = {**params, "temperature": RETRY_TEMPERATURE}
        turn.answers = [kept] + [Answer() for _ in range(count)]
        turn.chosen, turn.compares = 1, count > 1
        for answer in turn.answers[1:]:
            self._call(session, turn, answer, params)
        return is_greedy

    def pick(self, session: Session, number: int) -> None:
        """Keeps one of several answers; 0 is the one before them."""
        turn = self._last_settled(session)
        if not 0 <= number < len(turn.answers):
            raise ConfigError(f"There are answers 0 to {len(turn.answers) - 1} to pick from.")
        turn.chosen, turn.compares = number, False
        self.keep(session)

    def go_on(self, session: Session, *, may_drop: bool = False) -> None:
        """Has an answer continued that was cut off."""
        turn = self._last_settled(session)
        answer = turn.answer
        if answer is None or not answer.can_go_on:
            raise ConfigError("The last answer is complete; there is nothing to continue.")
        self._call(session, turn, answer, answer.params, may_drop=may_drop)

    def undo(self, session: Session) -> str:
        """Takes back the last message and its answers, and returns its text."""
        turn = self._last_settled(session)
        session.remove(turn)
        self.keep(session)
        return turn.text

    def trim(self, session: Session, count: int | None) -> int:
        """Leaves out the `count` oldest turns; None: as many as the last turn needs, which is then asked again."""
        if count is not None:
            return session.drop(session.dropped + count)
        turn = self._last_settled(session)
        answer = turn.answer
        if answer is not None and answer.code == "prompt_too_long":
            turn.answers, turn.chosen = [Answer()], 0
            self._call(session, turn, turn.answers[0], session.params, may_drop=True)
        elif answer is not None and answer.can_go_on:
            self.go_on(session, may_drop=True)
        else:
            raise ConfigError("The context is not full; /trim N leaves out the N oldest turns all the same.")
        return 0

    def keep(self, session: Session) -> None:
        """Writes a session to the disk, where sessions are kept; a disk that fails costs no conversation."""
        if self.store is not None and session.turns:
            with suppress(ConfigError):
                self.store.save(session)

    def _enter(self, session: Session) -> Session:
        self._num_opened += 1
        session.number = self._num_opened
        self.sessions.append(session)
        self.switch(session)
        return session

    def _new_name(self, name: str | None) -> str:
        taken = {session.name for session in self.sessions}
        if name is None:
            number = self._num_opened + 1
            while f"s{number}" in taken:
                number += 1
            return f"s{number}"
        if name in taken:
            raise ConfigError(f"There is a session {name} already.")
        if name.isdecimal() or len(name.split()) != 1:
            raise ConfigError("A name is one word, and not a number.")
        return name

    def _say(self, session: Session, text: str) -> None:
        if session.is_busy:
            session.queue.append(text)
            return
        last = session.last
        if last is not None:
            last.compares = False
        turn = Turn(text, [Answer()])
        session.items.append(turn)
        self._call(session, turn, turn.answers[0], session.params)
        self.keep(session)

    def _last_settled(self, session: Session) -> Turn:
        """The last turn, with nothing more coming."""
        self.stop(session)
        turn = session.last
        if turn is None:
            raise ConfigError("There is no message yet.")
        if not turn.answers:
            turn.answers = [Answer(state="stopped")]
        return turn

    def _call(
        self, session: Session, turn: Turn, answer: Answer, params: dict[str, Any], *, may_drop: bool = False
    ) -> None:
        if not answer.text:
            session.attempts += 1
            name = f"{session.number}/{session.attempts}"
            answer.seed, answer.params = derive_seed(self._seed, "turn", name), dict(params)
        answer.state, answer.error, answer.code, answer.remark = "asked", "", "", ""
        answer.asked_at, answer.first_at, answer.num_tokens = time.monotonic(), None, 0
        call = Call(
            head=session.head,
            past=session.past(turn),
            last={"role": "user", "content": turn.text},
            overrides=answer.params,
            seed=answer.seed,
            so_far=answer.text,
            may_drop=may_drop or self._auto_trim,
            on_start=partial(self._started, session, turn, answer, session.dropped),
            on_event=partial(self._take, session, answer),
        )
        self._calls[answer] = call
        self.speaker.ask(call)

    def _started(
        self, session: Session, turn: Turn, answer: Answer, before: int, prompt_tokens: int, dropped: int
    ) -> None:
        answer.prompt_tokens = prompt_tokens
        if gone := session.drop(before + dropped):
            text = f"The context is full: the {gone} oldest turns are left out from here on."
            session.items.insert(session.items.index(turn), Note(text))

    def _take(self, session: Session, answer: Answer, event: TokenEvent, when: float) -> None:
        answer.text += event.text
        if event.token_id is not None:
            answer.state = "streaming"
            answer.num_tokens += 1
            answer.cached_tokens = event.cached_tokens
            answer.first_at = when if answer.first_at is None else answer.first_at
            answer.last_at = when
            self.on_token(session, answer, event.text)
        if event.finish_reason is not None:
            del self._calls[answer]
            answer.state = event.finish_reason
            if event.error is not None:
                answer.error, answer.code = str(event.error), event.error.code
                if answer.code == "prompt_too_long":
                    answer.remark = "/trim leaves out the oldest turns and asks again; /undo takes the message back"
            elif event.finish_reason == "length":
                answer.remark = self._why_cut_off(answer)
            self._after(session)

    def _why_cut_off(self, answer: Answer) -> str:
        params: SamplingParams = self.speaker.params(answer.params)
        if params.max_tokens is not None and answer.num_tokens >= params.max_tokens:
            return f"cut off after {params.max_tokens:,} tokens (max_tokens); /continue goes on"
        return "cut off, the context is full; /trim leaves out the oldest turns and goes on"

    def _after(self, session: Session) -> None:
        """What follows when an answer has come to its end."""
        if session.is_busy:
            return
        session.is_unread = session is not self.current
        self.keep(session)
        if session.queue:
            self._say(session, session.queue.pop(0))
