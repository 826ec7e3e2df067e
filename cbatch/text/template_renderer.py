"""Renders chat templates without letting one hold up the run: here if its work is bounded, else in another process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from typing import Any

from cbatch.base.errors import ModelError
from cbatch.isolate.child import TOO_LARGE, Limits
from cbatch.isolate.sandbox import Sandbox
from cbatch.isolate.worker import Worker, WorkerDied, WorkerFailed
from cbatch.text.chat_template import render_chat
from cbatch.text.template_bounds import BOUNDS, MAX_GROWTH, Bounds, TooMuchWork, bounded

LIMITS = Limits(memory=2 << 30, cpu_seconds=2)
"""For one conversation. A real template takes a millisecond."""

TRIAL_LIMITS, TRIAL_SECONDS = Limits(memory=1 << 30, cpu_seconds=10), 5.0
"""For the conversations of a trial, and how long it is waited for after the weights are loaded."""

MAX_WORK = 20_000_000_000
"""Characters that a template may go through at most in this process: a second or two, in the worst case."""

MAX_CHARACTERS, MAX_TAGS = 1 << 20, 20_000
"""Of a template. Real ones have some ten thousand characters, and hundreds of tags."""

MAX_WRITTEN, MAX_WRITTEN_EACH = 1 << 20, 8
"""Characters that come out of an empty conversation at most; and for each character of others so many more."""

TOO_LONG = "it writes too much"
_EACH = 64
"""Characters that stand for a message or an object, with its own names."""


class TemplateRenderer:
    """Renders the templates of one model. Thread-safe."""

    def __init__(self) -> None:
        self.sandbox = Sandbox(f"{__name__}:_Templates", limits=LIMITS)

    def render(self, template: str, messages: Sequence[Mapping[str, Any]], **others: Any) -> str:
        """A conversation in the model's format.

        others: the further arguments of `render_chat`

        Raises WorkerFailed, whatever the template raises, and OSError if a process cannot be started.
        """
        variables = others.pop("variables", None) or {}
        size = _size(messages) + _size(others["tools"]) + _size(variables)
        if (found := bounded(template)) is not None:
            longest = MAX_GROWTH * (len(template) + size)
            bounds = Bounds(MAX_WORK // (found.weight * longest) - 1, longest)
            try:
                return render_chat(found.template, messages, variables={**variables, BOUNDS: bounds}, **others)
            except TooMuchWork:
                pass  # it may take long
        most = MAX_WRITTEN + MAX_WRITTEN_EACH * size
        return self.render_elsewhere(template, most, messages=messages, variables=variables, **others)

    def render_elsewhere(self, template: str, most: int = MAX_WRITTEN, **arguments: Any) -> str:
        """The same in another process. most: characters that may come out"""
        text: str = self.sandbox.call("render", template, most, arguments, max_bytes=6 * most + 1000)
        return text


@contextmanager
def template_check(template: str | None) -> Iterator[None]:
    """Tries a template while the body of the `with` block loads the weights, unless its work is known to be bounded.

    Raises ModelError if the template is too large, and from the block if it takes too long or too much memory. A
    template that raises is an error of the request that makes it raise, and a process that cannot run at all says
    nothing about the template.
    """
    if template is None:
        yield
        return
    tags = template.count("{%") + template.count("{{")
    if len(template) > MAX_CHARACTERS or tags > MAX_TAGS:
        raise ModelError(
            f"The model's chat template is too large: {len(template):,} characters with {tags:,} tags. At most "
            f"{MAX_CHARACTERS:,} characters with {MAX_TAGS:,} tags are read."
        )
    if bounded(template) is not None:
        yield
        return
    worker = Worker(f"{__name__}:_Templates", limits=TRIAL_LIMITS)
    try:
        worker.send("try_out", template, timeout_s=TRIAL_SECONDS)
        yield
        worker.receive(timeout_s=TRIAL_SECONDS)
    except WorkerDied as death:
        if death.is_late:
            raise ModelError(f"The model's chat template does not end within {TRIAL_SECONDS:g} s.") from None
    except WorkerFailed as failed:
        if str(failed) == TOO_LARGE:
            raise ModelError("The model's chat template takes too much memory.") from None
    finally:
        worker.kill()


class _Templates:
    """The renderer in the other process. A template that takes too long ends it."""

    def render(self, template: str, most: int, arguments: dict[str, Any]) -> str:
        text = render_chat(template, **arguments)
        if len(text) > most:
            raise ValueError(TOO_LONG)
        return text

    def try_out(self, template: str) -> None:
        """Renders conversations with and without tools. Raises MemoryError; what else goes wrong is ignored."""
        messages: list[dict[str, Any]] = [{"role": role, "content": "hello"} for role in ("user", "assistant", "user")]
        place = {"place": {"type": "string", "description": "where"}}
        schema = {"type": "object", "properties": place, "required": ["place"]}
        tool = {"type": "function", "function": {"name": "look", "description": "looks", "parameters": schema}}
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": {"place": "here"}}}
        called: list[dict[str, Any]] = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "look", "tool_call_id": "abcdefghi", "content": "a table"},
        ]
        for conversation, tools in (messages, []), (called, [tool]):
            try:
                render_chat(template, conversation, tools, {}, date.today())
            except MemoryError:
                raise
            except Exception:
                pass


def _size(values: Any) -> int:
    """Characters that a JSON value has at most, in any form of it that is not escaped."""
    if not values:
        return 0
    if isinstance(values, list) and all(one.keys() == {"role", "content"} for one in values):  # quicker, nearly always
        return sum(len(str(one["content"])) + len(str(one["role"])) + _EACH for one in values)
    return len(json.dumps(values, ensure_ascii=False, default=str)) + _EACH
