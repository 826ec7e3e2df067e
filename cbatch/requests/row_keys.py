"""Keys: short hashes of everything that decides a row's result, so that a later run can tell which results to keep."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.requests.columns import OPTIONS, in_key

MODEL, SAMPLING, INPUT = slice(0, 8), slice(8, 16), slice(16, 32)
"""The three parts of a key. The last is the longest because most rows of a run differ only there."""

KEY_LENGTH = 32
NO_SAMPLING = "00000000"
_APART = ("seed", "lora", "reasoning_effort")
"""Parameters of which something else is in a key: a request's seed, the weights of its adapter, template variables."""
_ENCODER = json.JSONEncoder(sort_keys=True)


class KeyMaker:
    """Makes the keys of a run's rows: one part for the model, one for the sampling, one for the input.

    Device, batch sizes, order, priorities and the formatting of the JSON change no key. For a line that is refused,
    all bytes count.
    """

    def __init__(self, model: str) -> None:
        """`model`: fingerprint of the model and its chat template."""
        self._model = _hash(model.encode(), MODEL)

    def for_row(self, row: Request, sampling: bytes, *others: object) -> str:
        """The key of a row with all defaults applied.

        sampling: its parameters, from `canonical_params`
        others:   whatever else decides which tokens are generated, and which are shown
        """
        ranks = [] if row.call is None or row.call.top_n is None else [row.call.top_n]
        call = (row.call.is_chat, row.call.model, *filter(None, [row.call.repeated]), *ranks) if row.call else None
        # A template may print tools as they are, so the order of their keys counts.
        more: list[object] = [json.dumps(row.tools)] if row.tools else []
        more += filter(None, [row.tool_rounds, _asked(row)])
        row_hash = _hash(_dump((row.id, row.prompt, row.extra, call, *more)), INPUT)
        shown = (*others, *row.validation, *in_key(row.columns))
        return self._model + _hash(sampling + repr(shown).encode(), SAMPLING) + row_hash

    def for_invalid_row(self, source: bytes) -> str:
        """The key of a row that is refused, from the bytes that it was read from."""
        return self._model + NO_SAMPLING + _hash(source, INPUT)


def canonical_params(params: SamplingParams) -> bytes:
    """The parameters that differ from their defaults, so that a new parameter changes no existing key.

    A seed is not among them, nor the name of an adapter, whose weights count.
    """
    values = {field.name: (getattr(params, field.name), field.default) for field in fields(params)}
    return _dump({name: value for name, (value, default) in values.items() if value != default and name not in _APART})


def _asked(request: Request) -> dict[str, Any]:
    """The parts of a request beside its prompt, sampling and tools.

    What is not asked for is left out, so that a new option changes no existing key.
    """
    asked: dict[str, Any] = {"lora": request.adapter} if request.adapter else {}
    if request.continuations:
        asked["continuations"] = request.continuations
    if request.pictures:
        asked["images"] = [picture.digest() for picture in request.pictures]
    if request.messages is None:
        return asked
    template = request.template
    if template.kwargs:
        asked["chat_template_kwargs"] = {name: json.dumps(value) for name, value in template.kwargs.items()}
    if template.continue_final_message:
        asked["continue_final_message"] = True
    elif not template.begins_new_message:
        asked["add_generation_prompt"] = False
    if request.choice is not None:
        asked["tool_choice"] = {"name": request.choice.name}
    if request.tools and request.max_calls is not None:
        asked["max_calls"] = request.max_calls
    return asked


def _dump(value: object) -> bytes:
    return _ENCODER.encode(value).encode()


Origin = Mapping[str, Mapping[str, str]]
"""The ingredients of the keys of a run: for each part of them, names for people and values; # begins a hash of one."""


NONE = "none"
"""Stands for the value of what was not given."""


def explain_difference(here: str, there: str, now: Origin | None = None, then: Origin | None = None) -> str:
    """Says what must have changed if two keys of the same line differ.

    now, then: what both come of, as far as that is known
    """
    part = "model" if here[MODEL] != there[MODEL] else "input" if here[INPUT] != there[INPUT] else "sampling"
    if now and then and (changed := _changed(now.get(part, {}), then.get(part, {}))):
        return f"different {', '.join(changed)}"
    if part == "model":
        return "another model, dtype, chat template, --max-model-len or --date"
    if (here[SAMPLING] == NO_SAMPLING) != (there[SAMPLING] == NO_SAMPLING):
        return "a line that was refused then and is accepted now, or the other way round (perhaps --allow-unknown)"
    if now and then:
        is_input = part == "input"
        return "another id, prompt, field or LoRA adapter of the line" if is_input else "other parameters in the line"
    if part == "input":
        return (
            "another input, another --system, --template, --template-kwargs, --raw or --format, another LoRA adapter, "
            "or a version of cbatch that read a column differently"
        )
    return f"other sampling parameters, another seed, {OPTIONS}, --validate, --tries, or a KV cache of another size"


def _changed(now: Mapping[str, str], then: Mapping[str, str]) -> list[str]:
    changed = []
    for name in dict.fromkeys([*now, *then]):
        values = [one.get(name, NONE) for one in (then, now)]
        if values[0] != values[1]:
            is_hash = any(value.startswith("#") for value in values)
            changed.append(name if is_hash else f"{name} ({values[0]} then, {values[1]} now)")
    return changed


def _hash(data: bytes, part: slice) -> str:
    return hashlib.blake2b(data, digest_size=(part.stop - part.start) // 2).hexdigest()
