"""Sampling parameters as they are typed: names, values, and how they are shown."""

from __future__ import annotations

import difflib
import json
from typing import Any

from cbatch.base.errors import RequestError
from cbatch.base.params import PARAM_NAMES, SamplingParams
from cbatch.cli.common.exits import UserError
from cbatch.cli.common.options import RUN_ONLY_PARAMS
from cbatch.requests.param_names import own_params

SETTABLE = ("seed", *(name for name in PARAM_NAMES if name not in ("seed", *RUN_ONLY_PARAMS)))
"""What `/set` knows."""


def parse_parameter(name: str, text: str) -> dict[str, Any]:
    """A parameter set to what was typed, JSON or else a plain string; under our name, also if it has another one."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    try:
        given, template = own_params({name: value})
        SamplingParams().merged(given)
    except RequestError as error:
        raise UserError(str(error)) from error
    if template:
        raise UserError(f"{name} is for the chat template: cbatch chat --template-kwargs sets it for all sessions.")
    if strange := [own for own in given if own not in SETTABLE]:
        raise UserError(f"{strange[0]} cannot be set in a chat.")
    return given


def check_name(name: str) -> None:
    """Raises UserError if there is no such parameter."""
    if name not in SETTABLE:
        close = difflib.get_close_matches(name, SETTABLE, 1)
        raise UserError(f"There is no parameter {name}" + (f"; did you mean {close[0]}?" if close else "."))
