"""Splits the text of a chat model into reasoning, answer and tool calls, in the format that its chat template shows.

A template writes earlier answers back in the format in which the model writes them. It is only searched for tags;
it is not run.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from cbatch.base.outputs import ToolCall
from cbatch.text.detokenizer import partial_match_length
from cbatch.text.tool_calls import LLAMA, TOOL_TAGS, extract_tool_calls

_THINK_TAG = re.compile(r"<((?:\w+:)?(?:think(?:ing)?|thoughts?|reason(?:ing)?))>")
_OTHER_THINK_TAGS = (("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>"), ("◁think▷", "◁/think▷"))
# Llama's own instruction, or a call written back: {"name": function name, "parameters": dictionary of ...}
_LLAMA_CALL = re.compile(r'\{\\?"name\\?": .{0,80}?\\?"parameters\\?": ', re.DOTALL)


class ParsedDelta(NamedTuple):
    """The text and the reasoning that a part of an output adds."""

    text: str = ""
    reasoning: str = ""


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
        """All tags that are looked for. Those that are special tokens have to stay in the text of an output.

        Without tools, `think_tags` is enough and keeps the other tags out of the text.
        """
        return (self.think_tags or ()) + (TOOL_TAGS[self.tool_call_tag] if self.tool_call_tag else ())


class OutputStream:
    """Takes one output apart while it comes, in time linear in its length, and never takes back what it has given.

    The deltas joined, and the tool calls, are the same however the output is cut. What is not a think block or a tool
    call stays text. Only a block at the beginning counts as reasoning, and its first closing tag ends it; if it is not
    closed, the whole output is reasoning. What may become a tag, and white space that may go with it, is held back. If
    there are tools, everything from the first tag of a tool call on waits for the end, and so does a text in Llama's
    format that begins with a brace.
    """

    def __init__(
        self,
        parser: OutputParser,
        *,
        is_thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        prefix: str = "",
    ) -> None:
        """
        is_thinking: the prompt has opened the think tag
        tools:       the request's tools, as `check_tools` takes them; without any, no tool calls are looked for
        prefix:      the beginning of the output, which was shown before, as if it were all; the stream gives only what
                     the rest adds
        """
        self._tools = tools or ()
        self._call_tag = parser.tool_call_tag if tools else None
        self._text = self._reasoning = ""  # for the next delta
        self._answer: list[str] = []  # all text, with tool calls
        self._num_shown = 0  # characters of it that have been given
        self._is_plain = False  # whether all that comes is text
        self._parts = self._split(parser.think_tags, is_thinking)
        self._shown_before = ParsedDelta()  # what was held back of the prefix, and was shown nevertheless
        self._calls_before: tuple[ToolCall, ...] = ()
        next(self._parts, None)
        if prefix:
            self.push(prefix)
            before = OutputStream(parser, is_thinking=is_thinking, tools=tools)
            before.push(prefix)
            self._shown_before, self._calls_before = before.finish()

    def push(self, delta: str) -> ParsedDelta:
        """Takes the next part of the output, and returns what can be shown now."""
        if self._is_plain:
            return ParsedDelta(delta)
        with suppress(StopIteration):
            self._parts.send(delta)
        return self._new()

    def finish(self) -> tuple[ParsedDelta, tuple[ToolCall, ...]]:
        """The text held back, and the tool calls, once the output has ended."""
        for _ in self._parts:  # each turn gives it None
            pass
        calls: tuple[ToolCall, ...] = ()
        if self._call_tag is not None:
            text, found = extract_tool_calls("".join(self._answer), self._call_tag, self._tools)
            self._text += text[self._num_shown :]
            num_before = len(self._calls_before)
            calls = tuple(found[num_before:] if tuple(found[:num_before]) == self._calls_before else found)
        return self._new(), calls

    def _new(self) -> ParsedDelta:
        text, shown_text = _without_shown(self._text, self._shown_before.text)
        reasoning, shown_reasoning = _without_shown(self._reasoning, self._shown_before.reasoning)
        self._shown_before = ParsedDelta(shown_text, shown_reasoning)
        self._text = self._reasoning = ""
        return ParsedDelta(text, reasoning)

    def _split(self, think_tags: tuple[str, str] | None, is_thinking: bool) -> Generator[None, str | None]:
        """Adds to `_text` and `_reasoning` what can be shown. Gets the output delta by delta, and None at the end."""
        text = ""
        if think_tags is not None:
            (opening, closing), start, word = think_tags, list[str](), ""
            while word != opening and opening.startswith(word) and (delta := (yield)) is not None:
                start.append(delta)
                word += delta if word else delta.lstrip()
            text = "".join(start)
            if word.startswith(opening):
                self._shown_before = ParsedDelta()  # the prefix ended within this tag or before it
                is_thinking, text = True, word[len(opening) :]
            if is_thinking:
                text, finder = (yield from _after_line_breaks(text)), _TagFinder(closing, "\n")
                rest = None
                while rest is None:
                    reasoning, rest = finder.push(text)
                    self._reasoning += reasoning
                    if rest is None:
                        if (delta := (yield)) is None:
                            self._reasoning += finder.rest()
                            return
                        text = delta
                text = yield from _after_line_breaks(rest)
        if self._call_tag is None:
            self._text += text
            self._is_plain = True
            return
        finder, shows = _TagFinder(self._call_tag, None), True
        delta = text
        while delta is not None:
            self._answer.append(delta)
            if shows:
                new, rest = finder.push(delta)
                may_be_call = self._call_tag == LLAMA and self._num_shown == 0 and new.lstrip().startswith("{")
                if not may_be_call:
                    self._text += new
                    self._num_shown += len(new)
                shows = not may_be_call and rest is None
            delta = yield


def _after_line_breaks(text: str) -> Generator[None, str | None, str]:
    """The text without line breaks at its beginning; if it has nothing else, the next one. Empty at the end."""
    while not (text := text.lstrip("\n")):
        if (delta := (yield)) is None:
            break
        text = delta
    return text


class _TagFinder:
    """Looks for a tag in a text that comes in parts.

    Before the tag is found, it holds back what may begin it and white space in front of that. A text that is nothing
    but white space is held back altogether.
    """

    def __init__(self, tag: str, white_space: str | None) -> None:
        """`white_space` are the characters that may go with the tag; None means all white space."""
        self._tag = tag
        self._white_space = white_space
        self._is_blank = True
        self._spaces: list[str] = []
        self._partial_tag = ""

    def push(self, delta: str) -> tuple[str, str | None]:
        """The text that can be shown, and that after the tag: None if it has not come yet."""
        before, tag, after = (self._partial_tag + delta).partition(self._tag)
        if not tag:
            end = len(before) - partial_match_length(before, self._tag)
            before, self._partial_tag = before[:end], before[end:]
        text = before.rstrip(self._white_space)
        if self._is_blank and not text.strip():
            text = ""
        spaces = before[len(text) :]
        if text:
            text = "".join(self._spaces) + text
            self._is_blank = False
            self._spaces.clear()
        self._spaces.append(spaces)
        return text, after if tag else None

    def rest(self) -> str:
        """A possible beginning of the tag at the end of the text, with the white space in front of it."""
        return "".join(self._spaces) + self._partial_tag if self._partial_tag else ""


def _without_shown(new: str, shown: str) -> tuple[str, str]:
    """The part of `new` that was not shown, and what of `shown` may still come again."""
    if new.startswith(shown):
        return new[len(shown) :], ""
    return ("", shown[len(new) :]) if shown.startswith(new) else (new, "")
