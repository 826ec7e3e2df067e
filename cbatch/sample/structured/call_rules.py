"""Rules of a grammar for calls of tools, as the declaration of a reply format says that they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cbatch.sample.structured.json_schema import json_rule
from cbatch.text.replies.calls import is_written_as_text, resolve
from cbatch.text.replies.declaration import PLACE, Calls

SpecialId = Callable[[str], int | None]

_TAG = re.compile(r"(<[^<>\s{}]+>|\[[A-Z_/]+\]|\s+|\{\w+\})")
_TAG_IN_TAG = re.compile(r"(｜\w+｜)")
# Every closing tag of an argument begins with "</", so that text without that needs no end that is looked for.
_TEXT = r"/([^<]|<[^\/<])*/"


class CallRules:
    """The rules of `calls` in one form."""

    def __init__(self, calls: Calls, special_id: SpecialId) -> None:
        """special_id: the id of a tag that is a special token; None for one that is text"""
        self._calls, self._special_id = calls, special_id
        self._before, self._place, self._behind = calls.parts
        self._made: list[str] = []

    def all(self, functions: Sequence[tuple[str, dict[str, Any]]], *, is_repeated: bool) -> list[str]:
        """See `ToolCallGrammar` for both."""
        calls = self._calls
        more, further = "", ""
        if is_repeated and calls.between is not None:
            more = f"({self._text(calls.between)} call)*"
        elif is_repeated and calls.after is not None:
            further = f"({self._text(calls.after)} block)*"
        self._made = [
            f"calls: block {further}",
            f"block: {self._text(calls.bare_opening)} call {more} {self._text(calls.closing)}",
            "call: " + " | ".join(f"call_{number}" for number in range(len(functions))),
        ]
        for number, (name, parameters) in enumerate(functions):
            shown = json.dumps(name, ensure_ascii=False)[1:-1] if calls.is_object else name
            free = "\n" if self._place == "arguments" else ""
            before, behind = (self._text(part, free, name=shown) for part in (self._before, self._behind))
            self._made.append(f"call_{number}: {before} arguments_{number} {behind}")
            self._made.append(f"arguments_{number}: {self._arguments(f'argument_{number}', parameters)}")
        return self._made

    def _text(self, template: str, free: str = " \n", **values: str) -> str:
        """The sequence of a text. White space of the characters `free` may be missing."""
        parts = []
        for part in filter(None, _TAG.split(template)):
            if place := PLACE.fullmatch(part):
                parts.append(f"/{self._calls.ids}/" if place[1] == "id" else json.dumps(values[place[1]]))
            elif part.isspace():
                parts.append(json.dumps(part) + ("" if part.strip(free or "x") else "?"))
            else:
                pieces = [part] if self._special_id(part) is not None else filter(None, _TAG_IN_TAG.split(part))
                for piece in pieces:
                    token = self._special_id(piece)
                    parts.append(json.dumps(piece, ensure_ascii=False) if token is None else f"<[{token}]>")
        return " ".join(parts)

    def _arguments(self, name: str, schema: dict[str, Any]) -> str:
        """The arguments of a function; those that are written each on its own get rules with this name."""
        if self._place == "json":
            return json_rule(schema)
        properties = schema.get("properties")
        named = list(properties.items()) if isinstance(properties, dict) else []
        required = schema.get("required") or ()
        for number, (key, part) in enumerate(named):
            own = resolve(part, schema)
            value = dict(own) | {one: schema[one] for one in ("$defs", "definitions") if one in schema}
            make = self._keyword if self._place == "python" else self._parameter
            self._made.append(f"{name}_{number}: {make(key, value)}")
        rules = [(f"{name}_{number}", key in required) for number, (key, _) in enumerate(named)]
        if self._place == "python":
            return _list_of(sorted(rules, key=lambda rule: not rule[1]))
        return " ".join(rule if is_required else f"{rule}?" for rule, is_required in rules) or '""'

    def _keyword(self, key: str, schema: dict[str, Any]) -> str:
        return f"{json.dumps(key + '=')} {json_rule(schema)}"

    def _parameter(self, key: str, schema: dict[str, Any]) -> str:
        before, _, behind = self._calls.parameter.partition("{value}")
        is_text = is_written_as_text(schema)
        kind = self._calls.kinds[0 if is_text else 1]
        head = self._text(before.removesuffix("\n"), "\n", key=key, kind=kind) + (
            ' "\\n"' if before.endswith("\n") else ""
        )
        tail = ('"\\n" ' if behind.startswith("\n") else "") + self._text(behind.removeprefix("\n"), "\n")
        return f"{head} {_text_rule(schema) if is_text else json_rule(schema)} {tail}"


def _text_rule(schema: Mapping[str, Any]) -> str:
    """A text without quotes around it. Of its schema, choices and lengths count."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return "(" + " | ".join(json.dumps(one if isinstance(one, str) else json.dumps(one)) for one in values) + ")"
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return rf"/[^<]{{{least},{most}}}/" if least or most != "" else _TEXT


def _list_of(rules: Sequence[tuple[str, bool]]) -> str:
    """Rules with commas between them, the required ones first."""
    required, optional = ([rule for rule, wanted in rules if wanted is side] for side in (True, False))
    further = [f' (", " {rule})?' for rule in optional]
    if required:
        return ' ", " '.join(required) + "".join(further)
    starts = [rule + "".join(further[at + 1 :]) for at, rule in enumerate(optional)]
    return f"({' | '.join(starts)})?" if starts else '""'
