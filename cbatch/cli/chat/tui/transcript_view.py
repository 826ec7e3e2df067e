"""The part of the screen that shows the current session, or several side by side."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain, islice

from prompt_toolkit.layout.controls import UIContent, UIControl
from prompt_toolkit.mouse_events import MouseEvent, MouseEventType

from cbatch.cli.chat.markdown.lines import COLUMN_GAP, StyledLine, side_by_side
from cbatch.cli.chat.session.session import Session
from cbatch.cli.chat.session.session_list import SessionList
from cbatch.cli.chat.tui.transcript import MIN_COLUMN, Transcript
from cbatch.cli.common.console import safe
from cbatch.cli.common.exits import UserError

WHEEL_LINES = 3


class TranscriptView(UIControl):
    """Shows the end of a transcript, or the part that the user has scrolled to.

    compared: sessions that stand side by side; none shows the current one alone
    """

    def __init__(self, sessions: SessionList) -> None:
        self._sessions = sessions
        self._transcript, self._columns = Transcript(), Transcript()
        self._session: Session | None = None
        self.compared: list[Session] = []
        self._top: int | None = None
        """The first line on the screen; None follows the end."""
        self._searched = self._found = ""
        self._found_line = 0
        self._width, self._height, self._start, self._end = 80, 0, 0, 0

    @property
    def is_searching(self) -> bool:
        return bool(self._searched)

    def create_content(self, width: int, height: int) -> UIContent:
        session = self._sessions.current
        if session is not self._session:
            self._session, self._top = session, None
        self.compared = [each for each in self.compared if each in self._sessions.sessions]
        self._width = width
        if len(self.compared) > 1:
            lines, below = self._side_by_side(width, height)
        else:
            lines, below = self._visible(self._transcript.chunks(session, width), height)
        if not below:
            self._top = None
        if self._searched:
            lines = [highlighted(line, self._searched) for line in lines]
        hints = [self._found] if self._searched else []
        hints += [f"{below + 1:,} more lines below: PageDown, End"] if below else []
        if lines and hints:
            lines[-1] = [("class:bar", f" {'; '.join(hints)} "[:width])]
        return UIContent(lambda number: [*lines[number]], line_count=len(lines), show_cursor=False)

    def mouse_handler(self, mouse_event: MouseEvent) -> None:
        if mouse_event.event_type == MouseEventType.SCROLL_UP:
            self.scroll(-WHEEL_LINES)
        elif mouse_event.event_type == MouseEventType.SCROLL_DOWN:
            self.scroll(WHEEL_LINES)

    def follow(self) -> None:
        """Goes to the end, and stays there."""
        self._top = None

    def go_to_start(self) -> None:
        self._top = 0

    def scroll(self, lines: int) -> None:
        """Scrolls by lines; negative is up. Several calls before the screen is drawn add up."""
        before = self._start if self._top is None else self._top
        self._top = max(0, min(before + lines, self._end))

    def scroll_pages(self, pages: int) -> None:
        self.scroll(pages * max(self._height - 2, 1))

    def show_reasoning(self, is_shown: bool | None = None) -> None:
        """Shows or folds what models think; None changes it."""
        for transcript in (self._transcript, self._columns):
            transcript.shows_reasoning = not transcript.shows_reasoning if is_shown is None else is_shown

    def end_search(self) -> None:
        self._searched = ""
        self.follow()

    def find(self, text: str) -> None:
        """Scrolls to the next line above that holds a text; an empty one goes on. Raises UserError if there is none."""
        if not text and not self._searched:
            raise UserError("Type what to find: /find TEXT.")
        is_next, self._searched = not text, text or self._searched
        lines = chain.from_iterable(self._transcript.chunks(self._sessions.current, self._width))
        wanted = self._searched.casefold()
        found = [number for number, line in enumerate(lines) if wanted in _plain(line).casefold()]
        if not found:
            text, self._searched = self._searched, ""
            raise UserError(f"Nothing above holds {text!r}." if is_next else f"There is no {text!r} in this session.")
        above = [number for number in found if number < self._found_line] if is_next else found
        line = self._found_line = above[-1] if above else found[-1]  # from the top it begins again at the end
        self._top = line
        self._found = (
            f"{found.index(line) + 1} of {len(found)} lines with {safe(self._searched)!r}: /find goes on, Esc ends it"
        )

    def _visible(self, chunks: Sequence[Sequence[StyledLine]], height: int) -> tuple[list[StyledLine], int]:
        """The lines on the screen, and how many are below it."""
        lines, start, below = visible_lines(chunks, height, self._top)
        self._height, self._start = height, start
        self._end = start + below
        return lines, below

    def _side_by_side(self, width: int, height: int) -> tuple[list[StyledLine], int]:
        """The compared sessions in columns, each with its end at the bottom."""
        shown = self.compared[: max(width // (MIN_COLUMN + len(COLUMN_GAP)), 2)]
        column = max((width - len(COLUMN_GAP) * (len(shown) - 1)) // len(shown), 1)
        whole = [list(chain.from_iterable(self._columns.chunks(session, column))) for session in shown]
        longest = max(map(len, whole))
        for number, lines in enumerate(whole):
            whole[number] = [[] for _ in range(longest - len(lines))] + lines
        height = max(height - 1, 1)
        self._end = max(longest - height, 0)
        self._start = self._end if self._top is None else max(0, min(self._top, self._end))
        self._height = height
        visible = [lines[self._start : self._start + height] for lines in whole]
        heads = [[[("class:heading", safe(session.name)[:column])]] for session in shown]
        cells = [[*head, *lines] for head, lines in zip(heads, visible, strict=True)]
        return side_by_side(cells, column), self._end - self._start


def visible_lines(
    chunks: Sequence[Sequence[StyledLine]], height: int, top: int | None
) -> tuple[list[StyledLine], int, int]:
    """The visible lines, the number of the first of them, and how many are below the screen.

    top: number of the first visible line; None follows the end
    """
    total = sum(map(len, chunks))
    end = max(total - height, 0)
    start = end if top is None else max(0, min(top, end))
    lines = list(islice(chain.from_iterable(chunks), start, start + height))
    return lines, start, total - start - len(lines)


def highlighted(line: StyledLine, text: str) -> StyledLine:
    """A line in which every place that holds a text stands out."""
    spans = [match.span() for match in re.finditer(re.escape(text), _plain(line), re.IGNORECASE)]
    if not spans:
        return line
    marked = {place for start, end in spans for place in range(start, end)}
    made: StyledLine = []
    place = 0
    for style, part in line:
        for character in part:
            now = "class:found" if place in marked else style
            if made and made[-1][0] == now:
                made[-1] = now, made[-1][1] + character
            else:
                made.append((now, character))
            place += 1
    return made


def _plain(line: StyledLine) -> str:
    return "".join(text for _, text in line)
