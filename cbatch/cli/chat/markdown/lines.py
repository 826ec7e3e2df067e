"""Text as lines of a terminal, wrapped at words.

Widths are in terminal cells, of which East Asian characters and emoji take two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby, zip_longest

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
        cut = max(line.rfind(" ", LONG_LINE // 2, LONG_LINE), 0) or LONG_LINE
        parts.append(line[:cut])
        line = line[cut:]
    return [*parts, line]


def wrap_plain(text: str, width: int, style: str = "", *, first: str = "") -> list[StyledLine]:
    """Wraps a text without Markdown. `first` stands before its first line; the others are indented then."""
    inner = max(width - get_cwidth(first), 1)
    lines: list[StyledLine] = []
    for line in text.split("\n"):
        rest: StyledLine = []
        for part in split_long_line(line):
            *whole, rest = wrap_line("".join(text for _, text in rest) + part, inner, style)
            lines += whole
        lines.append(rest)
    if not first:
        return lines
    return [[(style, "  " if number else first), *line] for number, line in enumerate(lines)]


@lru_cache(maxsize=4096)
def wrap_line(text: str, width: int, style: str, *, at_words: bool = True) -> list[StyledLine]:
    """Wraps one line in one style. Cached, because a long text is drawn again with every token: do not change them."""
    return wrap([(style, safe(text).expandtabs(4))], width, at_words=at_words)


def side_by_side(columns: list[list[StyledLine]], width: int) -> list[StyledLine]:
    """Joins columns of lines, each `width` cells wide."""
    rows = []
    for row in zip_longest(*columns, fillvalue=list[Fragment]()):
        line: StyledLine = []
        for number, cell in enumerate(row):
            line += [("class:fence", COLUMN_GAP)] if number else []
            line += [*cell, ("", " " * max(width - cells(cell), 0))]
        rows.append(line)
    return rows


def wrap(fragments: Iterable[Fragment], width: int, *, at_words: bool = True) -> list[StyledLine]:
    """Breaks one line into lines that fit, between words or where its cells end; the latter keeps all blanks."""
    lines: list[StyledLine] = [[]]
    used = 0
    for word in _words(fragments) if at_words else [list(fragments)]:
        if at_words and used + (size := cells(word)) > width and size <= width:
            if word[0][1].isspace():
                continue  # invisible at the end of a line
            lines.append([])
            used = 0
        for style, text in word:
            for part in [text] if used + get_cwidth(text) <= width else text:
                size = get_cwidth(part)
                if used + size > width and used > 0:
                    lines.append([])
                    used = 0
                append_text(lines[-1], style, part)
                used += size
    return lines


def cells(line: StyledLine) -> int:
    return sum(get_cwidth(text) for _, text in line)


def append_text(line: StyledLine, style: str, text: str) -> None:
    """Joins text of the same style, because a line with fewer fragments is drawn faster."""
    if line and line[-1][0] == style:
        line[-1] = style, line[-1][1] + text
    else:
        line.append((style, text))


def _words(fragments: Iterable[Fragment]) -> Iterator[StyledLine]:
    """Words, which may have several styles, and the blanks between them."""
    pieces = ((style, piece) for style, text in fragments for piece in _PIECE.findall(text))
    return (list(word) for _, word in groupby(pieces, key=lambda piece: piece[1].isspace()))
