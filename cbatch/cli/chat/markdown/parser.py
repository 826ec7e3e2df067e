"""The Markdown parser: CommonMark, tables and strikethrough, with what models write beside them."""

from __future__ import annotations

import re
import unicodedata

from markdown_it import MarkdownIt
from markdown_it.parser_inline import ParserInline
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from markdown_it.rules_inline.state_inline import Scanned
from markdown_it.token import Token
from markdown_it.utils import EnvType

_FENCE = re.compile(r"(`{3,}(?=[^`]*$)|~{3,})(.*)")
_NESTING_LANGUAGES = {"", "markdown", "md", "mdx", "text"}
"""Languages of blocks in which models write fences of the same length."""

_FORMULA_LINE = re.compile(r"\\\[(?!.*\\\])|\$\$(?!.*\$\$)")
_FORMULA_END = re.compile(r".*(?:\\\]|\$\$)")
_FORMULA = re.compile(
    r"\$\$(?:[^$\\]|\\.)+\$\$|\$(?![\s$])(?:[^$\\\n]|\\.)*(?<!\s)\$(?!\d)|\\\(.*?\\\)|\\\[.*?\\\]|\\[()\[\]]", re.DOTALL
)
_STRONG_LETTERS = re.compile(r"\*{2,}[^\W\d_]+\*{2,}")


class _Parser(MarkdownIt):
    """Leaves URLs as they are written: nothing is fetched or followed here."""

    def normalizeLink(self, url: str) -> str:
        return url

    def normalizeLinkText(self, link: str) -> str:
        return link

    def validateLink(self, url: str) -> bool:
        return True


def _fence(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """Replaces the library's rule, which knows no fences of the same length inside each other."""
    opening = _line(state, start)
    match = None if state.is_code_block(start) else _FENCE.fullmatch(opening)
    if match is None or silent:
        return match is not None
    language = match[2].split()[0].strip("{}.").lower() if match[2].strip() else ""
    marker, is_nesting = match[1][0], language in _NESTING_LANGUAGES
    lengths = [len(match[1])]  # of the fences that are open, the outermost first
    number = start + 1
    while number < end and lengths:
        line = _line(state, number)
        if line and state.sCount[number] < state.blkIndent:
            break
        if not state.is_code_block(number):
            text = line.strip()
            length = len(text) - len(text.lstrip(marker))
            if length == len(text) >= lengths[-1]:
                lengths.pop()
            elif is_nesting and lengths[0] <= length < len(text) and marker not in text[length:]:
                lengths.append(length)
        number += 1
    last = number - (not lengths)
    token = state.push("fence", "code", 0)
    token.info = language
    token.content = state.getLines(start + 1, last, state.sCount[start], True)
    # The lines as they are shown; the closing one is empty while there is none.
    token.meta = {"opening": opening, "closing": "" if lengths else _line(state, last)}
    token.map = [start, number]
    state.line = number
    return True


def _formula_lines(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """Keeps a formula of several lines as it is written, up to what ends it or a blank line."""
    if state.is_code_block(start) or not _FORMULA_LINE.match(_line(state, start)):
        return False
    if silent:
        return True
    number = start + 1
    while number < end and (line := _line(state, number)) and state.sCount[number] >= state.blkIndent:
        number += 1
        if _FORMULA_END.match(line):
            break
    token = state.push("formula", "", 0)
    token.content = state.getLines(start, number, state.blkIndent, False)
    token.map = [start, number]
    state.line = number
    return True


def _line(state: StateBlock, number: int) -> str:
    return state.src[state.bMarks[number] + state.tShift[number] : state.eMarks[number]]


def _formula(state: StateInline, silent: bool) -> bool:
    """Keeps a formula as it is written. A lone `\\(` keeps its backslash, because its formula may not be complete."""
    match = _FORMULA.match(state.src, state.pos, state.posMax) if state.src[state.pos] in "$\\" else None
    if match is None:
        return False
    if not silent:
        state.push("text", "", 0).content = match[0]
    state.pos = match.end()
    return True


class _InlineState(StateInline):
    """Finds emphasis beside East Asian text, as https://github.com/tats-u/markdown-cjk-friendly proposes."""

    def scanDelims(self, start: int, canSplitWord: bool) -> Scanned:
        """Whether a run of markers can open and close emphasis.

        CommonMark's rule, but East Asian characters and their punctuation count as letters beside which punctuation
        may stand. `2**3` opens nothing.
        """
        scanned = super().scanDelims(start, canSplitWord)
        if not canSplitWord:  # underscores
            return scanned
        end = start + scanned.length
        before = self.src[start - 1] if start > 0 else " "
        after = self.src[end] if end < self.posMax else " "
        can_open = not after.isspace() and (not _is_punctuation(after) or _may_touch_punctuation(before))
        can_close = not before.isspace() and (not _is_punctuation(before) or _may_touch_punctuation(after))
        if self.src[start] == "~":
            can_open, can_close = can_open and scanned.length == 2, can_close and scanned.length == 2
        elif _is_latin(before) and _is_latin(after):
            can_open = before.isalpha() and _STRONG_LETTERS.match(self.src, start) is not None
        return Scanned(can_open, can_close, scanned.length)


class _InlineParser(ParserInline):
    def parse(self, src: str, md: MarkdownIt, env: EnvType, tokens: list[Token]) -> list[Token]:
        state = _InlineState(src, md, env, tokens)
        self.tokenize(state)
        for rule in self.ruler2.getRules(""):
            rule(state)
        return state.tokens


def _may_touch_punctuation(character: str) -> bool:
    return character.isspace() or _is_punctuation(character) or _is_wide(character)


def _is_punctuation(character: str) -> bool:
    return unicodedata.category(character)[0] in "PS" and not _is_wide(character)


def _is_latin(character: str) -> bool:
    return (character.isalnum() or character == "_") and not _is_wide(character)


def _is_wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in "WF"


def _make_parser() -> MarkdownIt:
    parser = _Parser()
    parser.inline = _InlineParser()
    parser.configure("commonmark", {"breaks": True, "html": False, "maxNesting": 100})
    parser.enable(["table", "strikethrough"])
    # References would let the end of a text change its beginning.
    parser.disable(["reference", "html_block", "html_inline"])
    alt = ["paragraph", "reference", "blockquote", "list"]  # blocks that these interrupt
    parser.block.ruler.at("fence", _fence, {"alt": alt})
    parser.block.ruler.before("fence", "formula", _formula_lines, {"alt": alt})
    parser.inline.ruler.before("escape", "formula", _formula)
    return parser


PARSER = _make_parser()


def find_code(text: str) -> list[str]:
    """The contents of all fenced code blocks of a Markdown text, in order, each with its line ends."""
    return [token.content for token in PARSER.parse(text) if token.type == "fence"]
