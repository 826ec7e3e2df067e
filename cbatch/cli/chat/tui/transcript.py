"""A session as lines of a terminal. Only what has changed is laid out again."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain, islice
from typing import Any
from weakref import WeakKeyDictionary

from cbatch.cli.chat.session.reply import Reply
from cbatch.cli.chat.session.session import Notice, Session, Turn
from cbatch.cli.chat.tui import markup
from cbatch.cli.chat.tui.markdown.layout import MarkdownLayout
from cbatch.cli.chat.tui.markup import COLUMN_GAP, StyledLine, TextLayout, side_by_side
from cbatch.cli.common.console import safe

MIN_COLUMN = 24
"""If columns would be narrower than this, replies stand below one another."""

wrap_plain = lru_cache(maxsize=512)(markup.wrap_plain)
"""Cached, because a long message is drawn again with every token of its reply."""


class Transcript:
    """Lays out sessions and caches the lines, each item's with the state that they show."""

    def __init__(self) -> None:
        self._items: WeakKeyDictionary[Turn | Notice, tuple[object, list[StyledLine]]] = WeakKeyDictionary()
        self._layouts: WeakKeyDictionary[Reply, tuple[int, TextLayout, MarkdownLayout]] = WeakKeyDictionary()

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
        chunks += [[*wrap_plain(text, width, "class:note", first="(next) > "), []] for text in session.queue]
        return chunks

    def _item(self, item: Turn | Notice, width: int) -> list[StyledLine]:
        state = (width, *_state_of(item))
        shown_state, lines = self._items.get(item, (None, []))
        if shown_state != state:
            if isinstance(item, Turn):
                lines = self._turn(item, width)
            else:
                style = "class:error" if item.is_error else "class:note"
                lines = wrap_plain(item.text, width, style, first="· ")
            self._items[item] = state, lines
        return lines

    def _turn(self, turn: Turn, width: int) -> list[StyledLine]:
        lines = [*wrap_plain(turn.text, width, "class:user", first="> "), []]
        if not turn.first_compared:
            return lines + (self._reply(turn.reply, width) if turn.reply else []) + [[]]
        several = list(enumerate(turn.replies))[turn.first_compared :]
        column = (width - len(COLUMN_GAP) * (len(several) - 1)) // len(several)
        if column >= MIN_COLUMN:
            columns = [[[("class:heading", f"[{n}]")], *self._reply(reply, column)] for n, reply in several]
            return [*lines, *side_by_side(columns, column), []]
        for number, reply in several:
            lines += [[("class:heading", f"[{number}]")], *self._reply(reply, width), []]
        return lines

    def _reply(self, reply: Reply, width: int) -> list[StyledLine]:
        known = self._layouts.get(reply)
        if known is None or known[0] != width:
            known = self._layouts[reply] = width, TextLayout(width, "class:reasoning"), MarkdownLayout(width)
        lines = list(known[1].lines(reply.reasoning))
        if lines and reply.text:
            lines.append([])
        lines += known[2].lines(reply.text)
        if reply.state == "waiting":
            lines.append([("class:note", "…")])
        if reply.error:
            lines += wrap_plain(reply.error, width, "class:error")
        if reply.remark:
            lines += wrap_plain(f"({reply.remark})", width, "class:note")
        return lines


def visible_lines(chunks: list[list[StyledLine]], height: int, top: int | None) -> tuple[list[StyledLine], int, int]:
    """The visible lines, the number of the first of them, and how many are below the screen.

    top: number of the first visible line; None follows the end
    """
    total = sum(map(len, chunks))
    end = max(total - height, 0)
    start = end if top is None else max(0, min(top, end))
    lines = list(islice(chain.from_iterable(chunks), start, start + height))
    return lines, start, total - start - len(lines)


def _state_of(item: Turn | Notice) -> tuple[Any, ...]:
    """What the lines of an item depend on. Texts only grow, so their length is enough."""
    if isinstance(item, Notice):
        return ()
    replies = (
        (id(reply), len(reply.reasoning), len(reply.text), reply.state, reply.error, reply.remark)
        for reply in item.replies
    )
    return (item.chosen, item.first_compared, *replies)
