"""Divides Markdown into pieces that can be laid out one by one, while it streams.

A piece is a paragraph, a heading, an item of a list with all that is inside it, a quote, a table, a formula. The state
after a line depends only on the lines up to it, so text that comes in pieces is divided as the whole is. Where a piece
ends follows CommonMark; what is inside is the parser's concern.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from cbatch.cli.chat.markdown.fences import Fence
from cbatch.cli.chat.markdown.markup import LONG_LINE

Kind = Literal["paragraph", "rest", "line", "item", "quote", "table", "code", "formula", "fence"]
"""rest: the second part of a line that is too long; line: a heading or a rule; code: indented, without a fence"""

LONG_ITEM = 2 * LONG_LINE
"""Characters of an item of a list, or a quote, after which it is laid out in parts."""

LONG_TABLE = 4 * LONG_LINE
"""Characters of a table after which the next row begins another table with the same header."""

_HEADING = re.compile(r" {0,3}#{1,6}(?: |$)")
_RULE = re.compile(r" {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$")
_QUOTE = re.compile(r" {0,3}>")
_QUOTED_FENCE = re.compile(r"^ {0,3}> {0,4}(?:```|~~~)", re.MULTILINE)
_ITEM = re.compile(r"( *)([-*+]|(\d{1,9})[.)])( +|$)")
_FORMULA = re.compile(r" {0,3}(?:\\\[(?!.*\\\])|\$\$(?!.*\$\$))")
_FORMULA_END = re.compile(r".*(?:\\\]|\$\$)")
_UNDERLINE = re.compile(r" {0,3}(?:=+|-+) *$")
_DELIMITERS = re.compile(r" {0,3}\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$")


@dataclass(frozen=True)
class Block:
    """A piece of Markdown. `margin` columns are removed from its lines, and stand before what it is shown as."""

    kind: Kind
    text: str
    margin: int
    follows_blank: bool
    content_indent: int = 0
    """Columns, after the margin, by which lines inside an item are indented at least."""
    header: str = ""
    """The first two lines of a table."""

    def ends_blank(self) -> bool:
        return self.text.endswith("\n")


@dataclass(frozen=True)
class State:
    """What is known after a line.

    margin: indentation of lines that are inside an item of which an earlier part is finished
    """

    block: Block | None = None
    margin: int = 0
    follows_blank: bool = False

    def add(self, line: str) -> tuple[list[Block], State]:
        """Returns the blocks that are finished with a line, and the state after it."""
        if not line.strip():
            return self._add_blank()
        if self.block is None:
            return self._start(line)
        block, indent = self.block, indentation(line)
        own = line[min(indent, block.margin) :]
        joined = replace(block, text=f"{block.text}\n{own}")
        if block.kind == "paragraph" and _UNDERLINE.match(own):
            return [joined], State(margin=self.margin)
        if block.kind == "formula" and not _FORMULA_END.match(own):
            return [], replace(self, block=joined)
        if block.kind == "formula":
            return [joined], State(margin=self.margin)
        last = block.text.rsplit("\n", 1)[-1]
        if block.kind == "paragraph" and "|" in last and _DELIMITERS.match(own):
            return [], replace(self, block=replace(joined, kind="table", header=f"{last}\n{own}"))
        if indent >= self.margin and _continues(block, own):
            if block.kind == "table" and len(block.text) >= LONG_TABLE:
                return [block], replace(self, block=replace(block, text=f"{block.header}\n{own}", follows_blank=False))
            return [], replace(self, block=joined)
        is_inside = block.kind == "item" and indent >= block.margin + block.content_indent
        margin = block.margin + block.content_indent if is_inside else self.margin
        closed, state = State(None, margin, block.ends_blank()).add(line)
        return [block, *closed], state

    def add_rest(self, text: str) -> tuple[list[Block], State]:
        """Takes in more of the last line, which was too long."""
        return [self.block] if self.block else [], State(Block("rest", text, 0, False), self.margin)

    def _add_blank(self) -> tuple[list[Block], State]:
        if self.block is None:
            return [], replace(self, follows_blank=True)
        if self.block.kind in ("item", "code"):
            return [], replace(self, block=replace(self.block, text=self.block.text + "\n"))
        return [self.block], State(None, self.margin, True)

    def _start(self, line: str) -> tuple[list[Block], State]:
        indent = indentation(line)
        margin = self.margin if indent >= self.margin else 0
        own = line[margin:]
        # Inside an item, what is indented by more is text of another item in it, not code.
        own_indent = indentation(own) if margin or (indent < 4 and _ITEM.match(own)) else 0
        text = own[own_indent:]
        block = Block("paragraph", text, margin + own_indent, self.follows_blank)
        if Fence.opened_by(text) and (margin or indent < 4):
            block = replace(block, kind="fence")
        elif _HEADING.match(text) or _RULE.match(text):
            return [replace(block, kind="line")], State(None, margin)
        elif _QUOTE.match(text):
            block = replace(block, kind="quote")
        elif item := _ITEM.match(text):
            blanks = len(item[4]) if item[4] and len(item[4]) <= 4 else 1
            block = replace(block, kind="item", content_indent=len(item[2]) + blanks)
        elif _FORMULA.match(text):
            block = replace(block, kind="formula")
        elif not margin and indent >= 4:
            block = replace(block, kind="code")
        return [], State(block, margin)


def _continues(block: Block, line: str) -> bool:
    """Whether a line that is not blank belongs to a block."""
    indent = indentation(line)
    if block.kind == "code":
        return indent >= 4
    if block.kind == "item":
        if indent >= block.content_indent:
            is_part = len(block.text) >= LONG_ITEM and (block.ends_blank() or _ITEM.match(line) is not None)
            return not is_part and Fence.opened_by(line) is None
        return not block.ends_blank() and not _interrupts(line, is_paragraph=False)
    if block.kind == "quote":
        if _QUOTE.match(line) is None:
            return not _interrupts(line, is_paragraph=False)
        return len(block.text) < LONG_ITEM or len(_QUOTED_FENCE.findall(block.text)) % 2 == 1
    if block.kind == "table":
        return not _interrupts(line, is_paragraph=False)
    return block.kind == "paragraph" and len(block.text) < LONG_LINE and not _interrupts(line, is_paragraph=True)


def _interrupts(line: str, *, is_paragraph: bool) -> bool:
    """Whether a line ends the paragraph, or other block, before it."""
    indent = indentation(line)
    if indent >= 4:
        return False
    if Fence.opened_by(line) or any(kind.match(line) for kind in (_HEADING, _RULE, _QUOTE, _FORMULA)):
        return True
    item = _ITEM.match(line)
    if item is None or not is_paragraph:
        return item is not None
    return item.end() < len(line) and item[3] in (None, "1")


def indentation(line: str) -> int:
    """Columns of blanks before a line."""
    return len(line) - len(line.lstrip(" "))
