"""From what people write to token ids: plain text, or messages through the model's chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cbatch.engine.detokenizer import TextStream
from cbatch.engine.errors import RequestError

Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}` with text content."""

# Stands for a special token's text inside a message while the template runs: private-use characters.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"


class ChatTokenizer:
    """A model's tokenizer and chat template.

    Special tokens that a person writes in a message stay text; only the template's own are special.
    """

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a fast tokenizer of transformers."""
        self._tokenizer = tokenizer
        self.backend = tokenizer.backend_tokenizer
        added = self.backend.get_added_tokens_decoder()
        self._special = {token.content: number for number, token in added.items() if token.special}
        ordered = sorted(self._special, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    @property
    def chat_template(self) -> str | None:
        """The template's source; of several, the one that serves when nothing else is asked for."""
        template: str | dict[str, str] | None = self._tokenizer.chat_template
        return template.get("default") if isinstance(template, dict) else template

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text as the tokenizer makes them, BOS included where it adds one, never twice."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        bos = self._tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation through the chat template, ready for the assistant's turn.

        Raises RequestError (`template_error`) where the template refuses the messages.
        """
        if not self.chat_template:
            raise RequestError("template_error", "The model has no chat template; give a prompt, not messages.")
        contents = [message.get("content") for message in messages]
        if not contents or not all(isinstance(content, str) for content in contents):
            raise RequestError("invalid_row", "Messages must be a list of at least one, each with text content.")
        pattern = self._special_pattern
        if pattern is None or not any(pattern.search(str(content)) for content in contents):
            return self._encode_rendered(self._render(messages))
        names = list(self._special)
        hidden = [
            {**message, "content": pattern.sub(lambda m: f"{_OPEN}{names.index(m[0])}{_CLOSE}", message["content"])}
            for message in messages
        ]
        return self._encode_mixed(self._render(hidden), names)

    def stream(self, prompt: Sequence[int], stop: Sequence[str]) -> TextStream:
        """Incremental text of an output that follows these prompt tokens."""
        return TextStream(self.backend, prompt, stop)

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is a program of the model's author and may raise anything
            raise RequestError("template_error", f"The chat template refused the messages: {error}") from error
        return str(text)

    def _encode_rendered(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _encode_mixed(self, rendered: str, names: list[str]) -> list[int]:
        """Encodes text whose own special tokens count and whose hidden ones are put back as text."""
        assert self._special_pattern is not None
        ids: list[int] = []
        place = 0
        for match in [*self._special_pattern.finditer(rendered), None]:
            piece = rendered[place : match.start() if match else None]
            piece = re.sub(f"{_OPEN}(\\d+){_CLOSE}", lambda m: names[int(m[1])], piece)
            if piece:
                plain = self._tokenizer(piece, add_special_tokens=False, split_special_tokens=True)
                ids += plain["input_ids"]
            if match:
                ids.append(self._special[match[0]])
                place = match.end()
        return ids
