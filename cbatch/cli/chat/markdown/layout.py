"""Markdown as lines of a terminal, while it streams."""

from __future__ import annotations

import re

from cbatch.cli.chat.markdown.blocks import block_lines, text_lines
from cbatch.cli.chat.markdown.code import CodeLayout, plain_code
from cbatch.cli.chat.markdown.fences import Fence
from cbatch.cli.chat.markdown.markup import StyledLine, split_long_line, wrap
from cbatch.cli.chat.markdown.splitter import Block, State, indentation
from cbatch.cli.common.console import safe

_MAYBE_UNDERLINE = re.compile(r" {0,3}(?:=|-){1,2} *")


class MarkdownLayout:
    """Lays out a text that only grows. Blocks that are finished are laid out once."""

    def __init__(self, width: int, *, code_width: int | None = None) -> None:
        """`code_width`: where lines of code are broken, if not at `width`"""
        self._width = max(width, 1)
        self._code_width = code_width or self._width
        self._done: list[StyledLine] = []
        self._num_taken = 0
        self._unfinished = ""  # the last line, so far
        self._is_rest = False  # whether the beginning of that line is laid out already
        self._state = State()
        self._code: _FencedCode | None = None

    def lines(self, text: str) -> list[StyledLine]:
        """All lines of the text so far, which must begin with the text of the last call."""
        *complete, self._unfinished = (self._unfinished + safe(text[self._num_taken :])).split("\n")
        self._num_taken = len(text)
        for line in complete:
            self._add_line(line)
        if self._code is None:
            self._unfinished = self._add_long(self._unfinished)
        return self._done + self._open_lines()

    def _add_line(self, line: str) -> None:
        code = self._code
        if code is None:
            line = self._add_long(line)
            if line.strip() or not self._is_rest:
                self._add_part(line)
            self._is_rest = False
            return
        is_inside = code.add(line.expandtabs(4))
        if is_inside and code.is_open:
            return
        self._done += code.lines("")
        self._code = None
        self._state = State(margin=self._state.margin)
        if not is_inside:
            self._add_line(line)

    def _add_long(self, line: str) -> str:
        """Takes in all but the last part of a line that is too long, and returns that part."""
        *parts, last = split_long_line(line)
        for part in parts:
            self._add_part(part)
            self._is_rest = True
        return last

    def _add_part(self, part: str) -> None:
        closed, self._state = self._after(self._state, part)
        for block in closed:
            self._done += self._block_lines(block, is_first=not self._done)
        opened = self._state.block
        if opened is not None and opened.kind == "fence":
            self._done += self._block_lines(opened, is_first=not self._done)
            self._code = _FencedCode(opened, self._state.margin, self._code_width)

    def _after(self, state: State, part: str) -> tuple[list[Block], State]:
        part = part.expandtabs(4)
        return state.add_rest(part) if self._is_rest else state.add(part)

    def _open_lines(self) -> list[StyledLine]:
        """Lines that the text which follows may change."""
        line = self._unfinished.expandtabs(4)
        lines: list[StyledLine] = []
        state = self._state
        if self._code is not None:
            if not self._code.is_left_by(line):
                return self._code.lines(line)
            lines = self._code.lines("")
            state = State(margin=state.margin)
        closed: list[Block] = []
        is_underline = _MAYBE_UNDERLINE.fullmatch(line) and state.block and state.block.kind == "paragraph"
        if line.strip() and not is_underline:
            closed, state = self._after(state, line)
        for block in [*closed, *([state.block] if state.block else [])]:
            lines += self._block_lines(block, is_first=not (self._done or lines))
        return [*lines, *(wrap([("", line)], self._width) if is_underline else [])]

    def _block_lines(self, block: Block, *, is_first: bool) -> list[StyledLine]:
        width = self._width
        blank: list[StyledLine] = [[]] if block.follows_blank and not is_first else []
        match block.kind:
            case "rest":
                return text_lines(block.text, "", width)
            case "formula":
                return blank + [part for line in block.text.split("\n") for part in wrap([("", line)], width)]
            case "fence":
                return blank + wrap([("class:fence", block.text)], width)
        return blank + block_lines(block.text, width, self._code_width, block.margin)


class _FencedCode:
    """A code block of which the opening fence is laid out already."""

    def __init__(self, block: Block, margin: int, width: int) -> None:
        """margin: indentation below which a line ends the block, because it ends the item that the block is in"""
        fence = Fence.opened_by(block.text)
        assert fence is not None
        self._fence: Fence = fence
        self._indent = block.margin + fence.indent
        self._margin = margin
        self._width = width
        self._layout = CodeLayout(fence.language, width)
        self._closing: str | None = None

    @property
    def is_open(self) -> bool:
        return self._closing is None

    def is_left_by(self, line: str) -> bool:
        """Whether a line is outside the item that the block is in."""
        return bool(line.strip()) and indentation(line) < self._margin

    def add(self, line: str) -> bool:
        """Takes in a complete line. Returns whether it belongs to the block."""
        if self.is_left_by(line):
            return False
        fence = self._after(line)
        if fence is None:
            self._closing = line.strip()
        else:
            self._fence = fence
            self._layout.add(self._without_indent(line))
        return True

    def lines(self, unfinished: str) -> list[StyledLine]:
        """All lines after the opening fence, and a line that is not complete."""
        closing = self._closing
        lines = self._layout.lines()
        if unfinished and self._after(unfinished) is None:
            closing = unfinished.strip()
        elif unfinished:
            lines = lines + plain_code(self._without_indent(unfinished), self._width)
        return lines + (wrap([("class:fence", closing)], self._width) if closing else [])

    def _after(self, line: str) -> Fence | None:
        return self._fence.after(line) if indentation(line) - self._margin < 4 else self._fence

    def _without_indent(self, line: str) -> str:
        return line[min(indentation(line), self._indent) :]
