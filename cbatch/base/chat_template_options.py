"""Options of a request for the model's chat template, beside its messages and tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from cbatch.base.errors import invalid_row

FIXED_DATE = date(2024, 7, 26)
"""The date given to chat templates by default: the one that Llama's own template uses if it has no clock."""

RESERVED_VARIABLES = frozenset(
    "messages tools documents add_generation_prompt continue_final_message strftime_now raise_exception namespace dict "
    "bos_token eos_token unk_token sep_token pad_token cls_token mask_token chat_template".split()
)
"""Variables that the engine passes to templates itself, and those that would replace the template or its tokens."""


def check_variables(kwargs: Mapping[str, Any], reserved: frozenset[str]) -> None:
    """Raises RequestError (`invalid_row`) if one of a template's variables is reserved."""
    if wrong := sorted(reserved & kwargs.keys()):
        raise invalid_row(f"chat_template_kwargs cannot set {wrong[0]}: the engine sets it itself.")


def effort_variables(effort: str, source: str) -> dict[str, Any]:
    """The variables that tell a chat template how much to reason.

    source: of the template; empty if there is none

    Raises RequestError (`invalid_row`) if it cannot be told.
    """
    if effort == "none" and "enable_thinking" in source:
        return {"enable_thinking": False}
    if "reasoning_effort" in source:
        return {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    but = '; "none" turns the thinking of this one off, and thinking_budget bounds it'
    advice = but if "enable_thinking" in source else ""
    raise invalid_row(f"reasoning_effort needs a chat template that has levels{advice}.")


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """Options of a chat template, by their names in vLLM. They matter only to prompts that go through the template.

    kwargs:                 variables for the template, such as `enable_thinking` (vLLM's `chat_template_kwargs`); JSON
                            values, copied
    add_generation_prompt:  open the assistant's turn at the end; None: unless `continue_final_message`
    continue_final_message: leave the last message open, so that the output continues its text
    today:                  date for templates that write one; not read from a clock, so that equal messages give equal
                            token ids

    Raises RequestError (`invalid_row`) for a wrong type, a variable that the engine sets itself, and options that
    exclude each other.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    today: date = FIXED_DATE

    def __post_init__(self) -> None:
        if not isinstance(self.add_generation_prompt, bool | None):
            raise invalid_row("add_generation_prompt must be true or false.")
        if not isinstance(self.continue_final_message, bool):
            raise invalid_row("continue_final_message must be true or false.")
        if not isinstance(self.today, date):
            raise invalid_row("The date of a chat template must be a datetime.date.")
        if self.continue_final_message and self.add_generation_prompt:
            what = "add_generation_prompt begins a new message, and continue_final_message goes on with the last one"
            raise invalid_row(f"{what}; ask for one of them.")
        if not isinstance(self.kwargs, Mapping) or not all(isinstance(name, str) for name in self.kwargs):
            raise invalid_row("chat_template_kwargs must be an object of variables for the template.")
        check_variables(self.kwargs, RESERVED_VARIABLES)
        try:
            copied = json.loads(json.dumps(dict(self.kwargs), allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise invalid_row(f"chat_template_kwargs must hold JSON values only: {error}.") from None
        object.__setattr__(self, "kwargs", copied)

    @property
    def begins_new_message(self) -> bool:
        """Whether the prompt ends with the opening of the assistant's turn."""
        asked = self.add_generation_prompt
        return not self.continue_final_message if asked is None else asked


DEFAULT_TEMPLATE = TemplateOptions()
