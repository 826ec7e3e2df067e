"""A session as lines of a terminal. Only what has changed is laid out again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from cbatch.cli.chat.markdown.lines import COLUMN_GAP, Fragment, StyledLine, side_by_side, wrap, wrap_plain
from cbatch.cli.chat.session.reply import Reply
from cbatch.cli.chat.session.session import Notice, Session, Turn
from cbatch.cli.chat.session.tool_round import ToolRound
from cbatch.cli.common.console import safe

if TYPE_CHECKING:
    from cbatch.cli.chat.markdown.layout import MarkdownLayout

MIN_COLUMN = 20
"""If columns would be narrower than this, replies stand below one another."""

MANY_LINES = 12
"""If one of several replies has more lines than this, what stands above them stands below them, too."""

RESULT_LINES = 4
"""Lines of a tool's result that are shown."""

UNBROKEN = 10**6
"""A width that no line of code has."""


class Transcript:
    """Lays out sessions and caches the lines, each item's with the state that they show.

    shows_reasoning: whether all that models think is shown; else a line says how much it is
    """

    def __init__(self, *, shows_reasoning: bool = False, breaks_code: bool = True) -> None:
        """`breaks_code`: whether lines of code that do not fit are broken; else the terminal does that."""
        self.shows_reasoning = shows_reasoning
        self._breaks_code = breaks_code
        self._items: WeakKeyDictionary[Turn | Notice, tuple[object, list[StyledLine]]] = WeakKeyDictionary()
        self._layouts: WeakKeyDictionary[Reply, tuple[tuple[int, int], MarkdownLayout]] = WeakKeyDictionary()
        """How the text of each reply is laid out, with the width and the request for which it holds."""

    def chunks(self, session: Session, width: int) -> list[list[StyledLine]]:
        """All lines of a session, item by item."""
        chunks: list[list[StyledLine]] = []
        for message in session.prelude:
            text, role = message["content"], safe(message["role"])
            chunks.append([*wrap_plain(text, width, "class:note", first=f"{role}: "), []])
        unit = int(bool(session.prelude))
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
        chunks += [[*wrap_plain(turn.text, width, "class:note", first="(next) > "), []] for turn in session.queue]
        return chunks

    def _item(self, item: Turn | Notice, width: int) -> list[StyledLine]:
        state = (width, self.shows_reasoning, *_state_of(item))
        shown_state, lines = self._items.get(item, (None, []))
        if shown_state != state:
            if isinstance(item, Turn):
                lines = self.turn(item, width)
            else:
                style = "class:error" if item.is_error else "class:note"
                lines = wrap_plain(item.text, width, style, first="· ")
            self._items[item] = state, lines
        return lines

    def turn(self, turn: Turn, width: int) -> list[StyledLine]:
        """A message and its reply, or several replies side by side."""
        lines = [*wrap_plain(turn.text, width, "class:user", first="> ")]
        for attachment in turn.attachments:
            if not attachment.is_paste:
                lines += wrap_plain(attachment.label, width, "class:note", first="+ ")
        lines.append([])
        if not turn.first_compared:
            return lines + (self._reply(turn.reply, width) if turn.reply else []) + [[]]
        several = list(enumerate(turn.replies))[turn.first_compared :]
        column = (width - len(COLUMN_GAP) * (len(several) - 1)) // len(several)
        heads = [_head(number, reply, is_chosen=number == turn.chosen) for number, reply in several]
        hint = wrap_plain(turn.pick_hint, width, "class:note", first="· ")
        if column >= MIN_COLUMN:
            columns = [
                [*wrap([head], column), *self._reply(reply, column)]
                for head, (_, reply) in zip(heads, several, strict=True)
            ]
            feet = side_by_side([wrap([head], column) for head in heads], column)
            is_long = max(map(len, columns)) > MANY_LINES
            return [*lines, *side_by_side(columns, column), *(feet if is_long else []), [], *hint, []]
        for head, (_, reply) in zip(heads, several, strict=True):
            lines += [*wrap([head], width), *self._reply(reply, width), []]
        foot: StyledLine = []
        for head in heads:
            foot += [head, ("", "  ")]
        return [*lines, *(wrap(foot, width) if len(lines) > MANY_LINES else []), *hint, []]

    def _layout(self, width: int) -> MarkdownLayout:
        from cbatch.cli.chat.markdown.layout import MarkdownLayout  # takes a tenth of a second, and the prompt waits

        return MarkdownLayout(width, code_width=None if self._breaks_code else UNBROKEN)

    def _reply(self, reply: Reply, width: int) -> list[StyledLine]:
        known = self._layouts.get(reply)
        version = width, reply.num_requests
        if known is None or known[0] != version:
            known = self._layouts[reply] = version, self._layout(width)
        lines = [line for each in reply.rounds for line in _round_lines(each, width)]
        if reply.reasoning:
            shown = wrap_plain(reply.reasoning, width, "class:reasoning")
            lines += shown if self.shows_reasoning else _folded(reply, width)
        if lines and reply.text:
            lines.append([])
        lines += known[1].lines(reply.text, is_whole=not reply.is_open)
        if reply.state == "waiting":
            lines.append([("class:note", "…")])
        if reply.error:
            lines += wrap_plain(reply.error, width, "class:error")
        if reply.remark:
            lines += wrap_plain(f"({reply.remark})", width, "class:note")
        return lines


def _head(number: int, reply: Reply, *, is_chosen: bool) -> Fragment:
    """What stands above one of several replies."""
    label = f"[{number}] {safe(reply.label)}".rstrip()
    return ("class:chosen" if is_chosen else "class:heading"), label


def _folded(reply: Reply, width: int) -> list[StyledLine]:
    """One line for all that a model has thought."""
    words = f"{len(reply.reasoning.split()):,} words"
    is_thinking = reply.is_open and not reply.text
    text = f"thinking, {words} …" if is_thinking else f"thought, {words}; Ctrl-T shows them"
    return wrap_plain(text, width, "class:reasoning", first="· ")


def _round_lines(each: ToolRound, width: int) -> list[StyledLine]:
    """What was called, with the beginning of each result."""
    lines = list(wrap_plain(each.text, width)) if each.text.strip() else []
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


def _state_of(item: Turn | Notice) -> tuple[Any, ...]:
    """What the lines of an item depend on. Texts only grow until they are asked for again."""
    if isinstance(item, Notice):
        return ()
    replies = (
        (id(reply), reply.num_requests, len(reply.reasoning), len(reply.text), reply.state, reply.error, reply.remark)
        for reply in item.replies
    )
    calls = (use.state for reply in item.replies for use in reply.uses)
    sizes = (attachment.num_tokens for attachment in item.attachments)
    return (item.chosen, item.first_compared, *replies, *sizes, *calls)
