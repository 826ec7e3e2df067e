"""A session as lines of a terminal. What has not changed is laid out once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from cbatch.cli.chat.session.session import Answer, Note, Session, Turn
from cbatch.cli.chat.tui.markup import Layout, Line, beside
from cbatch.cli.chat.tui.markup import plain as laid_out
from cbatch.cli.common.console import safe

MIN_COLUMN = 24
"""Narrower than this, answers stand below one another."""

GAP = 3


plain = lru_cache(maxsize=512)(laid_out)
"""Long questions stand above answers that change with every token."""


@dataclass(frozen=True, slots=True)
class Laid:
    """Lines of an item, and what they were made of."""

    stamp: Any
    lines: list[Line]


class Transcript:
    """Lays out sessions and remembers how."""

    def __init__(self) -> None:
        self._items: WeakKeyDictionary[Turn | Note, Laid] = WeakKeyDictionary()
        self._answers: WeakKeyDictionary[Answer, tuple[int, Layout, Layout]] = WeakKeyDictionary()

    def chunks(self, session: Session, width: int) -> list[list[Line]]:
        """Everything there is to show of a session, item by item."""
        chunks = [_message_lines(message, width) for message in session.prelude]
        unit = int(bool(session.prelude))
        before: Turn | Note | None = None
        for item in session.items:
            if isinstance(item, Turn):
                if isinstance(before, Note):
                    chunks.append([[]])
                if session.dropped and unit == session.dropped:
                    chunks.append([[("class:fence", "── the model is shown what is below ──"[:width])], []])
                unit += 1
            chunks.append(self._item(item, width))
            before = item
        chunks += [[*plain(text, width, "class:note", first="(next) > ", rest="  "), []] for text in session.queue]
        return chunks

    def _item(self, item: Turn | Note, width: int) -> list[Line]:
        stamp = (width, *_stamp(item))
        laid = self._items.get(item)
        if laid is None or laid.stamp != stamp:
            lines = self._turn(item, width) if isinstance(item, Turn) else _note_lines(item, width)
            laid = self._items[item] = Laid(stamp, lines)
        return laid.lines

    def _turn(self, turn: Turn, width: int) -> list[Line]:
        lines = [*plain(turn.text, width, "class:user", first="> ", rest="  "), []]
        if not turn.compares:
            return lines + (self._answer(turn.answer, width) if turn.answer else []) + [[]]
        several = list(enumerate(turn.answers))[turn.compares :]
        column = (width - GAP * (len(several) - 1)) // len(several)
        if column >= MIN_COLUMN:
            columns = [[[("class:heading", f"[{n}]")], *self._answer(answer, column)] for n, answer in several]
            return [*lines, *beside(columns, column), []]
        for number, answer in several:
            lines += [[("class:heading", f"[{number}]")], *self._answer(answer, width), []]
        return lines

    def _answer(self, answer: Answer, width: int) -> list[Line]:
        known = self._answers.get(answer)
        if known is None or known[0] != width:
            known = self._answers[answer] = width, Layout(width, "class:reasoning"), Layout(width)
        lines = list(known[1].lines(answer.reasoning))
        if lines and answer.text:
            lines.append([])
        lines += known[2].lines(answer.text)
        if answer.state == "asked":
            lines.append([("class:note", "…")])
        if answer.error:
            lines += plain(answer.error, width, "class:error")
        if answer.remark:
            lines += plain(f"({answer.remark})", width, "class:note")
        return lines


def visible(chunks: list[list[Line]], height: int, top: int | None) -> tuple[list[Line], int, int]:
    """The lines that are seen, the number of the first of them, and how many there are below.

    top: the first line to be seen; None follows the end
    """
    total = sum(map(len, chunks))
    end = max(total - height, 0)
    start = end if top is None else max(0, min(top, end))
    lines: list[Line] = []
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


def _stamp(item: Turn | Note) -> tuple[Any, ...]:
    """What the lines of an item depend on; a text that only grows is told by its length."""
    if isinstance(item, Note):
        return ()
    answers = (
        (id(answer), len(answer.reasoning), len(answer.text), answer.state, answer.error, answer.remark)
        for answer in item.answers
    )
    return (item.chosen, item.compares, *answers)


def _note_lines(note: Note, width: int) -> list[Line]:
    return [*plain(note.text, width, "class:error" if note.is_error else "class:note", first="· ", rest="  ")]


def _message_lines(message: dict[str, Any], width: int) -> list[Line]:
    return [*plain(message["content"], width, "class:note", first=f"{safe(message['role'])}: ", rest="  "), []]
