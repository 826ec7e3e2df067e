"""The Markdown parser: CommonMark, tables and strikethrough, with what models write beside them."""

from __future__ import annotations

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock

from cbatch.cli.chat.markdown.fences import Fence
from cbatch.cli.chat.markdown.inline_rules import add_inline_rules


class _Parser(MarkdownIt):
    """Leaves URLs as they are written: nothing is fetched or followed here."""

    def normalizeLink(self, url: str) -> str:
        return url

    def normalizeLinkText(self, link: str) -> str:
        return link

    def validateLink(self, url: str) -> bool:
        return True


def _fence_rule(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """Replaces the library's rule, which knows no fences of the same length inside each other."""
    opening = _line(state, start)
    fence = None if state.is_code_block(start) else Fence.opened_by(opening)
    if fence is None or silent:
        return fence is not None
    number = start + 1
    open_fence: Fence | None = fence
    while number < end and open_fence is not None:
        line = _line(state, number)
        if line and state.sCount[number] < state.blkIndent:
            break
        if not state.is_code_block(number):
            open_fence = open_fence.after(line)
        number += 1
    last = number - (open_fence is None)
    token = state.push("fence", "code", 0)
    token.info = fence.language
    token.content = state.getLines(start + 1, last, state.sCount[start], True)
    # The lines as they are shown; the closing one is empty while there is none.
    token.meta = {"opening": opening, "closing": _line(state, last) if open_fence is None else ""}
    token.map = [start, number]
    state.line = number
    return True


def _line(state: StateBlock, number: int) -> str:
    return state.src[state.bMarks[number] + state.tShift[number] : state.eMarks[number]]


def _make_parser() -> MarkdownIt:
    parser = _Parser("commonmark", {"breaks": True, "html": False, "maxNesting": 100})
    parser.enable(["table", "strikethrough"])
    # References would let the end of a text change its beginning.
    parser.disable(["reference", "html_block", "html_inline"])
    parser.block.ruler.at("fence", _fence_rule, {"alt": ["paragraph", "reference", "blockquote", "list"]})
    add_inline_rules(parser)
    return parser


PARSER = _make_parser()


def find_code(text: str) -> list[str]:
    """The contents of all fenced code blocks of a Markdown text, in order, each with its line ends."""
    return [token.content for token in PARSER.parse(text) if token.type == "fence"]
