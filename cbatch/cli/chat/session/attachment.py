"""Texts that go with a message: files that were read, and long pastes. The screen folds them; the model sees all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PASTE_LINES, PASTE_CHARACTERS = 12, 1500
"""A paste with more lines or characters than these is folded into an attachment."""

_FENCE = re.compile(r"^ {0,3}(`{3,})", re.MULTILINE)


@dataclass(eq=False, slots=True)
class Attachment:
    """A text beside a message.

    name:       of the file; of a paste, what stands for it in the message, such as `[pasted 1: 40 lines]`
    is_paste:   whether it stands inside the message, and not before it
    num_tokens: its length; None until the model's tokenizer is there
    """

    name: str
    text: str
    is_paste: bool = False
    num_tokens: int | None = None

    @property
    def label(self) -> str:
        """Its name and size, as the screen shows it."""
        size = f"{len(self.text):,} characters" if self.num_tokens is None else f"{self.num_tokens:,} tokens"
        return f"{self.name.rpartition('/')[2]}, {size}"

    def as_block(self) -> str:
        """The file as the model sees it: its name, and its text between fences that the text does not contain."""
        longest = max((len(fence) for fence in _FENCE.findall(self.text)), default=2)
        fence = "`" * max(longest + 1, 3)
        language = self.name.rpartition(".")[2] if "." in self.name else ""
        end = "" if self.text.endswith("\n") or not self.text else "\n"
        return f"File {self.name}:\n{fence}{language if language.isalnum() else ''}\n{self.text}{end}{fence}"


def is_long_paste(text: str) -> bool:
    return text.count("\n") >= PASTE_LINES or len(text) >= PASTE_CHARACTERS


def new_paste(text: str, number: int) -> Attachment:
    """An attachment for a long paste. The number makes its name unique."""
    lines = text.count("\n") + (not text.endswith("\n"))
    return Attachment(f"[pasted {number}: {lines:,} line{'s' if lines != 1 else ''}]", text, is_paste=True)


def compose(text: str, attachments: Sequence[Attachment]) -> str:
    """The message that the model sees: files first, then what was typed, with each paste in its place."""
    for paste in attachments:
        if paste.is_paste:
            text = text.replace(paste.name, paste.text)
    blocks = [file.as_block() for file in attachments if not file.is_paste]
    return "\n\n".join([*blocks, text] if text else blocks)


def pastes_in(text: str, pastes: Iterable[Attachment]) -> list[Attachment]:
    """Those whose place is in a text."""
    return [paste for paste in pastes if paste.name in text]
