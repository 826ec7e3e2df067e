"""A tokenizer that runs in this process, because nothing in it is known to break the library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from cbatch.base.errors import as_error
from cbatch.text.backend.base import AddedToken, Encoded, TextStream, TokenizerFailed


def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls the library. A panic becomes TokenizerFailed; its own errors stay as they are."""
    try:
        return function(*arguments, **options)
    except Exception:
        raise
    except BaseException as raised:
        raise TokenizerFailed(str(as_error(raised))) from raised


class LocalBackend:
    """A `TokenizerBackend` of this process."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @property
    def decoder(self) -> Any:
        return self.tokenizer.decoder

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoded:
        # A batch of one, because `encode` holds the GIL and `encode_batch` does not.
        encoded: Encoded = call(self.tokenizer.encode_batch, [text], add_special_tokens=add_special_tokens)[0]
        return encoded

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(call(self.tokenizer.decode, list(ids), skip_special_tokens=skip_special_tokens))

    def stream(self, context: Sequence[int]) -> TextStream:
        return LocalStream(self, context)

    def id_to_token(self, token_id: int) -> str | None:
        token: str | None = self.tokenizer.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        number: int | None = self.tokenizer.token_to_id(token)
        return number

    def get_added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        added: Mapping[int, AddedToken] = call(self.tokenizer.get_added_tokens_decoder)
        return added

    def to_str(self) -> str:
        return str(call(self.tokenizer.to_str))


class LocalStream:
    """A `TextStream` of this process."""

    def __init__(self, backend: LocalBackend, context: Sequence[int]) -> None:
        self._backend = backend
        # A prompt that ends inside a character would lend its last bytes to the output.
        if backend.decode(context, skip_special_tokens=False).endswith("\ufffd"):
            context = []
        self._stream = DecodeStream(ids=list(context), skip_special_tokens=False)
        self._undecoded: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push(token_id) for token_id in token_ids])

    def _push(self, token_id: int) -> str:
        try:
            chunk = self._stream.step(self._backend.tokenizer, token_id)
        except Exception:  # tokenizers raises plain Exception if invalid bytes rewrite earlier text
            chunk = self._decode([*self._undecoded, token_id])
            self._stream = DecodeStream(skip_special_tokens=False)
        except BaseException as raised:
            raise TokenizerFailed(str(as_error(raised))) from raised
        if chunk is None:
            self._undecoded.append(token_id)
            return ""
        self._undecoded.clear()
        return str(chunk)

    def flush(self) -> str:
        text = self._decode(self._undecoded) if self._undecoded else ""
        self._undecoded = []
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)
