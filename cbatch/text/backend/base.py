"""What the engine needs of a tokenizer of the tokenizers library, wherever that runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from cbatch.base.errors import RequestError

MAX_REASON_CHARACTERS = 200


class Encoded(Protocol):
    """A text as tokens.

    ids:     of the tokens
    offsets: for each of them, start and stop of the characters that it stands for
    """

    @property
    def ids(self) -> list[int]: ...

    @property
    def offsets(self) -> Sequence[tuple[int, int]]: ...


class AddedToken(Protocol):
    """A token beside the vocabulary, which is recognized before a text is split."""

    @property
    def content(self) -> str: ...

    @property
    def special(self) -> bool: ...


class TextStream(Protocol):
    """The text of tokens as they come, in whole characters."""

    def push(self, token_ids: Sequence[int]) -> str:
        """What these further tokens add."""
        ...

    def flush(self) -> str:
        """What was held back, at the end. An unfinished character becomes U+FFFD."""
        ...


class TokenizerBackend(Protocol):
    """Each method raises RequestError (`tokenizer_error`) if the library breaks on what it is given."""

    @property
    def decoder(self) -> object:
        """Something whose text names the parts of the decoder."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoded: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def stream(self, context: Sequence[int]) -> TextStream:
        """A text that begins after some tokens, which may decide its leading space."""
        ...

    def id_to_token(self, token_id: int) -> str | None: ...

    def token_to_id(self, token: str) -> int | None: ...

    def get_added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...

    def to_str(self) -> str:
        """The tokenizer in the form of `tokenizer.json`."""
        ...


def printable(text: str) -> str:
    """A library's text, which may repeat what is in a file, for use in a sentence; without a full stop."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    shown = "".join(filter(str.isprintable, line)).strip()
    return (shown if len(shown) <= MAX_REASON_CHARACTERS else shown[:MAX_REASON_CHARACTERS] + "…").rstrip(". ")


class TokenizerFailed(RequestError):
    """A tokenizer broke on what it was given. reason: why, without a full stop"""

    def __init__(self, reason: str) -> None:
        super().__init__("tokenizer_error", f"The model's tokenizer failed: {printable(reason)}.")
        self.reason = reason

    def __reduce__(self) -> tuple[type[TokenizerFailed], tuple[str]]:  # type: ignore[override]
        return type(self), (self.reason,)
