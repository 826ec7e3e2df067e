"""Chooses what a model writes among the declarations in `cbatch/text/reply_formats`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from cbatch.text.replies.declaration import Calls, Reasoning, ReplyFormat

_FOLDER = Path(__file__).parents[1] / "reply_formats"
_THINK_TAG = re.compile(r"</((?:\w+:)?(?:think(?:ing)?|thoughts?|reason(?:ing)?))>")


@cache
def reply_formats() -> dict[str, ReplyFormat]:
    """All declarations by their names, which are those of their files. Those of a higher rank come first."""
    read = {path.stem: tomllib.loads(path.read_text("utf-8")) for path in sorted(_FOLDER.glob("*.toml"))}
    whole = {name: _with_other(fields, read) for name, fields in read.items()}
    calls = {name: _calls(**fields.pop("calls")) for name, fields in whole.items() if "calls" in fields}
    made = [_format(name, fields, calls) for name, fields in whole.items()]
    return {one.name: one for one in sorted(made, key=lambda one: -one.rank)}


def _with_other(fields: Mapping[str, Any], read: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The words of a declaration, on top of those of the one that it is like."""
    other, own = read.get(fields.get("like", ""), {}), {key: one for key, one in fields.items() if key != "like"}
    return {**other, **own, "calls": {**other.get("calls", {}), **own["calls"]}} if other else own


def _calls(also: Sequence[str] = (), **fields: Any) -> tuple[Calls, Sequence[str]]:
    return Calls(**_hashable(fields)), also


def _format(name: str, fields: dict[str, Any], calls: Mapping[str, tuple[Calls, Sequence[str]]]) -> ReplyFormat:
    reasoning = fields.pop("reasoning", {"opening": "<think>", "closing": "</think>"})
    own, also = calls.get(name, (None, ()))
    return ReplyFormat(
        name=name,
        reasoning=Reasoning(**reasoning) if reasoning else None,
        calls=replace(own, also=tuple(calls[one][0] for one in also)) if own is not None else None,
        **_hashable(fields),
    )


def _hashable(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}


def find_format(source: str, tokens: Iterable[str] = ()) -> ReplyFormat:
    """The reply format of a model.

    source: of its chat templates; it is only searched, not run. A template writes earlier replies back in the format
            in which the model writes them
    tokens: its special tokens, which count for what the template does not show
    """
    known, listed = reply_formats(), "\n".join(tokens)
    found = next((one for text in (source, listed) for one in known.values() if one.is_shown(text)), None)
    own = found.reasoning if found is not None else None
    reasoning = own if own and not own.is_shown else _find_reasoning(source) or _find_reasoning(listed)
    return replace(found or known["none" if reasoning is None else "think"], reasoning=reasoning)


def _find_reasoning(text: str) -> Reasoning | None:
    """The reasoning whose tags come first in a text. A closing tag is enough: some templates only cut earlier ones."""
    found = [(tag.start(), Reasoning(f"<{tag[1]}>", tag[0])) for tag in _THINK_TAG.finditer(text)]
    others = [one.reasoning for one in reply_formats().values() if one.reasoning is not None and one.reasoning.is_shown]
    found += [(text.index(one.closing), one) for one in others if one.closing in text and one.opening in text]
    return min(found, key=lambda pair: pair[0], default=(0, None))[1]
