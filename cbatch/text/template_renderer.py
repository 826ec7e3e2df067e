"""Renders chat templates in a process of their own, so that none holds up the run.

A template is a program of a model's author, which may run forever or fill the memory. That process has its bounds for
each conversation. While it renders, threads of this one have the interpreter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from typing import Any

from cbatch.base.errors import ModelError
from cbatch.isolate.child import TOO_LARGE, Limits
from cbatch.isolate.sandbox import Sandbox
from cbatch.isolate.worker import WorkerDied, WorkerFailed
from cbatch.text.chat_template import render_chat
from cbatch.text.earlier_calls import OBJECT, PROBE, PROBE_TOOL, with_calls

LIMITS = Limits(memory=2 << 30, cpu_seconds=5)
"""For one conversation. A real template takes a millisecond."""

MAX_CHARACTERS = 1 << 20
"""Of a template. Real ones have some ten thousand."""

MAX_WRITTEN, MAX_WRITTEN_EACH = 1 << 20, 8
"""Characters that come out of an empty conversation at most; and for each character of others so many more."""

TOO_LONG = "it writes too much"


_TRIALS: Sequence[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = (
    ([{"role": role, "content": "hello"} for role in ("user", "assistant", "user")], []),
    (with_calls(PROBE, OBJECT._replace(is_single=True)), [PROBE_TOOL]),
)
"""Conversations with their tools."""


class TemplateRenderer:
    """Renders the templates of one model. Thread-safe."""

    def __init__(self) -> None:
        self.sandbox = Sandbox(f"{__name__}:_Templates", limits=LIMITS)

    def render(self, template: str, messages: Sequence[Mapping[str, Any]], **others: Any) -> str:
        """A conversation in the model's format.

        others: the further arguments of `render_chat`

        Raises WorkerFailed for whatever the template raises, and OSError if the process cannot be started.
        """
        arguments = {"messages": messages, **others}
        size = len(json.dumps([messages, others["tools"], others.get("variables")], ensure_ascii=False, default=str))
        most = MAX_WRITTEN + MAX_WRITTEN_EACH * size
        text: str = self.sandbox.call("render", template, most, arguments, max_bytes=6 * most + 1000)
        return text

    def try_out(self, template: str) -> None:
        """Tries a template with conversations, one of them with tools.

        Raises ModelError if it is too large, or takes too long or too much memory. A template that raises is an error
        of the request that makes it raise, and a process that cannot run at all says nothing about the template.
        """
        if len(template) > MAX_CHARACTERS:
            what = f"{len(template):,} characters, and at most {MAX_CHARACTERS:,} are read"
            raise ModelError(f"The model's chat template is too large: it has {what}.")
        for messages, tools in _TRIALS:
            try:
                with suppress(OSError):
                    self.render(template, messages, tools=tools, special_tokens={}, today=date.today())
            except WorkerFailed as failed:
                if (isinstance(failed, WorkerDied) and failed.is_late) or str(failed) == TOO_LARGE:
                    raise ModelError(f"The model's chat template cannot be used: {failed}.") from None


class _Templates:
    """The renderer in the other process. A template that takes too long ends it."""

    def render(self, template: str, most: int, arguments: dict[str, Any]) -> str:
        text = render_chat(template, **arguments)
        if len(text) > most:
            raise ValueError(TOO_LONG)
        return text
