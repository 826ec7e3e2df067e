"""The part of the screen that shows the current session."""

from __future__ import annotations

from prompt_toolkit.layout.controls import UIContent, UIControl

from cbatch.cli.chat.session.session import Session
from cbatch.cli.chat.session.session_list import SessionList
from cbatch.cli.chat.tui.transcript import Transcript, visible_lines


class TranscriptView(UIControl):
    """Shows the end of the current session, or the part that the user has scrolled to."""

    def __init__(self, sessions: SessionList) -> None:
        self._sessions = sessions
        self._transcript = Transcript()
        self._session: Session | None = None
        self._top: int | None = None
        self._height = self._start = 0

    def create_content(self, width: int, height: int) -> UIContent:
        session = self._sessions.current
        if session is not self._session:
            self._session, self._top = session, None
        lines, start, below = visible_lines(self._transcript.chunks(session, width), height, self._top)
        self._height, self._start = height, start
        if not below:
            self._top = None
        elif lines:
            lines[-1] = [("class:bar", f" {below + 1:,} more lines below: PageDown "[:width])]
        return UIContent(lambda number: [*lines[number]], line_count=len(lines), show_cursor=False)

    def follow(self) -> None:
        """Goes back to the end."""
        self._top = None

    def scroll(self, pages: int) -> None:
        """Scrolls by pages; negative is up."""
        self._top = max(0, self._start + pages * max(self._height - 2, 1))
