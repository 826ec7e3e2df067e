"""The declaration of a reply format: the markup around reasoning and around tool calls.

Each file of `cbatch/text/reply_formats` is a declaration, and has the names that are documented here. One that is
`like` another has what that says, too, except what it says itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

PLACE = re.compile(r"\{(name|id|json|arguments|python|gemma|key|kind|value)\}")
"""A place of a template that a value takes."""

NAME = r"[^\s<>\[\](){}\"'`,;:=]+"
"""A name that stands in markup, as a regular expression."""


@dataclass(frozen=True)
class Reasoning:
    """The markup around reasoning.

    opening, closing: the tags; in a format with headers, `opening` is what the header of reasoning holds
    close:            what a model writes to end its reasoning; None for the closing tag between line breaks
    is_shown:         whether chat templates of such models show the tags as they are
    """

    opening: str
    closing: str
    close: str | None = None
    is_shown: bool = True

    @property
    def closing_text(self) -> str:
        return f"\n{self.closing}\n\n" if self.close is None else self.close


@dataclass(frozen=True)
class Calls:
    """How a model writes calls of tools.

    A call is written as `call`, with the function's name at `{name}`, a number or a word at `{id}`, and its arguments
    at one of these places:
      {json}       a JSON object; a call that is itself a JSON object is read as such, whatever the order of its keys
      {arguments}  each argument as `parameter`: its name at `{key}`, its value at `{value}`, as text or as JSON, which
                   its schema or the word at `{kind}` decides
      {python}     keyword arguments of Python
      {gemma}      the notation of Gemma 4
    White space of these texts is what models were trained to write; any other is read as well.

    opening, closing: around a block of calls
    between:          between calls of a block; None if each call has a block of its own
    after:            between blocks; None if there is one block at most
    bare:             what a whole text that is a call begins with, if a block needs no opening
    keys:             of a call that is a JSON object: those of its name and arguments; empty if the name is a key
    head:             reads what stands in front of the arguments instead of `call`: a regular expression, with {name}
    ids:              what an id is made of, as a regular expression
    kinds:            the words at `{kind}` for text and for JSON
    nests:            a value may be made of parameters, too; those called `item` are a list
    is_forcible:      whether a model can be made to write such a call
    also:             other forms that are read in such a block
    """

    call: str = '{"name": "{name}", "arguments": {json}}'
    opening: str = ""
    closing: str = ""
    between: str | None = None
    after: str | None = None
    parameter: str = ""
    bare: str = ""
    keys: tuple[str, str] | tuple[()] = ("name", "arguments")
    head: str = ""
    ids: str = "[0-9]+"
    kinds: tuple[str, str] = ("", "")
    nests: bool = False
    is_forcible: bool = True
    also: tuple[Calls, ...] = ()

    @cached_property
    def parts(self) -> tuple[str, str, str]:
        """The text in front of the arguments of a call, the name of their place, and the text behind them."""
        places = {"json", "arguments", "python", "gemma"}
        found = next(match for match in PLACE.finditer(self.call) if match[1] in places)
        return self.call[: found.start()], found[1], self.call[found.end() :]

    @property
    def bare_opening(self) -> str:
        """The text in front of calls of models that leave out what they may."""
        return self.opening if self.opening.startswith(self.bare) else ""

    @property
    def is_object(self) -> bool:
        return re.match(r'\{\s*"', self.call) is not None

    @cached_property
    def tags(self) -> tuple[str, ...]:
        """The beginnings of calls: the first line of a block, and of a call, since some models leave out the block."""
        starts = (self.opening, "" if self.is_object else PLACE.split(self.call)[0])
        return tuple(filter(None, (text.strip().partition("\n")[0].rstrip(" [\n") for text in starts)))

    @property
    def end_tag(self) -> str:
        return self.closing.strip().removeprefix("]" if self.opening.rstrip().endswith("[") else "").strip()


@dataclass(frozen=True)
class ReplyFormat:
    """The form of a model's replies.

    name:      for --reply-format
    shown_by:  regular expressions that a chat template of such a model matches, all of them
    rank:      of several formats that a template shows, the one of the highest rank is the model's
    wrapper:   tags around the text, which may be missing
    dropped:   tags that are no part of the text, wherever they stand
    headers:   beginnings of headers, such as those of the channels of gpt-oss; a header ends with `header_end`. It
               begins a call if it matches `to_tool`, reasoning if it holds the opening of that, and otherwise text
    first:     what a header may begin with as well if the reply begins with it
    lead:      what prompts end with that belongs to the first tag
    """

    name: str
    reasoning: Reasoning | None = None
    calls: Calls | None = None
    shown_by: tuple[str, ...] = ()
    rank: int = 1
    wrapper: tuple[str, str] | None = None
    dropped: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    header_end: str = ""
    to_tool: str = r"(?!)"
    first: tuple[str, ...] = ()
    lead: str = ""

    def is_shown(self, source: str) -> bool:
        """Whether a chat template, or a list of tokens, shows the format."""
        return bool(self.shown_by) and all(re.search(one, source, re.DOTALL) for one in self.shown_by)

    def markup(self, *, with_calls: bool) -> str:
        """All markup, a piece a line. Special tokens in it have to stay in the text of an output."""
        pieces = [*(self.wrapper or ()), *self.dropped, *self.headers, self.header_end]
        if self.reasoning is not None:
            pieces += [self.reasoning.opening, self.reasoning.closing]
        for calls in (self.calls, *self.calls.also) if self.calls is not None and with_calls else ():
            pieces += [calls.opening, calls.closing, calls.call, calls.parameter, calls.head.replace("\\", "")]
        return "\n".join(filter(None, pieces))

    def describe(self) -> str:
        """One line for people."""
        parts = [f"{self.reasoning.opening} reasoning"] if self.reasoning is not None else []
        parts += [f"tool calls as {self.name}"] if self.calls is not None else []
        return ", ".join(parts) or "text alone"
