"""Prompts as Python programs give them: one or several, in any of their forms."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from cbatch.base.errors import RequestError, invalid_row
from cbatch.base.outputs import ToolCall
from cbatch.base.params import SamplingParams
from cbatch.base.request import ParamsLike, Request
from cbatch.media.pictures import as_given
from cbatch.requests.completion import Choice, Completion
from cbatch.requests.param_names import own_params
from cbatch.requests.rows import PROMPT_FIELDS, fill_row
from cbatch.tools.child import describe
from cbatch.tools.tool import in_openai_form

Conversation = Sequence[Mapping[str, Any] | Choice]
"""Messages: `[{"role": "user", "content": "Hi"}]`; a Completion or a Choice is what the model has said."""

PromptLike = str | Mapping[str, Any] | Sequence[int]
"""Text, token ids, or a row as `cbatch run` takes it: `{"messages": [...]}`, `{"prompt": ..., "max_tokens": 5}`."""

WANTED = "a text, token ids, a row such as {'messages': [...]}, or a list of these"


def list_prompts(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts of a call, and whether it has a single one. Raises RequestError for what is no prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts], True
    values = _as_list(prompts)
    if values is None:
        raise invalid_row(f"The prompts must be {WANTED}, not {type(prompts).__name__}{_hint(prompts)}.")
    if values and all(map(_is_int, values)):
        return [values], True
    if values and all(map(_is_message, values)):
        raise invalid_row(
            "These are the messages of one conversation: give them to engine.chat, or as {'messages': [...]}."
        )
    return values, False


def list_conversations(conversations: Any) -> tuple[list[Any], bool]:
    """The conversations of a call as rows, and whether it has a single one. Raises RequestError for what is none."""
    values = [conversations] if isinstance(conversations, str) else _as_list(conversations)
    if values is None:
        raise invalid_row(
            "A conversation is a list of messages such as [{'role': 'user', 'content': 'Hi'}], "
            f"not {type(conversations).__name__}{_hint(conversations)}."
        )
    is_one = values and (any(map(_is_message, values)) or all(isinstance(value, Mapping) for value in values))
    if is_one:
        values = [values]
    messages = [[{"role": "user", "content": one}] if isinstance(one, str) else one for one in values]
    return [{"messages": one} for one in messages], bool(is_one) or isinstance(conversations, str)


def list_params(params: Any, count: int) -> list[ParamsLike | None]:
    """The parameters of each of `count` prompts. Raises RequestError for another number of them."""
    if params is None or isinstance(params, SamplingParams | Mapping):
        return [params] * count
    values = _as_list(params)
    if values is None:
        raise invalid_row(f"params must be SamplingParams, a mapping, or a list of these, not {type(params).__name__}.")
    for number, value in enumerate(values):
        if not isinstance(value, SamplingParams | Mapping | None):
            raise invalid_row(
                f"params[{number}] must be SamplingParams, a mapping or None, not {type(value).__name__}."
            )
    if len(values) != count:
        raise invalid_row(
            f"There are {count:,} prompts and {len(values):,} sampling parameters; give one for each prompt."
        )
    return [plain(value) for value in values]


def with_options(params: Any, options: Mapping[str, Any]) -> Any:
    """The sampling parameters of a call, with those on top that are arguments of their own. Raises RequestError.

    params: for all prompts or for each, or None
    """
    options = {name: value for name, value in options.items() if name != "use_tqdm"}
    if "sampling_params" in options:  # vLLM's name
        if params is not None:
            raise invalid_row("params and sampling_params are two names of one argument.")
        params = options.pop("sampling_params")
    if not options:
        return params
    given, template = own_params(options)
    if isinstance(params, SamplingParams):
        if template:
            raise invalid_row(f"{next(iter(template))} is no field of SamplingParams; give params as a mapping.")
        return params.merged(given)
    if isinstance(params, Mapping | None):
        return {**(params or {}), **options}
    each = _as_list(params)
    return params if each is None else [with_options(one, options) for one in each]


def read_prompt(prompt: Any, index: int, fields: Mapping[str, Any]) -> Request:
    """A prompt as a row. Does not raise: whatever is wrong with the prompt is the row's `error`.

    fields: further fields of the row (`row_fields`), for prompts that do not have them
    """
    row = Request(index=index)
    try:
        fill_row(row, {**fields, **row_fields(prompt)}, allow_unknown=False)
    except RequestError as error:
        row.error = error
    except RecursionError:
        row.error = invalid_row("the row is nested too deeply")
    except Exception as unforeseen:  # one prompt that breaks something harms no other
        row.error = RequestError("internal_error", f"the prompt cannot be read: {unforeseen!r}")
    try:
        json.dumps(row.extra, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        row.extra, row.error = {}, row.error or invalid_row(f"the row cannot be written as JSON: {error}")
    return row


def row_fields(prompt: Any) -> dict[str, Any]:
    """The fields of the row that a prompt stands for, in the types of JSON. Raises RequestError for what is none."""
    if isinstance(prompt, str):
        return {"prompt": plain(prompt)}
    if isinstance(prompt, Mapping):
        if strange := [name for name in prompt if not isinstance(name, str)]:
            raise invalid_row(f"the names of a row's fields are texts, not {type(strange[0]).__name__}")
        return {name: plain(READERS[name](value) if name in READERS else value) for name, value in prompt.items()}
    values = _as_list(prompt)
    if values is None:
        raise invalid_row(
            f"a prompt must be a text, token ids or a row such as {{'messages': [...]}}, not {type(prompt).__name__}"
        )
    if values and isinstance(values[0], Mapping | Choice):
        return {"messages": plain(_messages(values))}
    return {"prompt_token_ids": plain(values)}


def _messages(value: Any) -> Any:
    """Messages, among which results stand for what the model has said. Raises RequestError if one has failed."""
    values, made = _as_list(value), []
    for number, one in enumerate(values or (), start=1):
        if isinstance(one, Completion) and one.error is not None:
            raise invalid_row(f"message {number} is a completion that failed: {one.error}")
        if isinstance(one, Completion | Choice):
            one = one.to_message()
        elif isinstance(one, Mapping):
            one = {**one, **{name: _images(one[name]) for name in ("content", "images") if name in one}}
        made.append(one)
    return value if values is None else made


def _images(parts: Any) -> Any:
    """Images, or parts of a message that may have some, in the types of JSON."""
    if not isinstance(parts, list | tuple):
        return parts
    return [
        {name: as_given(value) for name, value in part.items()} if isinstance(part, Mapping) else as_given(part)
        for part in parts
    ]


def _tools(value: Any) -> Any:
    """Tools in OpenAI's form, of which some may be functions of Python. Raises RequestError for what is none."""
    values = [value] if callable(value) else _as_list(value)
    try:
        return value if values is None else [in_openai_form(describe(one)) if callable(one) else one for one in values]
    except (TypeError, ValueError, NameError) as error:  # of annotations that have no schema, or cannot be read
        raise invalid_row(f"this function cannot be a tool: {error}") from error


READERS: dict[str, Callable[[Any], Any]] = {"messages": _messages, "images": _images, "tools": _tools}
"""Fields of a row that may hold objects of Python, and what makes values of JSON of them."""


def _as_list(value: Any) -> list[Any] | None:
    """The items of a collection with an order, such as a list, an array or a column of a table; None for others."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping | set | frozenset) or is_table(value):
        return None
    if not isinstance(value, Collection):
        return None
    convert = getattr(value, "tolist", None)  # numbers of numpy, torch and pandas as Python's
    values = convert() if callable(convert) else list(value)
    return values if isinstance(values, list) else None  # an array without dimensions is one number


def is_table(value: Any) -> bool:
    """Whether it is a data frame of pandas or polars, whose items are its columns."""
    return hasattr(value, "iterrows") or hasattr(value, "iter_rows")


def _hint(value: Any) -> str:
    if is_table(value):
        return "; give one of its columns, or its rows"
    is_iterable = hasattr(value, "__iter__") and not isinstance(value, Collection)
    return "; engine.map takes an iterable" if is_iterable else ""


def plain(value: Any) -> Any:
    """A value in the types of JSON, as far as it has a form in them. Lone surrogates become U+FFFD."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, ToolCall):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {plain(name): plain(item) for name, item in value.items()}
    values = _as_list(value)
    if values is not None:
        return values if all(type(item) is int for item in values) else [plain(item) for item in values]
    has_type_of_its_own = getattr(value, "ndim", None) == 0 and hasattr(value, "item")  # a number of numpy or torch
    return value.item() if has_type_of_its_own else value


def _is_int(value: Any) -> bool:
    """Whether a value is a token id; numpy and torch have integers of their own."""
    if type(value) is int:
        return True
    if isinstance(value, bool | str | float) or getattr(value, "ndim", 0) != 0:  # an array is more than one
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _is_message(value: Any) -> bool:
    if isinstance(value, Completion | Choice):
        return True
    return isinstance(value, Mapping) and "role" in value and not any(name in value for name in PROMPT_FIELDS)
