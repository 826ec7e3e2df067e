"""Code in colours, laid out line by line."""

from __future__ import annotations

from functools import lru_cache

from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Keyword, Literal, Name, Number, Operator, String, _TokenType, is_token_subtype
from pygments.util import ClassNotFound

from cbatch.cli.chat.markdown.markup import LONG_LINE, StyledLine, append_text, wrap_anywhere

CHUNK = 1000
"""Characters of code after which its beginning is coloured for good, at the next line that begins a new construct."""

_STYLES = {
    Keyword: "class:code.keyword",
    Operator.Word: "class:code.keyword",
    String: "class:code.string",
    Comment: "class:code.comment",
    Number: "class:code.number",
    Literal: "class:code.number",
    Name.Attribute: "class:code.name",
    Name.Builtin: "class:code.name",
    Name.Class: "class:code.name",
    Name.Decorator: "class:code.name",
    Name.Function: "class:code.name",
    Name.Tag: "class:code.name",
    Operator: "class:code.operator",
}


class CodeLayout:
    """Lays out code of which lines only come after others."""

    def __init__(self, language: str, width: int) -> None:
        self._lexer = _lexer(language)
        self._width = width
        self._done: list[StyledLine] = []
        self._source: list[str] = []  # lines that have come since the last cut
        self._size = 0
        self._next_cut = CHUNK
        self._coloured: list[StyledLine] | None = []

    def add(self, line: str) -> None:
        """Takes in a complete line."""
        self._source.append(line)
        self._size += len(line) + 1
        self._coloured = None
        if self._size >= self._next_cut:
            self._cut()

    def lines(self) -> list[StyledLine]:
        """All complete lines."""
        if self._coloured is None:
            self._coloured = self._wrap(_colour(self._lexer, self._source)[0])
        return self._done + self._coloured

    def _cut(self) -> None:
        """Lays out what precedes a line at which the lexer can begin anew. Depends on the code alone."""
        coloured, safe_cuts = _colour(self._lexer, self._source)
        is_late = self._size >= 2 * CHUNK
        cuts = [cut for cut in safe_cuts if is_late or self._source[cut][:1] not in ("", " ", ")", "]", "}")]
        cut = cuts[-1] if cuts else len(self._source) if self._size >= 4 * CHUNK else 0
        if cut:
            self._done += self._wrap(coloured[:cut])
            self._source = self._source[cut:]
            self._size = sum(map(len, self._source)) + len(self._source)
        self._next_cut = max(CHUNK, self._size + CHUNK // 2)

    def _wrap(self, lines: list[StyledLine]) -> list[StyledLine]:
        return [row for line in lines for row in wrap_anywhere(line, self._width)]


def plain_code(line: str, width: int) -> list[StyledLine]:
    """A line of code that is not complete, or not in a language."""
    return wrap_anywhere([("class:code", line)], width)


@lru_cache(maxsize=16)
def code_lines(code: str, language: str, width: int) -> list[StyledLine]:
    """Lines of complete code. Do not change them: they are cached."""
    layout = CodeLayout(language, width)
    for line in code.split("\n"):
        layout.add(line)
    return layout.lines()


@lru_cache(maxsize=256)
def _lexer(language: str) -> Lexer | None:
    try:
        return get_lexer_by_name(language, stripnl=False) if language else None
    except ClassNotFound:
        return None


def _colour(lexer: Lexer | None, lines: list[str]) -> tuple[list[StyledLine], list[int]]:
    """Lines in colours, and the numbers of those before which no string or comment is open."""
    if lexer is None or max(map(len, lines)) > LONG_LINE:
        return _in_one_colour(lines), list(range(1, len(lines)))
    coloured: list[StyledLine] = [[]]
    cuts: list[int] = []
    source = "\n".join(lines) + "\n"
    try:
        tokens = list(lexer.get_tokens(source))
    except Exception:  # a lexer's bug must not cost the screen
        return _in_one_colour(lines), []
    if "".join(text for _, text in tokens) != source:
        return _in_one_colour(lines), []
    for kind, text in tokens:
        style = _style(kind)
        for number, part in enumerate(text.split("\n")):
            if number:
                if not (is_token_subtype(kind, String) or is_token_subtype(kind, Comment.Multiline)):
                    cuts.append(len(coloured))
                coloured.append([])
            if part:
                append_text(coloured[-1], style, part)
    return coloured[:-1], cuts[:-1]


def _in_one_colour(lines: list[str]) -> list[StyledLine]:
    return [[("class:code", line)] for line in lines]


@lru_cache(maxsize=512)
def _style(kind: _TokenType) -> str:
    parents = reversed(kind.split())
    return next((_STYLES[parent] for parent in parents if parent in _STYLES), "class:code")
