"""From a conversation to the request for its next reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

from cbatch.cli.chat.session.session import Message

if TYPE_CHECKING:
    from cbatch.api import Engine
    from cbatch.base.request import Request


def reply_request(
    engine: Engine,
    messages: Sequence[Message],
    reply_prefix: str,
    template_kwargs: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] = (),
) -> Request:
    """A request for the next reply of a conversation.

    Without a chat template the model continues plain text: each message on a new line, directly followed by its reply.

    reply_prefix:    the beginning of the reply, if it is continued
    template_kwargs: variables for the chat template
    tools:           functions that the model may call, in OpenAI's form
    """
    from cbatch.base.request import Request
    from cbatch.base.template_options import TemplateOptions

    if takes_messages(engine):
        template = TemplateOptions(kwargs=template_kwargs, today=date.today())
        return Request(messages=messages, template=template, answer=reply_prefix, tools=tools)
    return Request(text=as_plain_text(messages) + reply_prefix)


def takes_messages(engine: Engine) -> bool:
    """Whether the model is given messages: also without a tokenizer, where the engine says that it cannot."""
    return engine.tokenizer is None or bool(engine.tokenizer.chat_template)


def as_plain_text(messages: Sequence[Message]) -> str:
    """A conversation for a model without a chat template."""
    parts = [("\n" if message["role"] == "user" else "") + message["content"] for message in messages]
    return "".join(parts).removeprefix("\n")
