"""From the text a chat model writes to reasoning, text and tool calls, by what its chat template defines.

A template shows the form of a model's output: it writes earlier answers back in the same form. All that is read here
is which tags stand in its source; it is not run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cbatch.engine.base.errors import RequestError
from cbatch.engine.text.partial_match import overlap
from cbatch.engine.text.tool_calls import LLAMA, TOOL_TAGS, ToolCall, take_tool_calls, whole_json

_THINK_TAG = re.compile(r"<((?:\w+:)?(?:think(?:ing)?|thoughts?|reason(?:ing)?))>")
_OTHER_THINK_TAGS = (("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>"), ("◁think▷", "◁/think▷"))
# Llama's own instruction, or a call written back: {"name": function name, "parameters": dictionary of ...}
_LLAMA_CALL = re.compile(r'\{\\?"name\\?": .{0,80}?\\?"parameters\\?": ', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts of one output. `reasoning` is None where the model did not think, or only white space."""

    text: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The form of a model's output.

    think:    the tags around its reasoning, where it has them
    tool_tag: the tag that its tool calls begin with: HERMES, MISTRAL or LLAMA; None for a form that is not known
    """

    think: tuple[str, str] | None = None
    tool_tag: str | None = None

    @classmethod
    def of_template(cls, template: str | None) -> AnswerFormat:
        """The form that the source of a chat template shows; of several pairs of think tags the first."""
        source = template or ""
        pairs = [(match[0], f"</{match[1]}>") for match in _THINK_TAG.finditer(source)]
        pairs += [pair for pair in _OTHER_THINK_TAGS if pair[0] in source]
        pairs = [pair for pair in pairs if pair[1] in source]
        tool_tag = next((tag for tag in TOOL_TAGS if tag in source), None)
        if tool_tag is None and _LLAMA_CALL.search(source):
            tool_tag = LLAMA
        return cls(min(pairs, key=lambda pair: source.index(pair[0]), default=None), tool_tag)

    @property
    def special_tags(self) -> tuple[str, ...]:
        """All tags that `parse` looks for. Those that are special tokens must not be left out of the text it is given.

        For a row without tools `think` is enough, and keeps the others out of its text.
        """
        return (self.think or ()) + (TOOL_TAGS[self.tool_tag] if self.tool_tag else ())

    def opens_thinking(self, prompt_end: str) -> bool:
        """Whether a rendered prompt ends with an opening think tag, so that the output begins within it.

        prompt_end: its last tokens as text, special tokens and all, without the beginning of an answer to go on with
        """
        return self.think is not None and prompt_end.rstrip().endswith(self.think[0])

    def split(self, text: str, *, is_thinking: bool = False) -> tuple[str | None, str]:
        """Reasoning and text of an output that may still grow; neither ever takes back what it has shown.

        What may turn out a think tag, or white space around one, is in neither until it is decided.
        """
        return self._divide(text, is_thinking, is_partial=True)

    def parse(
        self, text: str, *, is_thinking: bool = False, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Answer:
        """The parts of a whole output. Never raises, and what is not a think block or a tool call stays text.

        Only a block at the beginning counts as reasoning, and its first closing tag ends it. One that is not closed
        is all reasoning.

        is_thinking: the prompt has opened the think tag (see `opens_thinking`)
        tools:       those of the row, as `check_tools` takes them; tool calls are looked for only where there are any
                     (see `take_tool_calls`)
        """
        reasoning, text = self._divide(text, is_thinking, is_partial=False)
        if not tools or self.tool_tag is None:
            return Answer(text, reasoning, ())
        text, calls = take_tool_calls(text, self.tool_tag, tools)
        return Answer(text, reasoning, tuple(calls))

    def _divide(self, text: str, is_thinking: bool, *, is_partial: bool) -> tuple[str | None, str]:
        if self.think is None:
            return None, text
        opening, closing = self.think
        start = text.lstrip()
        if start.startswith(opening):  # also where the prompt has opened it: some models write it once more
            body = start[len(opening) :]
        elif is_partial and opening.startswith(start):
            return None, ""
        elif is_thinking:
            body = text
        else:
            return None, text
        reasoning, closed, rest = body.partition(closing)
        if is_partial and not closed:
            reasoning = reasoning[: len(reasoning) - overlap(reasoning, closing)]
        reasoning = reasoning.strip("\n")
        return (reasoning if reasoning.strip() else None), rest.lstrip("\n")


def check_tools(value: Any) -> list[dict[str, Any]]:
    """The `tools` field of a row. Raises RequestError (`invalid_row`) where it is not a list of OpenAI's functions."""
    if not isinstance(value, list):
        raise RequestError("invalid_row", "tools must be a list of functions.")
    for number, tool in enumerate(value, start=1):
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            sentence = f'Tool {number} must be an object {{"type": "function", "function": {{"name": ...}}}}.'
            raise RequestError("invalid_row", sentence)
        function = tool["function"]
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError("invalid_row", f"The function of tool {number} must have a name.")
        if not isinstance(function.get("parameters"), dict | None):
            raise RequestError("invalid_row", f"The parameters of tool {number} must be a JSON schema, an object.")
    return value


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates want them; the given ones are not changed.

    Arguments of earlier tool calls, JSON text in OpenAI's form, become objects where they are ones, and no content
    beside tool calls becomes empty content.
    """
    return [_with_calls(message) if message.get("role") == "assistant" else dict(message) for message in messages]


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    changed = [_with_object(call) for call in calls] if isinstance(calls, list) else calls
    content = message.get("content")
    return {**message, "content": "" if content is None else content, "tool_calls": changed}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    parsed = whole_json(arguments) if isinstance(arguments, str) else None
    if not parsed or not isinstance(parsed[0], dict):
        return call
    return {**call, "function": {**call["function"], "arguments": parsed[0]}}
