"""Splits the text of a chat model into reasoning, answer and tool calls, in the format that its chat template shows.

A template writes earlier answers back in the format in which the model writes them. It is only searched for tags;
it is not run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cbatch.engine.text.detokenizer import partial_match_length
from cbatch.engine.text.tool_calls import LLAMA, TOOL_TAGS, ToolCall, extract_tool_calls

_THINK_TAG = re.compile(r"<((?:\w+:)?(?:think(?:ing)?|thoughts?|reason(?:ing)?))>")
_OTHER_THINK_TAGS = (("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>"), ("◁think▷", "◁/think▷"))
# Llama's own instruction, or a call written back: {"name": function name, "parameters": dictionary of ...}
_LLAMA_CALL = re.compile(r'\{\\?"name\\?": .{0,80}?\\?"parameters\\?": ', re.DOTALL)


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """The parts of one output. `reasoning` is None if the model did not think, or wrote only white space."""

    text: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class OutputParser:
    """Parses the outputs of one model.

    think_tags:    the tags around its reasoning; None if it has none
    tool_call_tag: the tag that its tool calls begin with: HERMES, MISTRAL or LLAMA; None for an unknown format
    """

    think_tags: tuple[str, str] | None = None
    tool_call_tag: str | None = None

    @classmethod
    def from_template(cls, source: str) -> OutputParser:
        """The parser for a chat template's source. Of several pairs of think tags it takes the first."""
        pairs = [(match[0], f"</{match[1]}>") for match in _THINK_TAG.finditer(source)]
        pairs += [pair for pair in _OTHER_THINK_TAGS if pair[0] in source]
        pairs = [pair for pair in pairs if pair[1] in source]
        tool_call_tag = next((tag for tag in TOOL_TAGS if tag in source), None)
        if tool_call_tag is None and _LLAMA_CALL.search(source):
            tool_call_tag = LLAMA
        return cls(min(pairs, key=lambda pair: source.index(pair[0]), default=None), tool_call_tag)

    @property
    def special_tags(self) -> tuple[str, ...]:
        """All tags that `parse` looks for. Those that are special tokens have to stay in the text it is given.

        Without tools, `think_tags` is enough and keeps the other tags out of the text.
        """
        return (self.think_tags or ()) + (TOOL_TAGS[self.tool_call_tag] if self.tool_call_tag else ())

    def opens_thinking(self, prompt_end: str) -> bool:
        """Whether a rendered prompt ends with an opening think tag, so that the output begins as reasoning.

        prompt_end: its last tokens as text, with special tokens, without a beginning of the answer
        """
        return self.think_tags is not None and prompt_end.rstrip().endswith(self.think_tags[0])

    def split(self, text: str, *, is_thinking: bool = False) -> tuple[str | None, str]:
        """Reasoning and text of an output that may still grow. Neither ever takes back what it has shown.

        What may become a think tag, or white space around one, is in neither until that is decided.
        """
        return self._divide(text, is_thinking, is_partial=True)

    def parse(
        self, text: str, *, is_thinking: bool = False, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> ParsedOutput:
        """The parts of a whole output. Never raises: what is not a think block or a tool call stays text.

        Only a block at the beginning counts as reasoning, and its first closing tag ends it. If it is not closed, the
        whole output is reasoning.

        is_thinking: the prompt has opened the think tag (see `opens_thinking`)
        tools:       the request's tools, as `check_tools` takes them; without any, no tool calls are looked for
        """
        reasoning, text = self._divide(text, is_thinking, is_partial=False)
        calls: list[ToolCall] = []
        if tools and self.tool_call_tag is not None:
            text, calls = extract_tool_calls(text, self.tool_call_tag, tools)
        return ParsedOutput(text, reasoning, tuple(calls))

    def _divide(self, text: str, is_thinking: bool, *, is_partial: bool) -> tuple[str | None, str]:
        if self.think_tags is None:
            return None, text
        opening, closing = self.think_tags
        start = text.lstrip()
        if start.startswith(opening):  # even if the prompt has opened it: some models write the tag once more
            body = start[len(opening) :]
        elif is_partial and opening.startswith(start):
            return None, ""
        elif is_thinking:
            body = text
        else:
            return None, text
        reasoning, closed, rest = body.partition(closing)
        if is_partial and not closed:
            reasoning = reasoning[: len(reasoning) - partial_match_length(reasoning, closing)]
        reasoning = reasoning.strip("\n")
        return (reasoning if reasoning.strip() else None), rest.lstrip("\n")
