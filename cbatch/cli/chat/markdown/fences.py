"""Fences of code blocks: which line opens one, and which one closes it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_OPENING = re.compile(r"( *)(`{3,}(?=[^`]*$)|~{3,})(.*)")
MAX_OPENING = 200
"""Characters of an opening fence at most; less than half a line that is laid out in parts."""

_NESTING_LANGUAGES = {"", "markdown", "md", "mdx", "text"}
"""Languages of blocks in which models write fences of the same length."""


@dataclass(frozen=True)
class Fence:
    """A fence that is open. `lengths` are those of the fences inside each other, the outermost first."""

    indent: int
    marker: str
    lengths: tuple[int, ...]
    language: str

    @classmethod
    def opened_by(cls, line: str) -> Fence | None:
        """The fence that a line opens, if it opens one. The caller judges its indentation."""
        match = _OPENING.fullmatch(line)
        if match is None or len(line) > MAX_OPENING:
            return None
        language = match[3].split()[0].strip("{}.").lower() if match[3].strip() else ""
        return cls(len(match[1]), match[2][0], (len(match[2]),), language)

    def after(self, line: str) -> Fence | None:
        """The fence after one more line, or None if the line closes it."""
        text = line.strip(" \t")
        length = len(text) - len(text.lstrip(self.marker))
        if length < self.lengths[0]:
            return self
        if length == len(text):
            if length < self.lengths[-1]:
                return self
            return replace(self, lengths=self.lengths[:-1]) if len(self.lengths) > 1 else None
        if self.language in _NESTING_LANGUAGES and self.marker not in text[length:]:
            return replace(self, lengths=(*self.lengths, length))
        return self
