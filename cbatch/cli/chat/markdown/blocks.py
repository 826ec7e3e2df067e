"""Blocks of Markdown as lines: headings, paragraphs, lists, quotes, tables, code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from markdown_it.token import Token
from prompt_toolkit.utils import get_cwidth

from cbatch.cli.chat.markdown.code import code_lines, plain_code
from cbatch.cli.chat.markdown.inline import inline_lines
from cbatch.cli.chat.markdown.markup import StyledLine, wrap
from cbatch.cli.chat.markdown.parser import PARSER
from cbatch.cli.chat.markdown.tables import Table

MAX_RULE = 40
"""Cells that a rule takes at most."""

_TASK = re.compile(r"\[([ xX])\](?: +|$)")


class Row(NamedTuple):
    """A line, and whether it is code, which no list indents, so that it can be copied from the screen."""

    line: StyledLine
    is_code: bool = False

    def indented(self, columns: int) -> Row:
        """The row after a margin, which code and blank lines do not have."""
        return self if self.is_code or not self.line or not columns else Row([("", " " * columns), *self.line])


def block_lines(source: str, width: int, code_width: int, margin: int) -> list[StyledLine]:
    """Lines of a text that is parsed whole. All but those of code are indented by a margin.

    code_width: where lines of code are broken
    """
    tokens: list[Token] = []
    PARSER.block.parse(source, PARSER, {}, tokens)
    margin = margin if margin <= width // 2 else 0
    rows = _Renderer(source.split("\n")).rows(tokens, width - margin, code_width)
    return [row.indented(margin).line for row in rows]


def text_lines(text: str, style: str, width: int) -> list[StyledLine]:
    """Lines of text with emphasis, code and links."""
    return [part for line in inline_lines(text, style) for part in wrap(line, width)]


class _Renderer:
    """Renders tokens. Blank lines stand where the source has them, for which it is needed."""

    def __init__(self, source: list[str]) -> None:
        self._source = source

    def rows(self, tokens: list[Token], width: int, code_width: int) -> list[Row]:
        """Rows of blocks that follow one another."""
        rows: list[Row] = []
        for group in _groups(tokens):
            start = group[0].map[0] if group[0].map else 0
            if rows and start > 0 and not self._source[start - 1].strip(" >"):
                rows.append(Row([]))
            rows += self._block(group, width, code_width)
        return rows

    def _block(self, group: list[Token], width: int, code_width: int) -> list[Row]:
        token, inner = group[0], group[1:-1]
        match token.type:
            case "paragraph_open":
                return _as_rows(text_lines(inner[0].content, "", width))
            case "heading_open":
                # One that is still empty is shown as it is written.
                return _as_rows(text_lines(inner[0].content or token.markup, "class:heading", width))
            case "hr":
                return [Row([("class:fence", "─" * min(width, MAX_RULE))])]
            case "fence":
                return [Row(line, is_code=True) for line in _fenced(token, code_width)]
            case "code_block":
                return [Row(line, is_code=True) for line in code_lines(token.content.rstrip("\n"), "", code_width)]
            case "blockquote_open":
                return self._quote(inner, width, code_width)
            case "table_open":
                return _as_rows(_table(inner).lines(width))
            case "list_item_open":
                return self._item(token, inner, width, code_width)
        return self.rows(inner, width, code_width)

    def _quote(self, inner: list[Token], width: int, code_width: int) -> list[Row]:
        if width < 4:
            return self.rows(inner, width, code_width)
        rows = self.rows(inner, width - 2, code_width - 2) or [Row([])]
        return [Row(_quoted(row.line), row.is_code) for row in rows]

    def _item(self, token: Token, inner: list[Token], width: int, code_width: int) -> list[Row]:
        marker = token.info + token.markup
        if len(inner) > 1 and inner[1].type == "inline" and (task := _TASK.match(inner[1].content)):
            box = "☐" if task[1] == " " else "☑"
            marker = f"{marker} {box}" if token.info else box
            inner[1].content = inner[1].content[task.end() :]
        marker += " "
        size = get_cwidth(marker)
        if size > width // 2:
            return [*_as_rows(wrap([("class:marker", marker)], width)), *self.rows(inner, width, code_width)]
        rows = self.rows(inner, width - size, code_width)
        if not rows or rows[0].is_code:
            rows.insert(0, Row([]))
        return [Row([("class:marker", marker), *rows[0].line]), *(row.indented(size) for row in rows[1:])]


def _groups(tokens: list[Token]) -> Iterator[list[Token]]:
    """Tokens of each block, from what opens it to what closes it."""
    start = 0
    for number, token in enumerate(tokens):
        if token.level == tokens[0].level and token.nesting <= 0:
            yield tokens[start : number + 1]
            start = number + 1


def _quoted(line: StyledLine) -> StyledLine:
    if line and line[0][0] == "class:quote":
        return [("class:quote", f"│ {line[0][1]}"), *line[1:]]
    return [("class:quote", "│ "), *line]


def _as_rows(lines: list[StyledLine]) -> list[Row]:
    return [Row(line) for line in lines]


def _fenced(token: Token, width: int) -> list[StyledLine]:
    """A code block with its fences. The last line may be incomplete if nothing closes the block."""
    lines = wrap([("class:fence", token.meta["opening"])], width)
    complete, newline, unfinished = token.content.rpartition("\n")
    if newline:
        lines = lines + code_lines(complete, token.info, width)
    if unfinished:
        lines = lines + plain_code(unfinished, width)
    return lines + (wrap([("class:fence", token.meta["closing"])], width) if token.meta["closing"] else [])


def _table(tokens: list[Token]) -> Table:
    rows: list[list[str]] = []
    alignments: list[str] = []
    for token in tokens:
        if token.type == "tr_open":
            rows.append([])
        elif token.type == "inline":
            rows[-1].append(token.content)
        elif token.type == "th_open":
            alignments.append(str(token.attrs.get("style", "")).removeprefix("text-align:"))
    return Table(rows, alignments)
