"""Takes the text of a reply apart while it comes: into reasoning, text and tool calls."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from cbatch.base.outputs import FinishReason, ToolCall
from cbatch.text.detokenizer import partial_match_length
from cbatch.text.replies.calls import find_calls
from cbatch.text.replies.declaration import ReplyFormat

Kind = Literal["text", "reasoning"]
KINDS: tuple[Kind, Kind] = ("text", "reasoning")

MAX_HEADER = 200
"""Most characters of a header. What is longer is none."""

NOT_CLOSED = "The reasoning was not closed, so all of it is the text."
NO_TEXT = "The reasoning was not closed, so there is no text."


class ParsedDelta(NamedTuple):
    """The text and the reasoning that a part of an output adds."""

    text: str = ""
    reasoning: str = ""


class Ending(NamedTuple):
    """The addition of the end of an output.

    calls:      the calls of tools
    note:       what is unusual about the output, as a sentence
    is_all_text: the text is all of the output: what was given as reasoning was none
    """

    delta: ParsedDelta = ParsedDelta()
    calls: tuple[ToolCall, ...] = ()
    note: str | None = None
    is_all_text: bool = False


class OutputStream:
    """Takes one output apart while it comes, in time linear in its length, and never takes back what it has given.

    The deltas joined, and the tool calls, are the same however the output is cut. What is not a think block or a tool
    call stays text. Only a block at the beginning counts as reasoning, unless the format has headers, and its first
    closing tag ends it. What may become a tag, and white space that may go with it, is held back. If there are tools,
    everything from the first tag of a tool call on waits for the end, and so does a text that begins as calls without
    a tag do.
    """

    def __init__(
        self,
        reply_format: ReplyFormat,
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
        self._format = reply_format
        self._tools = tools or ()
        self._calls = reply_format.calls if tools else None
        self._opened_by_template = is_thinking and reply_format.reasoning is not None
        self._new_pieces: dict[str, list[str]] = {"text": [], "reasoning": []}  # for the next delta
        self._has = {"text": False, "reasoning": False}
        self._starts_piece = False
        self._given = list[str]()  # all reasoning that was given
        self._partial = ""  # what is held back and may become a tag, with white space in front of it
        self._rest: list[str] | None = None  # everything from the first call on
        self._is_open = False  # whether the output is inside its reasoning
        self._is_plain = False  # whether all that comes is text
        self._shown_before = ParsedDelta()  # what was held back of the prefix, and was shown nevertheless
        self._calls_before: tuple[ToolCall, ...] = ()
        self._parts = self._split()
        next(self._parts, None)
        if prefix:
            self.push(prefix)
            before = OutputStream(reply_format, is_thinking=is_thinking, tools=tools)
            before.push(prefix)
            self._shown_before, self._calls_before, *_ = before.finish(None)
            self._given.clear()

    def push(self, delta: str) -> ParsedDelta:
        """Takes the next part of the output, and returns what can be shown now."""
        if self._is_plain:
            return ParsedDelta(delta)
        with suppress(StopIteration):
            self._parts.send(delta)
        return self._new()

    def finish(self, reason: FinishReason | None = "stop") -> Ending:
        """Gives what was held back, and the tool calls, once the output has ended.

        reason: None if the output is going on; it is then taken for what it is so far
        """
        for _ in self._parts:  # each turn gives it None
            pass
        is_cut, calls, note = reason == "length", list[ToolCall](), None
        if not self._has["text"] and self._rest is None:
            self._partial = self._partial.removeprefix(self._format.lead)
        if self._rest is not None:
            calls = self._finish_calls("".join(self._rest), is_cut=is_cut)
        elif self._partial and not is_cut:
            self._add("reasoning" if self._is_open else "text", self._partial)
        elif is_cut and not self._is_open and not self._partial.strip():
            self._add("text", self._partial)
        delta, number = self._new(), len(self._calls_before)
        is_all_text = False
        if self._is_open and reason == "stop" and (whole := "".join(self._given)):
            is_all_text = self._opened_by_template
            note = NOT_CLOSED if is_all_text else NO_TEXT
            delta = ParsedDelta(whole) if is_all_text else delta
        known = tuple(calls[:number]) == self._calls_before
        return Ending(delta, tuple(calls[number:] if known else calls), note, is_all_text)

    def _new(self) -> ParsedDelta:
        text, reasoning = map("".join, self._new_pieces.values())
        text, shown_text = _without_shown(text, self._shown_before.text)
        reasoning, shown_reasoning = _without_shown(reasoning, self._shown_before.reasoning)
        self._shown_before = ParsedDelta(shown_text, shown_reasoning)
        self._new_pieces = {"text": [], "reasoning": []}
        self._given.append(reasoning)
        return ParsedDelta(text, reasoning)

    def _add(self, kind: Kind, piece: str) -> None:
        """Adds to what can be shown. A further piece of the same kind begins on a line of its own."""
        if piece:
            self._new_pieces[kind] += ["\n" if self._starts_piece and self._has[kind] else "", piece]
            self._has[kind], self._starts_piece = True, False

    def _finish_calls(self, rest: str, *, is_cut: bool) -> list[ToolCall]:
        assert self._calls is not None
        pieces, calls, was_cut = find_calls(rest, self._calls, self._tools, is_cut=is_cut)
        if self._format.headers or (self._format.dropped and (calls or was_cut)):
            for piece in pieces:
                inner = OutputStream(replace(self._format, lead=""))
                new, last = inner.push(piece), inner.finish("length" if is_cut else None).delta
                for kind in KINDS:
                    text = getattr(new, kind) + getattr(last, kind)
                    self._starts_piece = True
                    self._add(kind, text.strip() if calls else text)
        elif calls or was_cut:
            self._add("text", (self._partial + pieces[0]).rstrip() if pieces[0].strip() else "")
            for piece in pieces[1:]:
                self._starts_piece = True
                self._add("text", piece.strip())
        else:
            self._add("text", self._partial + rest.removeprefix("" if self._has["text"] else self._format.lead))
        return calls

    def _kind_of(self, tag: str) -> Literal["calls", "reasoning", "wrapper", "dropped"]:
        """The part that begins behind a tag, or a header."""
        made, calls = self._format, self._calls
        if made.headers and tag.endswith(made.header_end) and re.search(made.to_tool, tag):
            return "calls" if calls is not None else "dropped"
        if made.reasoning is not None and made.reasoning.opening in tag:
            return "reasoning"
        if calls is not None and (tag in calls.tags or tag == calls.bare):
            return "calls"
        return "wrapper" if made.wrapper and tag == made.wrapper[0] else "dropped"

    def _split(self) -> Generator[None, str | None]:
        """Adds what can be shown. Gets the output delta by delta, and None at the end."""
        made, calls, text = self._format, self._calls, "" if self._opened_by_template else self._format.lead
        opening = [made.reasoning.opening] if made.reasoning is not None and not made.headers else []
        wrapper = list(made.wrapper[:1] if made.wrapper else ())
        bare = [calls.bare] if calls is not None and calls.bare else []
        tags = [*made.headers, *made.dropped, *(calls.tags if calls is not None and not made.headers else ())]
        # A model that does not reason may close what nothing has opened.
        unopened = [made.reasoning.closing] if made.reasoning is not None else []
        self._is_open, firsts = self._opened_by_template, [*opening, *unopened, *wrapper, *bare, *made.first]
        if self._is_open:
            finder = _TagFinder((), opening, made)  # which the model may write once more
            tag = None
            while tag is None and finder.is_blank and (delta := (yield)) is not None:
                text, tag, rest = finder.push(delta)
            text = finder.rest() + text if tag is None else rest
            self._shown_before = self._shown_before if tag is None else ParsedDelta()
        while True:
            if self._is_open:
                assert made.reasoning is not None
                text = yield from _after_line_breaks(text)
                finder = _TagFinder([made.reasoning.closing, *made.headers], (), made, "\n")
            else:
                if not tags and not firsts:
                    self._add("text", text)
                    self._is_plain = True
                    return
                finder = _TagFinder(tags, firsts, made)
            while True:
                new, tag, text = finder.push(text)
                self._add("reasoning" if self._is_open else "text", new)
                if tag is not None:
                    break
                if not self._is_open and not tags and not finder.is_blank:
                    self._is_plain = True
                    return
                if (delta := (yield)) is None:
                    self._partial = finder.rest() if finder.partial or not self._is_open else ""
                    return
                text = delta
            is_closing = self._is_open and made.reasoning is not None and tag == made.reasoning.closing
            kind = "dropped" if is_closing else self._kind_of(tag)
            if kind == "calls":
                self._is_open, self._partial, self._rest = False, finder.spaces, [tag + text]
                while (delta := (yield)) is not None:
                    self._rest.append(delta)
                return
            if not is_closing and not self._has["text"]:
                self._shown_before = ParsedDelta()  # the prefix ended within this tag or before it
            if kind == "reasoning" and not made.headers:
                self._opened_by_template = False
            self._is_open = kind == "reasoning"
            if kind == "wrapper" and made.wrapper:
                tags = [*tags, made.wrapper[1]]
            firsts = [*(wrapper if is_closing else ()), *(bare if not self._has["text"] else ())]
            self._starts_piece = True
            text = yield from _after_line_breaks(text)


def _after_line_breaks(text: str) -> Generator[None, str | None, str]:
    """The text without line breaks at its beginning; if it has nothing else, the next one. Empty at the end."""
    while not (text := text.lstrip("\n")):
        if (delta := (yield)) is None:
            break
        text = delta
    return text


class _TagFinder:
    """Looks for tags in a text that comes in parts.

    Before one is found, it holds back what may begin it and white space in front of that. A text that is nothing but
    white space is held back altogether.
    """

    def __init__(
        self, tags: Sequence[str], firsts: Sequence[str], made: ReplyFormat, white_space: str | None = None
    ) -> None:
        """
        firsts:      tags that count only if nothing but white space is in front of them
        white_space: characters that may go with a tag; None means all white space
        """
        self._tags, self._firsts = tuple(tags), (*tags, *firsts)
        self._headers, self._header_end = (*made.headers, *made.first), made.header_end
        self._words = made.first  # which may also be text
        self._white_space = white_space if tags else ""
        self._pattern = re.compile("|".join(map(re.escape, sorted(self._tags, key=len, reverse=True))) or r"(?!)")
        self.is_blank = True
        self._spaces: list[str] = []
        self.partial = ""

    @property
    def spaces(self) -> str:
        return "".join(self._spaces)

    def push(self, delta: str) -> tuple[str, str | None, str]:
        """The text that can be shown, the next tag, and what is behind it. The tag is None if none has come yet."""
        text = self.partial + delta
        start, end = self._find(text)
        before, tag, after = text[:start], text[start:end] if end is not None else None, text[end:] if end else ""
        self.partial = text[start:] if tag is None else ""
        shown = before.rstrip(self._white_space)
        if self.is_blank and not shown.strip():
            shown = ""
        spaces = before[len(shown) :]
        if shown:
            shown = self.spaces + shown
            self.is_blank = False
            self._spaces.clear()
        self._spaces.append(spaces)
        return shown, tag, after

    def rest(self) -> str:
        """A possible beginning of a tag at the end of the text, with the white space in front of it."""
        return self.spaces + self.partial

    def _find(self, text: str) -> tuple[int, int | None]:
        """Where the next tag begins, and where it ends; no end if it has not come yet."""
        if self.is_blank:
            word = text.lstrip()
            first = max((tag for tag in self._firsts if word.startswith(tag)), key=len, default=None)
            if first in self._words and len(word) >= MAX_HEADER and self._header_end not in word[:MAX_HEADER]:
                first = None
            start = len(text) - len(word)
            if any(tag.startswith(word) and tag != first for tag in self._firsts):
                return start, None
            if first is not None:
                return start, self._end(text, start, first)
        if found := self._pattern.search(text):
            return found.start(), self._end(text, found.start(), found[0])
        return len(text) - max((partial_match_length(text, tag) for tag in self._tags), default=0), None

    def _end(self, text: str, start: int, tag: str) -> int | None:
        end = start + len(tag)
        if tag in self._headers:
            stop = text.find(self._header_end, end)
            if stop < 0:
                return None if len(text) - start < MAX_HEADER else end
            return stop + len(self._header_end) if stop - start < MAX_HEADER else end
        return end


def _without_shown(new: str, shown: str) -> tuple[str, str]:
    """The part of `new` that was not shown, and what of `shown` may still come again."""
    if new.startswith(shown):
        return new[len(shown) :], ""
    return ("", shown[len(new) :]) if shown.startswith(new) else (new, "")
