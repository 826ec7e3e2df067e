"""Tools, and tokenizers whose chat templates write calls of them in each of the formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cbatch.base.outputs import FinishReason, ToolCall
from cbatch.text.loading import of_transformers
from cbatch.text.replies.declaration import ReplyFormat
from cbatch.text.replies.stream import OutputStream
from cbatch.text.tokenizer import ChatTokenizer
from tests.support.chat_templates import LLAMA3, MISTRAL_LIST, MISTRAL_NAMED, QWEN3
from tests.support.model_folder import make_tokenizer

CALL_TEMPLATES = {
    "Hermes": QWEN3,
    "Mistral, list": MISTRAL_LIST,
    "Mistral, names": MISTRAL_NAMED,
    "Mistral, names and ids": MISTRAL_NAMED.replace('"[ARGS]"', '"[CALL_ID]" + tool_call.id + "[ARGS]"'),
    "Mistral, bare names": MISTRAL_NAMED.replace('+ "[ARGS]"', ""),
    "Llama": LLAMA3,
}


class ParsedOutput(NamedTuple):
    """The parts of one output. `reasoning` is None if the model did not think, or wrote only white space."""

    text: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    note: str | None = None


def parse(
    reply_format: ReplyFormat,
    text: str,
    *,
    is_thinking: bool = False,
    tools: Any = None,
    reason: FinishReason | None = "stop",
) -> ParsedOutput:
    """The parts of a whole output."""
    return streamed(OutputStream(reply_format, is_thinking=is_thinking, tools=tools), [text], reason)


def streamed(stream: OutputStream, parts: Sequence[str], reason: FinishReason | None = "stop") -> ParsedOutput:
    """All that a stream gives, joined, and without reasoning that turned out to be the text."""
    deltas = [stream.push(part) for part in parts]
    end = stream.finish(reason)
    texts, reasoning = zip(*deltas, end.delta, strict=True)
    thoughts = "" if end.is_all_text else "".join(reasoning)
    return ParsedOutput("".join(texts), thoughts or None, end.calls, end.note)


TAGS = sorted(["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>"])


def tool(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F", "é"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {"leaf": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
    "properties": {"leaf": {"$ref": "#/$defs/leaf"}, "more": {"$ref": "#"}},
    "required": ["leaf"],
    "additionalProperties": False,
}
TOOLS = [tool("get_weather", WEATHER), tool("get", TREE), tool("now", None)]


def make_chat_tokenizer(template: str, *, are_special: bool = True) -> ChatTokenizer:
    """A tokenizer with a token for each tag; those of reasoning are not special, as in Qwen's models."""
    theirs = make_tokenizer()
    theirs.chat_template = template
    if are_special:
        theirs.add_special_tokens({"extra_special_tokens": TAGS})
    else:
        theirs.add_tokens(TAGS)
    theirs.add_tokens(["<think>", "</think>"])
    return ChatTokenizer(of_transformers(theirs))
