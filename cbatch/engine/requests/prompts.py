"""Prompts as Python programs give them: one or several, in any of their forms."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cbatch.engine.base.errors import RequestError
from cbatch.engine.base.params import SamplingParams
from cbatch.engine.requests.row import PROMPT_FIELDS, InputRow
from cbatch.engine.requests.row_forms import fill_row

Conversation = Sequence[Mapping[str, Any]]
"""Messages: `[{"role": "user", "content": "Hi"}]`."""

PromptLike = str | Mapping[str, Any] | Sequence[int]
"""Text, token ids, or a row as `cbatch run` takes it: `{"messages": [...]}`, `{"prompt": ..., "max_tokens": 5}`."""

ParamsLike = SamplingParams | Mapping[str, Any]
"""Sampling parameters. Those of a mapping come on top of the model's own defaults; an object replaces these."""

WANTED = "a text, token ids, a row such as {'messages': [...]}, or a list of these"


def list_prompts(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts of a call, and whether it has a single one. Raises RequestError for what is no prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts], True
    if not isinstance(prompts, Collection):
        hint = "; engine.map takes an iterable" if hasattr(prompts, "__iter__") else ""
        raise _refuse(f"The prompts must be {WANTED}, not {type(prompts).__name__}{hint}.")
    values = list(prompts)
    if values and all(map(_is_int, values)):
        return [values], True
    if values and all(map(_is_message, values)):
        raise _refuse(
            "These are the messages of one conversation: give them to engine.chat, or as {'messages': [...]}."
        )
    return values, False


def list_conversations(conversations: Any) -> tuple[list[Any], bool]:
    """The conversations of a call, and whether it has a single one. Raises RequestError for what is none."""
    if isinstance(conversations, str):
        return [[{"role": "user", "content": conversations}]], True
    if isinstance(conversations, Mapping) or not isinstance(conversations, Collection):
        raise _refuse(
            "A conversation is a list of messages such as [{'role': 'user', 'content': 'Hi'}], "
            f"not {type(conversations).__name__}."
        )
    values = list(conversations)
    return ([values], True) if values and all(isinstance(value, Mapping) for value in values) else (values, False)


def list_params(params: Any, count: int) -> list[ParamsLike | None]:
    """The parameters of each of `count` prompts. Raises RequestError for another number of them."""
    if params is None or isinstance(params, SamplingParams | Mapping):
        return [params] * count
    if not isinstance(params, Collection) or isinstance(params, str):
        raise _refuse(f"params must be SamplingParams, a mapping, or a list of these, not {type(params).__name__}.")
    values = list(params)
    if len(values) != count:
        raise _refuse(f"There are {count:,} prompts and {len(values):,} sampling parameters; give one for each prompt.")
    return values


def read_prompt(prompt: Any, index: int, fields: Mapping[str, Any]) -> InputRow:
    """A prompt as a row. Does not raise: whatever is wrong with the prompt is the row's `error`.

    fields: further fields of the row, for prompts that do not have them
    """
    row = InputRow(index)
    try:
        fill_row(row, {**fields, **row_fields(prompt)}, allow_unknown=False)
    except RequestError as error:
        row.error = error
    except Exception as unforeseen:  # one prompt that breaks something harms no other
        row.error = RequestError("internal_error", f"the prompt cannot be read: {unforeseen!r}")
    return row


def row_fields(prompt: Any) -> Mapping[str, Any]:
    """The fields of the row that a prompt stands for. Raises RequestError for what is no prompt."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping):
        return prompt
    if isinstance(prompt, Collection) and not isinstance(prompt, bytes):
        values = list(prompt)
        if values and isinstance(values[0], Mapping):
            return {"messages": [dict(value) if isinstance(value, Mapping) else value for value in values]}
        return {"prompt_token_ids": [int(value) if _is_int(value) else value for value in values]}
    raise _refuse(
        f"a prompt must be a text, token ids or a row such as {{'messages': [...]}}, not {type(prompt).__name__}"
    )


def _is_int(value: Any) -> bool:
    """Whether a value is a token id; numpy and torch have integers of their own."""
    return not isinstance(value, bool | str | float) and hasattr(value, "__index__")


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value and not any(name in value for name in PROMPT_FIELDS)


def _refuse(message: str) -> RequestError:
    return RequestError("invalid_row", message)
