"""Text as lines of a terminal: wrapped at words, and with some Markdown made visible.

Widths are in terminal cells, of which East Asian characters and emoji take two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from prompt_toolkit.utils import get_cwidth

from cbatch.cli.common.console import safe

Fragment = tuple[str, str]
"""A style and text in that style, as prompt_toolkit takes them."""

StyledLine = list[Fragment]

COLUMN_GAP = " │ "
LONG_LINE = 2000
"""Characters of an unfinished line after which its beginning is laid out for good."""

_INLINE = re.compile(r"`([^`]+)`|(?<![\w*])\*\*(?=\S)([^*]+?)(?<=\S)\*\*(?![\w*])")
_LIST = re.compile(r"(\s*)((?:[-*+]|\d{1,3}[.)]) +)")
_HEADING = re.compile(r"#{1,6} +")
_RULE = re.compile(r" {0,3}(?:-{3,}|\*{3,}|_{3,})\s*")
_FENCE = re.compile(r"\s*(?:```|~~~)")
_PIECE = re.compile(r"\s+|\S+")


class TextLayout:
    """Lays out a text that only grows. Finished lines are laid out once."""

    def __init__(self, width: int, style: str = "") -> None:
        """With a `style`, all of the text has it and Markdown means nothing."""
        self._width = max(width, 1)
        self._style = style
        self._done: list[StyledLine] = []
        self._num_done = 0
        self._in_code = False

    def lines(self, text: str) -> list[StyledLine]:
        """All lines of the text so far, which must begin with the text of the last call."""
        end = text.rfind("\n") + 1
        if end > self._num_done:
            for line in text[self._num_done : end - 1].split("\n"):
                self._done += self._wrap(line)
                self._in_code ^= _FENCE.match(line) is not None
            self._num_done = end
        while len(text) - self._num_done > LONG_LINE:
            cut = text.rfind(" ", self._num_done + 1, self._num_done + LONG_LINE) + 1 or self._num_done + LONG_LINE
            self._done += self._wrap(text[self._num_done : cut])
            self._num_done = cut
        rest = text[self._num_done :]
        return self._done + self._wrap(rest) if rest else self._done

    def _wrap(self, line: str) -> list[StyledLine]:
        line = safe(line).expandtabs(4)
        if self._style:
            return wrap([(self._style, line)], self._width)
        if _FENCE.match(line):
            return wrap([("class:fence", line)], self._width)
        if self._in_code:
            return wrap([("class:code", line)], self._width, by_word=False)
        if match := _HEADING.match(line):
            return wrap([("class:heading", line[match.end() :])], self._width)
        if _RULE.fullmatch(line):
            return [[("class:fence", "─" * min(self._width, 40))]]
        if line.startswith(">"):
            return wrap([("class:quote", line)], self._width, hanging_indent=2)
        match = _LIST.match(line)
        return wrap(list(_inline(line)), self._width, hanging_indent=len(match[0]) if match else 0)


def wrap_plain(text: str, width: int, style: str = "", *, first: str = "") -> list[StyledLine]:
    """Wraps a text without Markdown. `first` stands before its first line; the others are indented then."""
    inner = max(width - get_cwidth(first), 1)
    lines = [line for part in safe(text).expandtabs(4).split("\n") for line in wrap([(style, part)], inner)]
    indent = "  " if first else ""
    return [[(style, indent if number else first), *line] for number, line in enumerate(lines)]


def side_by_side(columns: list[list[StyledLine]], width: int) -> list[StyledLine]:
    """Joins columns of lines, each `width` cells wide."""
    rows = []
    for row in range(max(map(len, columns))):
        line: StyledLine = []
        for number, column in enumerate(columns):
            cell = column[row] if row < len(column) else []
            used = sum(get_cwidth(text) for _, text in cell)
            line += [*([("class:fence", COLUMN_GAP)] if number else []), *cell, ("", " " * max(width - used, 0))]
        rows.append(line)
    return rows


def wrap(
    fragments: Iterable[Fragment], width: int, *, hanging_indent: int = 0, by_word: bool = True
) -> list[StyledLine]:
    """Breaks one line into lines that fit; all but the first are indented by `hanging_indent`."""
    hanging_indent = hanging_indent if hanging_indent <= width // 2 else 0
    indent: StyledLine = [("", " " * hanging_indent)] if hanging_indent else []
    lines: list[StyledLine] = [[]]
    used = 0
    for style, piece in _pieces(fragments, by_word):
        size = get_cwidth(piece)
        if used + size > width and (used > hanging_indent or len(lines) == 1) and size <= width - hanging_indent:
            if piece.isspace() and by_word:
                continue  # invisible at the end of a line
            lines.append([*indent])
            used = hanging_indent
        for part in [piece] if used + size <= width else piece:  # one that is longer than a line breaks anywhere
            size = get_cwidth(part)
            if used + size > width and used > 0:
                lines.append([*indent])
                used = hanging_indent
            _append(lines[-1], style, part)
            used += size
    return lines


def _append(line: StyledLine, style: str, text: str) -> None:
    """Joins text of the same style, because a line with fewer fragments is drawn faster."""
    if line and line[-1][0] == style:
        line[-1] = style, line[-1][1] + text
    else:
        line.append((style, text))


def _pieces(fragments: Iterable[Fragment], by_word: bool) -> Iterator[Fragment]:
    for style, text in fragments:
        if by_word:
            yield from ((style, piece) for piece in _PIECE.findall(text))
        elif text:
            yield style, text


def _inline(line: str) -> Iterator[Fragment]:
    start = 0
    for match in _INLINE.finditer(line):
        yield "", line[start : match.start()]
        yield ("class:code", match[1]) if match[1] is not None else ("class:strong", match[2])
        start = match.end()
    yield "", line[start:]
