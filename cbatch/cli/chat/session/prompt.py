"""From a conversation to what the model is given."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import TYPE_CHECKING

from cbatch.cli.chat.session.session import Message

if TYPE_CHECKING:
    from cbatch.engine import Engine


def encode(engine: Engine, messages: Sequence[Message], reply_prefix: str = "") -> list[int]:
    """Token ids of a conversation, and of the beginning of its next answer.

    Without a chat template it is plain text to continue: each answer follows its question, each question on a new line.
    """
    if takes_messages(engine):
        return engine.encode({"messages": messages}, today=date.today(), answer=reply_prefix)
    return engine.encode(as_plain_text(messages) + reply_prefix, raw=True)


def takes_messages(engine: Engine) -> bool:
    """Whether its model is given messages: one without a tokenizer too, which then says that it cannot."""
    return engine.tokenizer is None or bool(engine.tokenizer.chat_template)


def as_plain_text(messages: Sequence[Message]) -> str:
    """A conversation for a model without a chat template."""
    parts = [("\n" if message["role"] == "user" else "") + message["content"] for message in messages]
    return "".join(parts).removeprefix("\n")
