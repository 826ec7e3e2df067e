"""Tokenizers of the tokenizers library."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from tokenizers import AddedToken, Encoding, Tokenizer
from tokenizers.decoders import DecodeStream
from tokenizers.pre_tokenizers import ByteLevel

from cbatch.base.errors import RequestError, as_error

MAX_REASON_CHARACTERS = 200


class EncodedText(NamedTuple):
    """A text as tokens: their ids, and for each of them start and stop of the characters that it stands for."""

    ids: list[int]
    offsets: Sequence[tuple[int, int]]


Encoded = Encoding | EncodedText


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """The parts of a model's tokenizer that the engine uses.

    backend:        without truncation and padding
    bos_id:         the token that a text begins with; None if the model has none
    chat_template:  Jinja source, or several by name, with `default` among them
    special_tokens: by the names that templates may use, such as `bos_token`
    """

    backend: TokenizerBackend
    bos_id: int | None
    chat_template: str | dict[str, str] | None
    special_tokens: Mapping[str, str]


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


def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls the library. A panic becomes TokenizerFailed; its own errors stay as they are."""
    try:
        return function(*arguments, **options)
    except Exception:
        raise
    except BaseException as raised:
        raise TokenizerFailed(str(as_error(raised))) from raised


class TokenizerBackend:
    """A tokenizer in this process, in which nothing is known to break the library. A subclass asks another process.

    Each method raises RequestError (`tokenizer_error`) if the library breaks on what it is given.
    """

    def __init__(self, tokenizer: Tokenizer, encode: Callable[..., Encoded] | None = None) -> None:
        """`encode`: does more to a text than the tokenizer itself"""
        self.tokenizer = tokenizer
        self.decoder: object = tokenizer.decoder
        """Something whose text names the parts of the decoder."""
        self._encode = encode or self._encode_alone
        self.id_to_token: Callable[[int], str | None] = tokenizer.id_to_token
        self.token_to_id: Callable[[str], int | None] = tokenizer.token_to_id

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Encoded:
        encoded: Encoded = call(self._encode, text, add_special_tokens=add_special_tokens)
        return encoded

    def _encode_alone(self, text: str, *, add_special_tokens: bool) -> Encoded:
        # A batch of one, because `encode` holds the GIL and `encode_batch` does not.
        encoded: Encoded = self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return encoded

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(call(self.tokenizer.decode, list(ids), skip_special_tokens=skip_special_tokens))

    def stream(self, context: Sequence[int]) -> TextStream:
        """A text that begins after some tokens, which may decide its leading space."""
        return TextStream(self, context)

    def get_added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        added: Mapping[int, AddedToken] = call(self.tokenizer.get_added_tokens_decoder)
        return added

    @cached_property
    def _decoder_parts(self) -> str:
        return str(self.decoder)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token, perhaps part of a character: the name of a special token, nothing if unknown."""
        piece = self.id_to_token(token_id)
        if piece is None:
            return b""
        if "ByteLevel" in self._decoder_parts:
            found = [_BYTE_OF.get(char) for char in piece]
            return piece.encode() if None in found else bytes(found)  # type: ignore[arg-type]
        if "ByteFallback" in self._decoder_parts and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        return piece.replace("\u2581", " ").encode()

    def to_str(self) -> str:
        """The tokenizer in the form of `tokenizer.json`."""
        return str(call(self.tokenizer.to_str))


class TextStream:
    """The text of tokens as they come, in whole characters.

    context:   the tokens of the latest piece of text, which may decide the beginning of the next one
    undecoded: the tokens after it, whose text is held back
    """

    def __init__(self, backend: TokenizerBackend, context: Sequence[int]) -> None:
        self._backend = backend
        # A prompt that ends inside a character would lend its last bytes to the output.
        is_whole = not backend.decode(context, skip_special_tokens=False).endswith("\ufffd")
        self.context = list(context) if is_whole else []
        self.undecoded: list[int] = []
        self._stream = DecodeStream(ids=list(self.context), skip_special_tokens=False)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these further tokens add."""
        return "".join([self._push(token_id) for token_id in token_ids])

    def _push(self, token_id: int) -> str:
        self.undecoded.append(token_id)
        try:
            chunk = self._stream.step(self._backend.tokenizer, token_id)
        except Exception:  # tokenizers raises plain Exception if invalid bytes rewrite earlier text
            self._stream = DecodeStream(skip_special_tokens=False)
            self.context = []
            return self.flush()
        except BaseException as raised:
            raise TokenizerFailed(str(as_error(raised))) from raised
        if chunk is None:
            return ""
        self.context, self.undecoded = self.undecoded, []
        return str(chunk)

    def flush(self) -> str:
        """The text held back, at the end. An unfinished character becomes U+FFFD."""
        ids, self.undecoded = self.undecoded, []
        return self._backend.decode(ids, skip_special_tokens=False) if ids else ""


_PRINTABLE = {letter: ord(letter) for letter in ByteLevel.alphabet() if ord(letter) < 0x100}
_OTHERS = sorted(letter for letter in ByteLevel.alphabet() if letter not in _PRINTABLE)
_BYTE_OF = _PRINTABLE | dict(zip(_OTHERS, sorted({*range(256)}.difference(_PRINTABLE.values())), strict=True))
"""GPT-2's letters for bytes: printable bytes are written as themselves, the others as letters from U+0100 on."""
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
