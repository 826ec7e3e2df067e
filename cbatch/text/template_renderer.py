"""Renders chat templates without letting one hold up the run: here if its work is bounded, else in another process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from cbatch.text.chat_template import TooManyTurns, Turns, render_chat, template_environment
from cbatch.text.template_bounds import weight_of
from cbatch.text.template_worker import TemplateFailed, TemplateWorker

MAX_WORK = 20_000_000_000
"""Characters that a template may go through at most in this process: a second or two, in the worst case."""

_EACH = 64
"""Characters that stand for a message or an object, with its own names."""


class TemplateRenderer:
    """Renders the templates of one model. Thread-safe."""

    def __init__(self, worker: TemplateWorker | None = None) -> None:
        self._worker = worker or TemplateWorker()

    def render(self, template: str, messages: Sequence[Mapping[str, Any]], **others: Any) -> str:
        """A conversation in the model's format.

        others: the further arguments of `render_chat`

        Raises TemplateFailed, whatever the template raises, and OSError if a process cannot be started.
        """
        if (weight := known_weight(template)) is not None:
            size = len(template) + _size(messages) + _size(others["tools"]) + _size(others.get("variables"))
            with_turns = Turns(MAX_WORK // (weight * size) - 1)
            try:
                return render_chat(template, messages, turns=with_turns, **others)
            except TooManyTurns:
                pass  # it may take long
        return self._worker.render(template, {"messages": messages, **others})


@lru_cache(maxsize=16)
def known_weight(template: str) -> int | None:
    """See `weight_of`; remembered, because every conversation asks for it."""
    return weight_of(template, template_environment())


def _size(values: Any) -> int:
    """Characters that a JSON value has at most, in any form of it that is not escaped."""
    if not values:
        return 0
    if isinstance(values, list) and all(one.keys() == {"role", "content"} for one in values):  # quicker, nearly always
        return sum(len(str(one["content"])) + len(str(one["role"])) + _EACH for one in values)
    return len(json.dumps(values, ensure_ascii=False, default=str)) + _EACH


__all__ = ["TemplateFailed", "TemplateRenderer", "known_weight"]
