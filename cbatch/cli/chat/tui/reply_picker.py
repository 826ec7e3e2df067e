"""Picks one of the replies that stand side by side, by keys on an empty input line."""

from __future__ import annotations

from cbatch.cli.chat.controller import ChatController
from cbatch.cli.chat.session.session import Turn


class ReplyPicker:
    """Acts on the last turn of the current session."""

    def __init__(self, controller: ChatController) -> None:
        self._controller = controller

    @property
    def is_open(self) -> bool:
        """Whether there is something to pick."""
        return self._turn is not None

    @property
    def _turn(self) -> Turn | None:
        last = self._controller.current.last
        return last if last is not None and last.is_undecided else None

    def offers(self, number: int) -> bool:
        """Whether the reply with a number is one of those that can be picked now."""
        turn = self._turn
        return turn is not None and (number == turn.fallback or turn.first_compared <= number < len(turn.replies))

    def move(self, offset: int) -> None:
        """Goes to a reply on the left or right, and from the last one to the first."""
        if (turn := self._turn) is not None:
            count = len(turn.replies) - turn.first_compared
            turn.chosen = turn.first_compared + (turn.chosen - turn.first_compared + offset) % count

    def take(self) -> None:
        """Keeps the reply that stands out."""
        if (turn := self._turn) is not None:
            self.pick(turn.chosen)

    def pick(self, number: int) -> None:
        """Keeps the reply with a number, if there is one."""
        if self.offers(number):
            session = self._controller.current
            self._controller.pick(session, number)
            session.clear_passing_notices()  # they say how to pick
