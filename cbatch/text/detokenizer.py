"""Turns token ids into text as they arrive: whole characters only, and nothing that may become a stop string."""

from __future__ import annotations

from collections.abc import Container, Sequence

from cbatch.text.backend import TokenizerBackend

NUM_CONTEXT_TOKENS = 8
"""Last tokens of the prompt that are decoded together with the output, since they decide its leading space."""


class IncrementalDetokenizer:
    """The text of one output, in deltas that are safe to show.

    The bytes of an unfinished character are held back until it is whole. The longest suffix that could begin a stop
    string is held back until that is decided. All deltas together are the text of the output.
    """

    def __init__(
        self,
        backend: TokenizerBackend,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        hidden: Container[int] = (),
    ) -> None:
        """
        prompt: the tokens before the output, whose end decides how a leading space is decoded
        stop:   strings that end the output
        hidden: tokens that are left out of the text
        """
        self._hidden = hidden
        self._stream = backend.stream([token for token in prompt[-NUM_CONTEXT_TOKENS:] if token not in hidden])
        self._held_back = ""
        self._stop = tuple(stop)
        self.stop_reason: str | None = None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """The delta after one more token. When a stop string is found, the text before it is the last delta."""
        if token_id in self._hidden:
            return ""
        chunk = self._stream.push([token_id])
        return self._release(chunk, may_stop) if chunk else ""

    def push_all(self, token_ids: Sequence[int]) -> str:
        """The same for several tokens, among which no stop string is looked for."""
        return self._stream.push([token_id for token_id in token_ids if token_id not in self._hidden])

    def flush(self) -> str:
        """The text held back, at the end of the output. An unfinished character becomes U+FFFD."""
        text = self._held_back + self._stream.flush()
        self._held_back = ""
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
