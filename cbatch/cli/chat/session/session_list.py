"""The open sessions, their names, and which of them is on the screen."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from cbatch.cli.chat.session.session import Session
from cbatch.cli.common.console import safe
from cbatch.cli.common.exits import UserError


class SessionList:
    """Open sessions in order. `current` is the one on the screen, once there is any."""

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.current: Session
        self.on_switch: Callable[[Session, Session], None] = lambda before, after: None
        """Called with the session that leaves the screen and the one that comes, before `current` changes."""
        self._num_opened = 0

    def add(self, session: Session) -> Session:
        """Adds a session and makes it the current one."""
        self._num_opened += 1
        session.number = self._num_opened
        self.sessions.append(session)
        self.switch(session)
        return session

    def add_loaded(self, session: Session) -> Session:
        """Adds a session from a file; it gets another name if its own is taken or cannot be one."""
        taken = {other.name for other in self.sessions}
        if not _is_name(session.name):
            session.name = "loaded"
        names = (session.name if n == 1 else f"{session.name}-{n}" for n in range(1, len(taken) + 2))
        session.name = next(name for name in names if name not in taken)
        return self.add(session)

    def switch(self, session: Session) -> None:
        before = getattr(self, "current", None)
        if before is not None and before is not session:
            self.on_switch(before, session)
        self.current = session
        session.is_unread = False

    def switch_to(self, index: int) -> None:
        """Switches to the session with this index in the list, if there is one."""
        if index < len(self.sessions):
            self.switch(self.sessions[index])

    def switch_by(self, offset: int) -> None:
        """Switches to a session after or before the current one; the list wraps around."""
        self.switch_to((self.sessions.index(self.current) + offset) % len(self.sessions))

    def find(self, which: str) -> Session:
        """The session of this name, or with this number in the list, from 1. Raises UserError if there is none."""
        for session in self.sessions:
            if session.name == which:
                return session
        if which in map(str, range(1, len(self.sessions) + 1)):
            return self.sessions[int(which) - 1]
        raise UserError(f"There is no session {which}; /list shows all sessions.")

    def new_name(self, name: str | None) -> str:
        """Checks a name for a session, or makes one up for None. Raises UserError if it is taken or cannot be one."""
        taken = {session.name for session in self.sessions}
        if name is None:
            return next(name for n in count(self._num_opened + 1) if (name := f"s{n}") not in taken)
        if name in taken:
            raise UserError(f"There is a session {name} already.")
        if not _is_name(name):
            raise UserError("A name is one word of at most 60 characters, and not a number.")
        return name


def _is_name(text: str) -> bool:
    """Whether a session can have this name: one word, not a number, and nothing that steers a terminal."""
    return len(text.split()) == 1 and not text.isdecimal() and len(text) <= 60 and safe(text) == text
