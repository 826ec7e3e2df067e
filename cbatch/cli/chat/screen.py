"""The screen: sessions as lines, of which only changes are laid out again, and the status bar."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, TextIO
from weakref import WeakKeyDictionary

from prompt_toolkit import print_formatted_text
from prompt_toolkit.formatted_text import FormattedText, fragment_list_to_text
from prompt_toolkit.layout.controls import UIContent, UIControl
from prompt_toolkit.mouse_events import MouseEvent, MouseEventType
from prompt_toolkit.output import create_output
from prompt_toolkit.styles import Style
from prompt_toolkit.utils import get_cwidth

from cbatch.cli.chat.background_run import BackgroundRun
from cbatch.cli.chat.controller import ALMOST_FULL, ChatController
from cbatch.cli.chat.markdown.lines import (
    COLUMN_GAP,
    Fragment,
    StyledLine,
    append_text,
    cells,
    side_by_side,
    wrap,
    wrap_plain,
)
from cbatch.cli.chat.session.session import Notice, Reply, Session, ToolRound, Turn
from cbatch.cli.chat.stats import ChatStats
from cbatch.cli.common.console import safe
from cbatch.cli.common.exits import UserError

if TYPE_CHECKING:
    from cbatch.cli.chat.markdown.layout import MarkdownLayout

STYLE = Style.from_dict(
    {
        "user": "ansicyan bold",
        "heading": "bold",
        "chosen": "bold reverse",
        "strong": "bold",
        "emphasis": "italic",
        "strike": "strike",
        "link": "ansiblue underline",
        "marker": "ansicyan",
        "code": "ansiyellow",
        "pygments.keyword": "ansimagenta",
        "pygments.operator.word": "ansimagenta",
        "pygments.literal": "ansicyan",
        "pygments.literal.string": "ansigreen",
        "pygments.comment": "italic ansibrightblack",
        **{f"pygments.name.{kind}": "ansiblue" for kind in "attribute builtin class decorator function tag".split()},
        **dict.fromkeys(("quote", "table", "fence", "note"), "ansibrightblack"),
        "reasoning": "italic ansibrightblack",
        "tool": "ansimagenta",
        "error": "ansired",
        "found": "bg:ansiyellow ansiblack",
        "bar": "reverse",
        "bar.current": "reverse bold",
        "bar.full": "reverse bold ansired",
        "prompt": "ansigreen bold",
    }
)
"""Colours by what they mean. Only the terminal's own 16 are used, so that its theme applies."""

MIN_COLUMN = 20
"""If columns would be narrower than this, replies stand below one another."""

MANY_LINES = 12
"""If one of several replies has more lines than this, what stands above them stands below them, too."""

RESULT_LINES = 4
"""Lines of a tool's result that are shown."""

WHEEL_LINES = 3

LOW = 12
"""A transcript of fewer lines than this shows no hints among the replies."""


class Transcript:
    """Lays out sessions and caches the lines, each item's with the state that they show."""

    def __init__(self, code_width: int | None = None) -> None:
        """`code_width`: where lines of code are broken, if not where the text is"""
        self.shows_reasoning = False
        """Whether all that models think is shown; else a line says how much it is."""
        self.shows_hints = True
        """Whether a line says how to pick a reply."""
        self._code_width = code_width
        self._items: WeakKeyDictionary[Turn | Notice, tuple[object, list[StyledLine]]] = WeakKeyDictionary()
        self._layouts: WeakKeyDictionary[Reply, tuple[tuple[int, int], MarkdownLayout]] = WeakKeyDictionary()
        """How the text of each reply is laid out, with the width and the request for which it holds."""

    def chunks(self, session: Session, width: int) -> list[list[StyledLine]]:
        """All lines of a session, item by item."""
        chunks: list[list[StyledLine]] = []
        unit = 0
        before: Turn | Notice | None = None
        for item in session.items:
            if isinstance(item, Turn):
                if isinstance(before, Notice):
                    chunks.append([[]])
                if session.dropped and unit == session.dropped:
                    chunks.append([[("class:fence", "── the model sees only what is below ──"[:width])], []])
                unit += 1
            chunks.append(self._item(item, width))
            before = item
        return chunks + [[*wrap_plain(turn.text, width, "class:note", first="(next) > "), []] for turn in session.queue]

    def _item(self, item: Turn | Notice, width: int) -> list[StyledLine]:
        state: tuple[object, ...] = (width, self.shows_reasoning, self.shows_hints)
        if isinstance(item, Turn):  # texts only grow until they are asked for again
            replies = (
                (id(one), one.num_requests, len(one.reasoning), len(one.text), one.state, one.error, one.remark)
                for one in item.replies
            )
            calls = (use.state for reply in item.replies for use in reply.uses)
            sizes = (attachment.num_tokens for attachment in item.attachments)
            state += (item.chosen, item.first_compared, *replies, *sizes, *calls)
        shown_state, lines = self._items.get(item, (None, []))
        if shown_state != state:
            if isinstance(item, Turn):
                lines = self.turn(item, width)
            else:
                lines = wrap_plain(item.text, width, "class:error" if item.is_error else "class:note", first="· ")
            self._items[item] = state, lines
        return lines

    def turn(self, turn: Turn, width: int) -> list[StyledLine]:
        """A message and its reply, or several replies side by side."""
        lines = wrap_plain(turn.text, width, "class:user", first="> ")
        files = (wrap_plain(one.label, width, "class:note", first="+ ") for one in turn.attachments if not one.is_paste)
        lines += [*chain.from_iterable(files), []]
        if not turn.first_compared:
            return lines + (self._reply(turn.reply, width) if turn.reply else []) + [[]]
        shown = turn.replies[turn.first_compared :]
        heads: list[Fragment] = [
            ("class:heading" if reply is not turn.reply else "class:chosen", f"[{number}] {safe(reply.label)}".rstrip())
            for number, reply in enumerate(shown, turn.first_compared)
        ]
        keys = f"{turn.pick_hint}, or Left, Right, Enter; {turn.fallback} goes back"
        hint = [*wrap_plain(keys, width, "class:note", first="· "), []] if self.shows_hints else []
        column = (width - len(COLUMN_GAP) * (len(shown) - 1)) // len(shown)
        if column >= MIN_COLUMN:
            tops = [wrap([head], column) for head in heads]
            columns = [[*top, *self._reply(reply, column)] for top, reply in zip(tops, shown, strict=True)]
            is_long = max(map(len, columns)) > MANY_LINES
            feet = side_by_side(tops, column) if is_long else []
            return [*lines, *side_by_side(columns, column), *feet, [], *hint]
        for head, reply in zip(heads, shown, strict=True):
            lines += [*wrap([head], width), *self._reply(reply, width), []]
        foot = wrap(chain.from_iterable((head, ("", "  ")) for head in heads), width) if len(lines) > MANY_LINES else []
        return [*lines, *foot, *hint]

    def _reply(self, reply: Reply, width: int) -> list[StyledLine]:
        lines = [line for each in reply.rounds for line in _round_lines(each, width)]
        if reply.reasoning and self.shows_reasoning:
            lines += wrap_plain(reply.reasoning, width, "class:reasoning")
        elif reply.reasoning:
            words = f"{len(reply.reasoning.split()):,} words"
            is_thinking = reply.is_open and not reply.text
            text = f"thinking, {words} …" if is_thinking else f"thought, {words}; Ctrl-T shows them"
            lines += wrap_plain(text, width, "class:reasoning", first="· ")
        if lines and reply.text:
            lines.append([])
        lines += self._layout(reply, width).lines(reply.text, is_whole=not reply.is_open)
        if reply.state == "waiting":
            lines.append([("class:note", "…")])
        if reply.error:
            lines += wrap_plain(reply.error, width, "class:error")
        if reply.remark:
            lines += wrap_plain(f"({reply.remark})", width, "class:note")
        return lines

    def _layout(self, reply: Reply, width: int) -> MarkdownLayout:
        from cbatch.cli.chat.markdown.layout import MarkdownLayout  # takes a tenth of a second, and the prompt waits

        version, (known, layout) = (width, reply.num_requests), self._layouts.get(reply, (None, None))
        if layout is None or known != version:
            layout = MarkdownLayout(width, code_width=self._code_width)
            self._layouts[reply] = version, layout
        return layout


def _round_lines(each: ToolRound, width: int) -> list[StyledLine]:
    """The calls, with the beginning of each result."""
    lines = wrap_plain(each.text, width) if each.text.strip() else []
    for use in each.uses:
        lines += wrap_plain(str(use), width, "class:tool", first="⚙ ")
        if use.state == "asking":
            lines += wrap_plain("Run it? y: yes, a: always, n: no", width, "class:heading", first="  ")
        elif use.state == "running":
            lines.append([("class:note", "  running …")])
        else:
            result = wrap_plain(use.result, width, "class:note", first="→ ")
            lines += result[:RESULT_LINES]
            if len(result) > RESULT_LINES:
                lines.append([("class:note", f"  … {len(result) - RESULT_LINES} more lines")])
    return [*lines, []]


class TranscriptView(UIControl):
    """Shows the end of the current session, or the part that the user has scrolled to, or the `compared` ones."""

    def __init__(self, controller: ChatController) -> None:
        self._controller = controller
        self._transcript = Transcript()
        self._session: Session | None = None
        self.compared: list[Session] = []
        self._page: int | None = None
        """Which of the compared sessions are shown, if not all fit; None: the current one is among them."""
        self._top: int | None = None
        """The first line on the screen; None follows the end."""
        self.follows_chosen = False
        """Whether it stays with the reply that stands out, if replies stand below one another."""
        self._begins_answer = False
        self.searched = self._found = ""
        self._found_line = 0
        self._width, self._height, self._start, self._end = 80, 0, 0, 0

    def create_content(self, width: int, height: int) -> UIContent:
        session = self._controller.current
        if session is not self._session:
            self._session = session
            self.go_to(None)
        self.compared = [each for each in self.compared if each in self._controller.sessions]
        self._width, self._height = width, height
        self._transcript.shows_hints = height >= LOW
        if len(self.compared) > 1:
            lines = self._side_by_side(width, height)
        else:
            chunks = self._transcript.chunks(session, width)
            if self.follows_chosen:
                styles = ([style for style, _ in line] for line in chain.from_iterable(chunks))
                self._top = next((number for number, line in enumerate(styles) if line == ["class:chosen"]), self._top)
            if self._begins_answer and len(chunks[-1]) > height:
                self._top = sum(map(len, chunks[:-1]))
            lines, self._start, self._end = visible_lines(chunks, height, self._top)
        self._begins_answer = False
        below = self._end - self._start
        if not below:
            self._top = None
        hints = [f"{below + 1:,} more lines below: PageDown, End"] if below else []
        if self.searched:
            lines = [highlighted(line, self.searched) for line in lines]
            hints.insert(0, self._found)
        if lines and hints:
            lines[-1] = [("class:bar", f" {'; '.join(hints)} "[:width])]
        return UIContent(lambda number: [*lines[number]], line_count=len(lines), show_cursor=False)

    def mouse_handler(self, mouse_event: MouseEvent) -> None:
        if mouse_event.event_type == MouseEventType.SCROLL_UP:
            self.scroll(-WHEEL_LINES)
        elif mouse_event.event_type == MouseEventType.SCROLL_DOWN:
            self.scroll(WHEEL_LINES)

    def go_to(self, top: int | None) -> None:
        """Goes to a line; None goes to the end of the current session, and stays there."""
        self._top, self.follows_chosen = top, False
        self._page = self._page if top is not None else None

    def begin_answer(self) -> None:
        """Goes to the first line of a notice that the last command has left, if it is longer than the screen."""
        session = self._controller.current
        last = session.items[-1] if session.items and not session.queue else None
        self._begins_answer = isinstance(last, Notice) and last.is_passing

    def scroll(self, lines: int = 0, pages: int = 0) -> None:
        """Scrolls by lines and pages; negative is up. Several calls before the screen is drawn add up."""
        self.follows_chosen = False
        before = self._start if self._top is None else self._top
        self._top = max(0, min(before + lines + pages * max(self._height - 2, 1), self._end))

    def show_reasoning(self, is_shown: bool | None = None) -> None:
        """Shows or folds what models think; None changes it."""
        self._transcript.shows_reasoning = not self._transcript.shows_reasoning if is_shown is None else is_shown

    def end_search(self) -> None:
        self.searched, self._top = "", None

    def find(self, text: str) -> None:
        """Scrolls to the next line above that holds a text; an empty one goes on. Raises UserError if there is none."""
        self.compared = []
        if not text and not self.searched:
            raise UserError("Type what to find: /find TEXT.")
        is_next, self.searched = not text, text or self.searched
        lines = chain.from_iterable(self._transcript.chunks(self._controller.current, self._width))
        wanted = self.searched.casefold()
        found = [number for number, line in enumerate(lines) if wanted in fragment_list_to_text([*line]).casefold()]
        if not found:
            text, self.searched = self.searched, ""
            raise UserError(f"Nothing above holds {text!r}." if is_next else f"There is no {text!r} in this session.")
        above = [number for number in found if number < self._found_line] if is_next else found
        self._top = self._found_line = (above or found)[-1]  # from the top it begins again at the end
        place = f"{found.index(self._top) + 1} of {len(found)} lines with {safe(self.searched)!r}"
        self._found = f"{place}: /find goes on, Esc ends it"

    def _side_by_side(self, width: int, height: int) -> list[StyledLine]:
        """The compared sessions in columns, each with its end at the bottom."""
        count = max(width // (MIN_COLUMN + len(COLUMN_GAP)), 2)
        pages = [self.compared[start : start + count] for start in range(0, len(self.compared), count)]
        current = (number for number, page in enumerate(pages) if self._controller.current in page)
        self._page = (next(current, 0) if self._page is None else self._page) % len(pages)
        shown = pages[self._page]
        column = max((width - len(COLUMN_GAP) * (len(shown) - 1)) // len(shown), 1)
        whole = [list(chain.from_iterable(self._transcript.chunks(session, column))) for session in shown]
        longest = max(map(len, whole))
        self._height = max(height - 1, 1)
        columns: list[list[StyledLine]] = []
        for session, lines in zip(shown, whole, strict=True):
            padded = [*([[]] * (longest - len(lines))), *lines]
            visible, self._start, self._end = visible_lines([padded], self._height, self._top)
            columns.append([[("class:heading", safe(session.name)[:column])], *visible])
        if len(pages) > 1:
            hint = f" ({self._page + 1}/{len(pages)}: Left, Right)"
            columns[-1][0] = [("class:heading", _cut(_cut(safe(shown[-1].name), column - len(hint)) + hint, column))]
        return side_by_side(columns, column)

    def turn_page(self, offset: int) -> None:
        """Shows others of the compared sessions, if not all fit."""
        self._page = (self._page or 0) + offset


def visible_lines(
    chunks: Sequence[Sequence[StyledLine]], height: int, top: int | None
) -> tuple[list[StyledLine], int, int]:
    """The visible lines, the number of the first of them (`top`; None follows the end), and what that is at the end."""
    end = max(sum(map(len, chunks)) - height, 0)
    start = end if top is None else max(0, min(top, end))
    return list(islice(chain.from_iterable(chunks), start, start + height)), start, end


def highlighted(line: StyledLine, text: str) -> StyledLine:
    """A line in which every place that holds a text stands out."""
    spans = [match.span() for match in re.finditer(re.escape(text), fragment_list_to_text([*line]), re.IGNORECASE)]
    if not spans:
        return line
    marked = {place for span in spans for place in range(*span)}
    made: StyledLine = []
    for place, (style, character) in enumerate((style, character) for style, part in line for character in part):
        append_text(made, "class:found" if place in marked else style, character)
    return made


def print_conversations(sessions: Iterable[Session], stream: TextIO) -> None:
    """Prints what was said in this chat, so that it stays in the terminal's own scrollback."""
    output = create_output(stdout=stream)
    for session in sessions:
        for line in conversation_lines(session, output.get_size().columns):
            text = FormattedText(line)
            print_formatted_text(text, output=output, style=STYLE, include_default_pygments_style=False)


def conversation_lines(session: Session, width: int) -> list[StyledLine]:
    """The turns of a session that this chat has added, under its name. Code is not broken, so that it can be copied."""
    transcript, name = Transcript(code_width=10**6), f"── {safe(session.name)} "
    turns = [turn for turn in session.turns if any(reply.requested_at for reply in turn.replies)]
    head: StyledLine = [("class:fence", name + "─" * max(min(width, 60) - len(name), 0))]
    lines = [line for turn in turns for line in transcript.turn(turn, width)]
    return [head, *lines] if turns else []


def status_bar(controller: ChatController, stats: ChatStats, background: BackgroundRun, width: int) -> StyledLine:
    """The line between transcript and input: the sessions on the left, the engine on the right."""
    engine = controller.client_of(controller.current).engine
    if engine is None:  # the most important part comes first
        parts = ["loading the model", *([safe(stats.loading_detail)] if stats.loading_detail else [])]
    elif engine.failure is not None:
        parts = ["the engine has failed"]
    elif background.progress:
        parts = background.progress
    elif (load := engine.stats()).num_running or load.num_waiting:
        waiting = [f"{load.num_waiting} waiting"] if load.num_waiting else []
        read = controller.share_read(controller.current)
        speed = f"{stats.tokens_per_s:,.0f} tok/s" if read is None else f"{read:.0%} of the prompt read"
        parts = [f"{load.num_running} running", *waiting, speed, f"KV {load.cache_used:.0%}"]
    elif (last := controller.current.last) is not None and last.is_undecided:
        parts = [last.pick_hint]
    else:
        name, room = safe(engine.loaded.name), width // 2 - 2
        parts = [name if get_cwidth(name) <= room else f"…{name[1 - room :]}"]  # the end of a path tells most
    right = _fitting(parts, width // 2)
    left = _session_labels(controller, width - get_cwidth(right) - 1)
    return [*left, ("class:bar", " " * max(width - cells(left) - get_cwidth(right), 0)), ("class:bar", right)]


def _session_labels(controller: ChatController, width: int) -> StyledLine:
    """` 1 main… ` while a reply is on its way, ` 1 main* ` if something is unread, `[1 main 12%]` if it is current.

    If not all fit, those around the current one.
    """
    labels: StyledLine = []
    for number, session in enumerate(controller.sessions, 1):
        share, is_current = controller.context_share(session), session is controller.current
        mark = "…" if session.is_busy else "*" if session.is_unread else ""
        label = f"{number} {safe(session.name)}{mark}" + (f" {share:.0%}" if share else "")
        style = "class:bar.full" if share >= ALMOST_FULL else "class:bar.current" if is_current else "class:bar"
        labels.append((style, f"[{label}]" if is_current else f" {label} "))
    sizes = [get_cwidth(label) for _, label in labels]
    first = last = controller.sessions.index(controller.current)
    used = sizes[first]
    while last + 1 < len(labels) and used + sizes[last + 1] <= width - 4:
        last += 1
        used += sizes[last]
    while first > 0 and used + sizes[first - 1] <= width - 4:
        first -= 1
        used += sizes[first]
    before, after = "< " if first else "", " >" if last + 1 < len(labels) else ""
    if used + len(before) + len(after) > width:
        return [("class:bar.current", _cut(labels[controller.sessions.index(controller.current)][1], width))]
    return [("class:bar", before), *labels[first : last + 1], ("class:bar", after)]


def _fitting(parts: list[str], width: int) -> str:
    """As many parts as fit into `width` cells, with a blank on each side; none is cut, but for a first one of words."""
    shown = ""
    for part in parts:
        longer = f"{shown}, {part}" if shown else part
        if get_cwidth(longer) + 2 > width:
            break
        shown = longer
    if not shown and not any(character.isdigit() for character in parts[0]):
        shown = _cut(parts[0], width - 2)
    return f" {shown} " if shown else ""


def _cut(text: str, width: int) -> str:
    """As much of a text as fits into `width` cells."""
    text = text[: max(width, 0)]
    while get_cwidth(text) > max(width, 0):
        text = text[:-1]
    return text
