"""Markdown as lines of a terminal, while it streams: headings, paragraphs, lists, quotes, tables, code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import takewhile, zip_longest
from typing import NamedTuple

from markdown_it.token import Token
from prompt_toolkit.styles.pygments import pygments_token_to_classname
from prompt_toolkit.utils import get_cwidth
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

from cbatch.cli.chat.markdown.lines import (
    LONG_LINE,
    Fragment,
    StyledLine,
    append_text,
    cells,
    split_long_line,
    wrap,
    wrap_line,
)
from cbatch.cli.chat.markdown.parser import PARSER
from cbatch.cli.common.console import safe

SMALL = 2000
"""Characters of unfinished blocks up to which they are parsed again with every token."""

GROWTH = 8
"""Longer ones are parsed again when they have grown by this part of their length, so that all takes linear time."""

CODE_CHUNK = 2000
"""Characters of code after which the next paragraph of it is coloured by itself: some lexers take quadratic time."""

MAX_RULE = 40
"""Cells that a rule takes at most."""

MIN_COLUMN = 4
"""If columns of a table would be narrower than this, cells stand below one another."""

_ONLY_MARKERS = re.compile(r" {0,3}(?:=|-){1,2} *")
_TASK = re.compile(r"\[([ xX])\](?: +|$)")
_TEXT_STYLES = {"strong": "class:strong", "em": "class:emphasis", "s": "class:strike"}


class MarkdownLayout:
    """Lays out a text that only grows.

    A block is finished when a whole line begins another one: nothing that follows can change it, and it is laid out
    once. What comes after it is laid out anew while it grows.
    """

    def __init__(self, width: int, *, code_width: int | None = None) -> None:
        """`code_width`: where lines of code are broken, if not at `width`"""
        self._width = max(width, 1)
        self._code_width = code_width or self._width
        self._done: list[StyledLine] = []
        self._before: str | None = None  # the line before the unfinished blocks, if there are finished ones
        self._num_taken = 0
        self._rest = ""  # the text after the finished blocks
        self._open: list[StyledLine] = []  # the lines of its beginning
        self._num_open = 0  # and the characters of that
        self._is_code = False  # whether that ends in an open code block

    def lines(self, text: str, *, is_whole: bool = True) -> list[StyledLine]:
        """All lines of the text so far, which must begin with the text of the last call.

        is_whole: whether no more will come; until then the end of a long block may be shown as it is written
        """
        self._rest += safe(text[self._num_taken :])
        self._num_taken = len(text)
        size = len(self._rest)
        if is_whole or size <= SMALL or size - self._num_open >= size // GROWTH:
            self._parse(is_whole)
        return self._done + self._with_unparsed(self._rest[self._num_open :])

    def _parse(self, is_whole: bool) -> None:
        """Lays out what is not finished, and keeps what is."""
        source = self._rest.expandtabs(4).split("\n")
        unfinished = source.pop() if not is_whole and _ONLY_MARKERS.fullmatch(source[-1]) else ""
        tokens: list[Token] = []
        PARSER.block.parse("\n".join(source), PARSER, {}, tokens)
        blocks: list[list[Token]] = []
        for block in _groups(tokens):  # items of a list are finished one by one
            blocks += _groups(block[1:-1]) if block[0].type.endswith("_list_open") else [block]
        starts = [_start(block) for block in blocks]
        begun = [_start(block) + (block[0].type == "table_open") for block in blocks]  # by the line below its header
        num_done = sum(line < len(source) - 1 for line in begun[1:])
        self._done += self._lines(source, blocks[:num_done])
        if num_done:
            cut = starts[num_done]
            self._before = source[cut - 1] if self._done else None
        self._open = self._lines(source, blocks[num_done:])
        if num_done:
            self._rest = self._rest.split("\n", cut)[cut]
        self._num_open = len(self._rest) - len(unfinished)
        self._is_code = bool(tokens) and tokens[-1].type == "fence" and not tokens[-1].meta["closing"]

    def _lines(self, source: list[str], blocks: list[list[Token]]) -> list[StyledLine]:
        return [row.line for row in _rows(source, blocks, self._width, self._code_width, self._before)]

    def _with_unparsed(self, text: str) -> list[StyledLine]:
        """The lines of the unfinished blocks, with text after them that was not parsed with them."""
        if not text:
            return self._open
        style, at_words = "class:code" if self._is_code else "", not self._is_code
        *before, last = self._open or [[]]
        if self._rest[self._num_open - 1 : self._num_open] == "\n":
            before, last = self._open, []
        first, *others = text.expandtabs(4).split("\n")
        lines = before + wrap([*last, (style, first)], self._width, at_words=at_words)
        return lines + [part for line in others for part in wrap_line(line, self._width, style, at_words=at_words)]


class Row(NamedTuple):
    """A line, and whether it is code, which no list indents, so that it can be copied from the screen."""

    line: StyledLine
    is_code: bool = False

    def indented(self, columns: int) -> Row:
        """The row after a margin, which code and blank lines do not have."""
        return self if self.is_code or not self.line or not columns else Row([("", " " * columns), *self.line])


def _rows(
    source: list[str], blocks: Iterable[list[Token]], width: int, code_width: int, before: str | None = None
) -> list[Row]:
    """Rows of blocks, with blank lines where the source has them. `before`: the line before it, if others are there"""
    rows: list[Row] = []
    for block in blocks:
        start = _start(block)
        last = source[start - 1] if start > 0 else before
        if (rows or before is not None) and last is not None and not last.strip(" >"):
            rows.append(Row([]))
        rows += _block(source, block, width, code_width)
    return rows


def _block(source: list[str], group: list[Token], width: int, code_width: int) -> list[Row]:
    token, inner = group[0], group[1:-1]
    match token.type:
        case "paragraph_open" | "heading_open":
            text = inner[0].content
            if token.type == "heading_open":  # one that is still empty is shown as it is written
                return _text_rows(text or token.markup, "class:heading", width)
            return _text_rows(text, "", width)
        case "hr":
            return [Row([("class:fence", "─" * min(width, MAX_RULE))])]
        case "formula":
            return [Row(part) for line in token.content.split("\n") for part in wrap([("", line)], width)]
        case "fence" | "code_block":
            return [Row(line, is_code=True) for line in _code_block(token, code_width)]
        case "blockquote_open" if width >= 4:
            rows = _rows(source, _groups(inner), width - 2, code_width - 2) or [Row([])]
            return [Row(_quoted(row.line), row.is_code) for row in rows]
        case "table_open":
            return [Row(line) for line in _table(inner, width)]
        case "list_item_open":
            return _item(source, token, inner, width, code_width)
    return _rows(source, _groups(inner), width, code_width)


def _item(source: list[str], token: Token, inner: list[Token], width: int, code_width: int) -> list[Row]:
    marker = token.info + token.markup
    if len(inner) > 1 and inner[1].type == "inline" and (task := _TASK.match(inner[1].content)):
        box = "☐" if task[1] == " " else "☑"
        marker = f"{marker} {box}" if token.info else box
        inner[1].content = inner[1].content[task.end() :]
    # Models indent an item by two columns below one with a number, which is too little to be inside it.
    line = source[_start([token])] if token.level == 1 else ""
    margin = len(line) - len(line.lstrip(" "))
    marker += " "
    size = margin + get_cwidth(marker)
    if size > width // 2:
        alone = [Row(line) for line in wrap([("class:marker", marker)], width)]
        return alone + _rows(source, _groups(inner), width, code_width)
    rows = _rows(source, _groups(inner), width - size, code_width)
    if not rows or rows[0].is_code:
        rows.insert(0, Row([]))
    first = Row([("class:marker", marker), *rows[0].line]).indented(margin)
    return [first, *(row.indented(size) for row in rows[1:])]


def _groups(tokens: list[Token]) -> Iterator[list[Token]]:
    """Tokens of each block, from what opens it to what closes it."""
    start = 0
    for number, token in enumerate(tokens):
        if token.level == tokens[0].level and token.nesting <= 0:
            yield tokens[start : number + 1]
            start = number + 1


def _start(group: list[Token]) -> int:
    """The line in which a block begins."""
    return group[0].map[0] if group[0].map else 0


def _quoted(line: StyledLine) -> StyledLine:
    if line and line[0][0] == "class:quote":
        return [("class:quote", f"│ {line[0][1]}"), *line[1:]]
    return [("class:quote", "│ "), *line]


def _text_rows(text: str, style: str, width: int) -> list[Row]:
    return [Row(part) for line in inline_lines(text, style) for part in wrap(line, width)]


def inline_lines(text: str, style: str = "") -> list[StyledLine]:
    """Lines of text with emphasis, code and links as they are in the source, not wrapped."""
    lines: list[StyledLine] = []
    for line in text.split("\n") if len(text) > LONG_LINE else [text]:
        first, *others = (_parsed_lines(part, style) for part in split_long_line(line))
        lines += first
        for other in others:
            lines[-1:] = [[*lines[-1], *other[0]], *other[1:]]
    return lines


@lru_cache(maxsize=256)
def _parsed_lines(text: str, style: str) -> list[StyledLine]:
    """Lines of at most LONG_LINE characters: some texts take quadratic time. Do not change them: they are cached."""
    lines: list[StyledLine] = [[]]
    styles = [style] if style else []  # of all that the text is inside of
    url = ""

    def write(text: str, style: str = "") -> None:
        # Entities such as `&#9;` bring in what was removed from the source.
        text = safe(text).replace("\n", " ").replace("\t", " ")
        if text:
            append_text(lines[-1], " ".join(filter(None, [*styles, style])), text)

    def write_url(url: str) -> None:
        if url:
            for part, style in ((" (", ""), (url, "class:link"), (")", "")):
                write(part, style)

    tokens = PARSER.inline.parse(text, PARSER, {}, [])
    for place, token in enumerate(tokens):
        match token.type:
            case "strong_open" | "em_open" | "s_open":
                styles.append(_TEXT_STYLES[token.tag])
            case "strong_close" | "em_close" | "s_close":
                styles.remove(_TEXT_STYLES[token.tag])
            case "link_open":  # one whose text is its URL shows it once
                inside = takewhile(lambda token: token.type != "link_close", tokens[place + 1 :])
                name, url = "".join(each.content for each in inside), str(token.attrs["href"])
                url = "" if url in (name, f"mailto:{name}") else url
                styles.append("" if url else "class:link")
            case "link_close":
                styles.remove("" if url else "class:link")
                write_url(url)
            case "code_inline":
                write(token.content, "class:code")
            case "image":
                write(f"[image: {''.join(child.content for child in token.children or [])}]")
                write_url(str(token.attrs["src"]))
            case "softbreak" | "hardbreak":
                lines.append([])
            case _:
                for number, line in enumerate(token.content.split("\n")):
                    lines += [[]] if number else []
                    write(line)
    return lines


def _table(tokens: list[Token], width: int) -> list[StyledLine]:
    """A table drawn with box characters. Cells are Markdown; the first row is the header."""
    rows: list[list[list[StyledLine]]] = []
    alignments: list[str] = []
    for token in tokens:
        if token.type == "tr_open":
            rows.append([])
        elif token.type == "inline":
            rows[-1].append(inline_lines(token.content, "" if len(rows) > 1 else "class:heading"))
        elif token.type == "th_open":
            alignments.append(str(token.attrs.get("style", "")).removeprefix("text-align:"))
    count = len(alignments)
    available = width - 3 * (count - 1)
    lines: list[StyledLine] = []
    if available < MIN_COLUMN * count:
        header, *body = rows
        for row in body or [[[[]] for _ in header]]:
            lines += [[]] if lines else []
            for name, (first, *others) in zip(header, row, strict=True):
                cell = [[*name[0], ("", ": "), *first], *others]
                lines += [part for line in cell for part in wrap(line, width)]
        return lines
    widths = _shrink([max(1, *(cells(line) for row in rows for line in row[n])) for n in range(count)], available)
    for number, row in enumerate(rows):
        columns = [[part for line in cell for part in wrap(line, size)] for cell, size in zip(row, widths, strict=True)]
        for parts in zip_longest(*columns, fillvalue=list[Fragment]()):
            made: StyledLine = []
            for part, size, alignment in zip(parts, widths, alignments, strict=True):
                spare = max(size - cells(part), 0)
                left = {"right": spare, "center": spare // 2}.get(alignment, 0)
                made += [("class:table", " │ ")] if made else []
                made += [("", " " * left), *part, ("", " " * (spare - left))]
            lines.append(made[:-1])
        if number == 0:
            lines.append([("class:table", "─┼─".join("─" * size for size in widths))])
    return lines


def _shrink(natural: list[int], available: int) -> list[int]:
    """Widths that fit: the widest columns are cut to the same width, the others keep theirs."""
    limit = next(most for most in range(available, 0, -1) if sum(min(size, most) for size in natural) <= available)
    spare = available - sum(min(size, limit) for size in natural)
    widths = []
    for size in natural:
        widths.append(min(size, limit + (spare > 0)))
        spare -= size > limit
    return widths


def _code_block(token: Token, width: int) -> list[StyledLine]:
    """Code with its fences. The last line may be incomplete if nothing closes the block."""
    if token.type == "code_block":
        return _code_lines(token.content.rstrip("\n"), "", width)
    complete, newline, unfinished = token.content.rpartition("\n")
    lines = wrap([("class:fence", token.meta["opening"])], width)
    lines += _code_lines(complete, token.info, width) if newline else []
    lines += wrap([("class:code", unfinished)], width, at_words=False) if unfinished else []
    return lines + (wrap([("class:fence", token.meta["closing"])], width) if token.meta["closing"] else [])


def _code_lines(code: str, language: str, width: int) -> list[StyledLine]:
    """Lines of complete code in colours."""
    lines: list[StyledLine] = []
    chunk: list[str] = []
    size = 0
    for line in code.split("\n"):
        starts_paragraph = line[:1].strip() and chunk and not chunk[-1].strip()
        if size >= 2 * CODE_CHUNK or (size >= CODE_CHUNK and starts_paragraph):
            lines += _chunk_lines("\n".join(chunk), language, width)
            chunk, size = [], 0
        chunk.append(line)
        size += len(line) + 1
    return lines + _chunk_lines("\n".join(chunk), language, width)


@lru_cache(maxsize=64)
def _chunk_lines(code: str, language: str, width: int) -> list[StyledLine]:
    """Do not change them: they are cached."""
    lines: list[StyledLine] = [[]]
    for style, text in _coloured(code + "\n", language):
        first, *others = text.split("\n")
        append_text(lines[-1], style, first)
        lines += [[(style, part)] for part in others]
    return [row for line in lines[:-1] for row in wrap(line, width, at_words=False)]


@lru_cache(maxsize=64)
def _coloured(code: str, language: str) -> StyledLine:
    lexer = _lexer(language)
    if lexer is not None and len(code) <= 2 * CODE_CHUNK + LONG_LINE:
        with suppress(Exception):  # a lexer's bug must not cost the screen
            tokens = list(lexer.get_tokens(code))
            if "".join(text for _, text in tokens) == code:
                return [(f"class:code class:{pygments_token_to_classname(kind)}", text) for kind, text in tokens]
    return [("class:code", code)]


@lru_cache(maxsize=256)
def _lexer(language: str) -> Lexer | None:
    try:
        return get_lexer_by_name(language, stripnl=False) if language else None
    except ClassNotFound:
        return None
