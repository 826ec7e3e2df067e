"""Text as lines of a terminal, wrapped at words.

Widths are in terminal cells, of which East Asian characters and emoji take two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from prompt_toolkit.utils import get_cwidth

from cbatch.cli.common.console import safe

Fragment = tuple[str, str]
"""A style and text in that style, as prompt_toolkit takes them."""

StyledLine = list[Fragment]

COLUMN_GAP = " │ "
LONG_LINE = 2000
"""Characters of an unfinished line after which its beginning is laid out for good."""

_PIECE = re.compile(r"\s+|\S+")


def split_long_line(line: str) -> list[str]:
    """Parts of a line, of LONG_LINE characters at most. Text that follows changes only the last part."""
    parts = []
    while len(line) > LONG_LINE:
        cut = line.rfind(" ", LONG_LINE // 2, LONG_LINE) + 1 or LONG_LINE
        parts.append(line[:cut])
        line = line[cut:]
    return [*parts, line]


def wrap_plain(text: str, width: int, style: str = "", *, first: str = "") -> list[StyledLine]:
    """Wraps a text without Markdown. `first` stands before its first line; the others are indented then."""
    inner = max(width - get_cwidth(first), 1)
    parts = (part for line in text.split("\n") for part in split_long_line(line))
    lines = [line for part in parts for line in _wrapped(part, inner, style)]
    if not first:
        return lines
    return [[(style, "  " if number else first), *line] for number, line in enumerate(lines)]


@lru_cache(maxsize=4096)
def _wrapped(text: str, width: int, style: str) -> list[StyledLine]:
    """Cached, because a long text is drawn again with every token."""
    return wrap([(style, safe(text).expandtabs(4))], width)


def side_by_side(columns: list[list[StyledLine]], width: int) -> list[StyledLine]:
    """Joins columns of lines, each `width` cells wide."""
    rows = []
    for row in range(max(map(len, columns))):
        line: StyledLine = []
        for number, column in enumerate(columns):
            cell = column[row] if row < len(column) else []
            gap = [("class:fence", COLUMN_GAP)] if number else []
            line += [*gap, *cell, ("", " " * max(width - cells(cell), 0))]
        rows.append(line)
    return rows


def wrap(fragments: Iterable[Fragment], width: int) -> list[StyledLine]:
    """Breaks one line into lines that fit, between words where it can."""
    lines: list[StyledLine] = [[]]
    used = 0
    for word in _words(fragments):
        size = cells(word)
        if used + size > width and size <= width:
            if word[0][1].isspace():
                continue  # invisible at the end of a line
            lines.append([])
            used = 0
        for style, text in word:
            used = _fill(lines, used, style, text, width)
    return lines


def wrap_anywhere(fragments: Iterable[Fragment], width: int) -> list[StyledLine]:
    """Breaks one line where its cells end, and keeps all blanks."""
    lines: list[StyledLine] = [[]]
    used = 0
    for style, text in fragments:
        used = _fill(lines, used, style, text, width)
    return lines


def _fill(lines: list[StyledLine], used: int, style: str, text: str, width: int) -> int:
    """Adds text to the last line, and where it does not fit, at any character, to new ones.

    used: cells of the last line that are taken

    Returns how many are taken then.
    """
    for part in [text] if used + get_cwidth(text) <= width else text:
        size = get_cwidth(part)
        if used + size > width and used > 0:
            lines.append([])
            used = 0
        append_text(lines[-1], style, part)
        used += size
    return used


def cells(line: StyledLine) -> int:
    """Width of a line."""
    return sum(get_cwidth(text) for _, text in line)


def append_text(line: StyledLine, style: str, text: str) -> None:
    """Joins text of the same style, because a line with fewer fragments is drawn faster."""
    if line and line[-1][0] == style:
        line[-1] = style, line[-1][1] + text
    else:
        line.append((style, text))


def _words(fragments: Iterable[Fragment]) -> Iterator[StyledLine]:
    """Words, which may have several styles, and the blanks between them."""
    word: StyledLine = []
    for style, text in fragments:
        for piece in _PIECE.findall(text):
            if word and piece.isspace() != word[0][1].isspace():
                yield word
                word = []
            word.append((style, piece))
    if word:
        yield word
