"""Text from tokens as they come: whole characters only, and nothing that may yet turn out a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

PROMPT_TAIL = 8
"""Tokens of the prompt that the decoding of the output can depend on."""


class TextStream:
    """The text of one output, in deltas that are safe to show.

    Bytes of an unfinished character are held back until it is whole, and the longest tail that could be the
    beginning of a stop string until it is decided. All deltas together are the text of the output.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        """`prompt`: the tokens before the output, whose end decides how a leading space is decoded."""
        self._tokenizer = tokenizer
        tail = list(prompt[-PROMPT_TAIL:])
        # Where the prompt ends inside a character, its end would be taken for the beginning of the output.
        if tokenizer.decode(tail).endswith("\ufffd"):
            tail = []
        self._stream = DecodeStream(ids=tail, skip_special_tokens=True)
        self._unsaid: list[int] = []
        self._held = ""
        self._stop = tuple(stop)
        self.stop_reason: str | None = None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """The delta after one more token. When a stop string is found, the text before it is the last delta."""
        try:
            chunk = self._stream.step(self._tokenizer, token_id)
        except Exception:  # tokenizers raises plain Exception where bytes that are no character rewrite earlier text
            chunk = self._tokenizer.decode([*self._unsaid, token_id])
            self._stream = DecodeStream(skip_special_tokens=True)
        if chunk is None:
            self._unsaid.append(token_id)
            return ""
        self._unsaid.clear()
        return self._release(chunk, may_stop)

    def flush(self) -> str:
        """What was held back, at the end of the output: a character that stayed unfinished becomes U+FFFD."""
        text = self._held + (self._tokenizer.decode(self._unsaid) if self._unsaid else "")
        self._held, self._unsaid = "", []
        return text

    def _release(self, chunk: str, may_stop: bool) -> str:
        if not self._stop:
            return chunk
        text = self._held + chunk
        found = [(place, stop) for stop in self._stop if (place := text.find(stop)) >= 0] if may_stop else []
        if found:
            place, self.stop_reason = min(found, key=lambda pair: pair[0])
            self._held = ""
            return text[:place]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, short of all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
