"""A session as lines of a terminal. What has not changed is laid out once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from cbatch.cli.chat.session.reply import Reply
from cbatch.cli.chat.session.session import Notice, Session, Turn
from cbatch.cli.chat.tui.markup import StyledLine, TextLayout, side_by_side
from cbatch.cli.chat.tui.markup import wrap_plain as laid_out
from cbatch.cli.common.console import safe

MIN_COLUMN = 24
"""Narrower than this, answers stand below one another."""

GAP = 3


wrap_plain = lru_cache(maxsize=512)(laid_out)
"""Long questions stand above answers that change with every token."""


@dataclass(frozen=True, slots=True)
class CachedLines:
    """Lines of an item, and what they were made of."""

    stamp: Any
    lines: list[StyledLine]


class Transcript:
    """Lays out sessions and remembers how."""

    def __init__(self) -> None:
        self._items: WeakKeyDictionary[Turn | Notice, CachedLines] = WeakKeyDictionary()
        self._answers: WeakKeyDictionary[Reply, tuple[int, TextLayout, TextLayout]] = WeakKeyDictionary()

    def chunks(self, session: Session, width: int) -> list[list[StyledLine]]:
        """Everything there is to show of a session, item by item."""
        chunks = [_message_lines(message, width) for message in session.prelude]
        unit = int(bool(session.prelude))
        before: Turn | Notice | None = None
        for item in session.items:
            if isinstance(item, Turn):
                if isinstance(before, Notice):
                    chunks.append([[]])
                if session.dropped and unit == session.dropped:
                    chunks.append([[("class:fence", "── the model is shown what is below ──"[:width])], []])
                unit += 1
            chunks.append(self._item(item, width))
            before = item
        chunks += [[*wrap_plain(text, width, "class:note", first="(next) > ", rest="  "), []] for text in session.queue]
        return chunks

    def _item(self, item: Turn | Notice, width: int) -> list[StyledLine]:
        stamp = (width, *_stamp(item))
        laid = self._items.get(item)
        if laid is None or laid.stamp != stamp:
            lines = self._turn(item, width) if isinstance(item, Turn) else _notice_lines(item, width)
            laid = self._items[item] = CachedLines(stamp, lines)
        return laid.lines

    def _turn(self, turn: Turn, width: int) -> list[StyledLine]:
        lines = [*wrap_plain(turn.text, width, "class:user", first="> ", rest="  "), []]
        if not turn.first_compared:
            return lines + (self._answer(turn.reply, width) if turn.reply else []) + [[]]
        several = list(enumerate(turn.replies))[turn.first_compared :]
        column = (width - GAP * (len(several) - 1)) // len(several)
        if column >= MIN_COLUMN:
            columns = [[[("class:heading", f"[{n}]")], *self._answer(reply, column)] for n, reply in several]
            return [*lines, *side_by_side(columns, column), []]
        for number, reply in several:
            lines += [[("class:heading", f"[{number}]")], *self._answer(reply, width), []]
        return lines

    def _answer(self, reply: Reply, width: int) -> list[StyledLine]:
        known = self._answers.get(reply)
        if known is None or known[0] != width:
            known = self._answers[reply] = width, TextLayout(width, "class:reasoning"), TextLayout(width)
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


def visible(chunks: list[list[StyledLine]], height: int, top: int | None) -> tuple[list[StyledLine], int, int]:
    """The lines that are seen, the number of the first of them, and how many there are below.

    top: the first line to be seen; None follows the end
    """
    total = sum(map(len, chunks))
    end = max(total - height, 0)
    start = end if top is None else max(0, min(top, end))
    lines: list[StyledLine] = []
    skip = start
    for chunk in chunks:
        if skip >= len(chunk):
            skip -= len(chunk)
            continue
        lines += chunk[skip : skip + height - len(lines)]
        skip = 0
        if len(lines) >= height:
            break
    return lines, start, total - start - len(lines)


def _stamp(item: Turn | Notice) -> tuple[Any, ...]:
    """What the lines of an item depend on; a text that only grows is told by its length."""
    if isinstance(item, Notice):
        return ()
    replies = (
        (id(reply), len(reply.reasoning), len(reply.text), reply.state, reply.error, reply.remark)
        for reply in item.replies
    )
    return (item.chosen, item.first_compared, *replies)


def _notice_lines(notice: Notice, width: int) -> list[StyledLine]:
    return [*wrap_plain(notice.text, width, "class:error" if notice.is_error else "class:note", first="· ", rest="  ")]


def _message_lines(message: dict[str, Any], width: int) -> list[StyledLine]:
    return [*wrap_plain(message["content"], width, "class:note", first=f"{safe(message['role'])}: ", rest="  "), []]
