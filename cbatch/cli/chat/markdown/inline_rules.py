"""Rules for emphasis beside East Asian text, for stars that mean powers, and for formulas."""

from __future__ import annotations

import re
import unicodedata

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline
from markdown_it.rules_inline.state_inline import Delimiter

_FORMULA = re.compile(
    r"\$\$(?:[^$\\]|\\.)+\$\$|\$(?![\s$])(?:[^$\\\n]|\\.)*(?<!\s)\$(?!\d)|\\\(.*?\\\)|\\\[.*?\\\]|\\[()\[\]]", re.DOTALL
)
_STRONG_LETTERS = re.compile(r"\*{2,}[^\W\d_]+\*{2,}")


def add_inline_rules(parser: MarkdownIt) -> None:
    """Puts the rules of this file into a parser."""
    parser.inline.ruler.before("escape", "formula", _formula)
    parser.inline.ruler.at("emphasis", _emphasis)
    parser.inline.ruler.at("strikethrough", _strikethrough)


def _formula(state: StateInline, silent: bool) -> bool:
    """Keeps a formula as it is written. A lone `\\(` keeps its backslash, because its formula may not be complete."""
    if state.src[state.pos] not in "$\\":
        return False
    match = _FORMULA.match(state.src, state.pos, state.posMax)
    if match is None:
        return False
    if not silent:
        state.push("text", "", 0).content = match[0]
    state.pos = match.end()
    return True


def _emphasis(state: StateInline, silent: bool) -> bool:
    marker = state.src[state.pos]
    if silent or marker not in "*_":
        return False
    if marker == "_":
        scanned = state.scanDelims(state.pos, False)
        can_open, can_close, length = scanned.can_open, scanned.can_close, scanned.length
    else:
        length = _run_length(state)
        can_open, can_close = _flanking(state, length)
    _push_delimiters(state, [marker] * length, length, can_open, can_close)
    return True


def _strikethrough(state: StateInline, silent: bool) -> bool:
    if silent or state.src[state.pos] != "~":
        return False
    length = _run_length(state)
    if length == 2:
        _push_delimiters(state, ["~~"], 0, *_flanking(state, length))
    else:
        state.pending += "~" * length
        state.pos += length
    return True


def _push_delimiters(state: StateInline, texts: list[str], length: int, can_open: bool, can_close: bool) -> None:
    for text in texts:
        state.push("text", "", 0).content = text
        state.delimiters.append(Delimiter(ord(text[0]), length, len(state.tokens) - 1, -1, can_open, can_close))
        state.pos += len(text)


def _run_length(state: StateInline) -> int:
    end = state.pos
    while end < state.posMax and state.src[end] == state.src[state.pos]:
        end += 1
    return end - state.pos


def _flanking(state: StateInline, length: int) -> tuple[bool, bool]:
    """Whether a run of markers can open and close emphasis.

    CommonMark's rule, but East Asian characters and their punctuation count as letters beside which punctuation may
    stand, as https://github.com/tats-u/markdown-cjk-friendly proposes. `2**3` opens nothing.
    """
    end = state.pos + length
    before = state.src[state.pos - 1] if state.pos > 0 else " "
    after = state.src[end] if end < state.posMax else " "
    can_open = not after.isspace() and (not _is_punctuation(after) or _may_touch_punctuation(before))
    can_close = not before.isspace() and (not _is_punctuation(before) or _may_touch_punctuation(after))
    if _is_latin(before) and _is_latin(after):
        can_open = before.isalpha() and _STRONG_LETTERS.match(state.src, state.pos) is not None
    return can_open, can_close


def _may_touch_punctuation(character: str) -> bool:
    return character.isspace() or _is_punctuation(character) or _is_wide(character)


def _is_punctuation(character: str) -> bool:
    return unicodedata.category(character)[0] in "PS" and not _is_wide(character)


def _is_latin(character: str) -> bool:
    return (character.isalnum() or character == "_") and not _is_wide(character)


def _is_wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in "WF"
