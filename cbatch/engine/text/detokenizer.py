"""Text from tokens as they come: whole characters only, and nothing that may yet turn out a stop string."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from cbatch.engine.base.errors import RequestError
from cbatch.engine.base.outputs import Text

NUM_CONTEXT_TOKENS = 8
"""Tokens of the prompt that the decoding of the output can depend on; what it begins with may stand in them, too."""


class TokenBytes:
    """The bytes that tokens stand for, by the kind of tokenizer: byte-level, or pieces with a fallback to bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = str(tokenizer.decoder)
        self._is_byte_level = "ByteLevel" in decoder
        self._has_fallback = "ByteFallback" in decoder

    def bytes_of(self, token_id: int) -> bytes:
        """Empty for an id that the tokenizer does not know; a special token's are those of its name."""
        piece: str | None = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            found = [_BYTE_OF.get(char) for char in piece]
            return piece.encode() if None in found else bytes(found)  # type: ignore[arg-type]
        if self._has_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        return piece.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others for letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class LateText:
    """The text of one output that nothing stops but its tokens: it is made where it is read, not where it is said."""

    stop_reason = None

    def __init__(self, make: Callable[[], IncrementalDetokenizer]) -> None:
        self._make = make
        self._stream: IncrementalDetokenizer | None = None
        self._tokens: list[int | None] = []
        """None stands for what is held back at the end."""
        self._deltas: list[str] = []

    def push(self, token_id: int, *, may_stop: bool = True) -> LatePiece:
        return self._say(token_id)

    def flush(self) -> LatePiece:
        return self._say(None)

    def read(self, start: int, stop: int) -> str:
        """The deltas of tokens `start .. stop-1`. Raises RequestError where they cannot be made."""
        deltas = self._deltas
        try:
            self._stream = stream = self._stream or self._make()
            for token in self._tokens[len(deltas) : stop]:
                deltas.append(stream.flush() if token is None else stream.push(token))
        except Exception as error:
            raise RequestError("internal_error", f"The output cannot be turned into text: {error!r}") from error
        return "".join(deltas[start:stop])

    def _say(self, token: int | None) -> LatePiece:
        self._tokens.append(token)
        return LatePiece(self, len(self._tokens) - 1, len(self._tokens))


class LatePiece:
    """Some deltas of a text, one behind the other."""

    __slots__ = ("_start", "_stop", "_text")

    def __init__(self, text: LateText, start: int, stop: int) -> None:
        self._text, self._start, self._stop = text, start, stop

    def read(self) -> str:
        return self._text.read(self._start, self._stop)

    def __add__(self, other: Text) -> Text:
        if isinstance(other, str) and not other:  # of an event without text, which is no reason to read
            return self
        if isinstance(other, LatePiece) and other._text is self._text and other._start == self._stop:
            return LatePiece(self._text, self._start, other._stop)
        return self.read() + (other if isinstance(other, str) else other.read())

    def __radd__(self, before: str) -> Text:
        return before + self.read() if before else self

    def __eq__(self, other: object) -> bool:
        return self.read() == (other.read() if isinstance(other, LatePiece) else other)

    def __hash__(self) -> int:
        return hash(self.read())

    def __repr__(self) -> str:
        return repr(self.read())

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """A copy, or what is sent to another process, is the text alone, without the tokenizer."""
        return str, (self.read(),)


class IncrementalDetokenizer:
    """The text of one output, in deltas that are safe to show.

    Bytes of an unfinished character are held back until it is whole, and the longest tail that could be the
    beginning of a stop string until it is decided. All deltas together are the text of the output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        hidden: Container[int] = (),
    ) -> None:
        """
        prompt: the tokens before the output, whose end decides how a leading space is decoded
        stop:   strings that end the output
        hidden: tokens that take no place in the text
        """
        self._tokenizer = tokenizer
        self._hidden = hidden
        tail = [token for token in prompt[-NUM_CONTEXT_TOKENS:] if token not in hidden]
        # Where the prompt ends inside a character, its end would be taken for the beginning of the output.
        if self._decode(tail).endswith("\ufffd"):
            tail = []
        self._stream = DecodeStream(ids=tail, skip_special_tokens=False)
        self._undecoded: list[int] = []
        self._held_back = ""
        self._stop = tuple(stop)
        self.stop_reason: str | None = None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """The delta after one more token. When a stop string is found, the text before it is the last delta."""
        if token_id in self._hidden:
            return ""
        try:
            chunk = self._stream.step(self._tokenizer, token_id)
        except Exception:  # tokenizers raises plain Exception where bytes that are no character rewrite earlier text
            chunk = self._decode([*self._undecoded, token_id])
            self._stream = DecodeStream(skip_special_tokens=False)
        if chunk is None:
            self._undecoded.append(token_id)
            return ""
        self._undecoded.clear()
        return self._release(chunk, may_stop)

    def flush(self) -> str:
        """What was held back, at the end of the output: a character that stayed unfinished becomes U+FFFD."""
        text = self._held_back + (self._decode(self._undecoded) if self._undecoded else "")
        self._held_back, self._undecoded = "", []
        return text

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def _release(self, chunk: str, may_stop: bool) -> str:
        if not self._stop:
            return chunk
        text = self._held_back + chunk
        found = [(place, stop) for stop in self._stop if (place := text.find(stop)) >= 0] if may_stop else []
        if found:
            place, self.stop_reason = min(found, key=lambda pair: pair[0])
            self._held_back = ""
            return text[:place]
        keep = max((partial_match_length(text, stop) for stop in self._stop), default=0)
        self._held_back = text[len(text) - keep :]
        return text[: len(text) - keep]


def partial_match_length(text: str, whole: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `whole`."""
    return next((n for n in range(min(len(whole) - 1, len(text)), 0, -1) if text.endswith(whole[:n])), 0)
