"""The grammar of calls of tools, as the declaration of a reply format says that they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cbatch.base.params import Constraint
from cbatch.sample.structured.json_schema import json_rule
from cbatch.text.replies.calls import is_written_as_text, resolve
from cbatch.text.replies.declaration import PLACE
from cbatch.text.replies.formats import reply_formats

# Without this the library allows only one tokenization of text that the grammar forces.
HEADER = '%llguidance {"no_forcing": true}\n'

SpecialId = Callable[[str], int | None]

_TAG = re.compile(r"(<[^<>\s{}]+>|\[[A-Z_/]+\]|\s+|\{\w+\})")
_TAG_IN_TAG = re.compile(r"(｜\w+｜)")
# Every closing tag of an argument begins with "</", so that text without that needs no end that is looked for.
_TEXT = r"/([^<]|<[^\/<])*/"


class ToolCallGrammar:
    """The grammar of the calls that a constraint of the kind `tool_call` asks for.

    The source of the constraint is a JSON object:
    form:        the name of the reply format
    is_repeated: whether further calls may follow, if the form has room for them
    is_led:      whether line breaks may come first, as models write them after their reasoning
    functions:   the name of each, and the JSON schema of its arguments
    """

    def __init__(self, constraint: Constraint, special_id: SpecialId = lambda tag: None) -> None:
        """special_id: the id of a tag that is a special token; None for one that is text"""
        asked = json.loads(constraint.source)
        calls = reply_formats()[asked["form"]].calls
        assert calls is not None
        self._calls, self._special_id, self._is_led = calls, special_id, asked["is_led"]
        self._is_repeated, self._functions = asked["is_repeated"], asked["functions"]
        self._before, self._place, self._behind = calls.parts
        self._made: list[str] = []

    def argument_grammars(self) -> Iterator[tuple[str, str]]:
        """The name of each function, and a grammar of its arguments alone."""
        for name, parameters in self._functions:
            yield name, f"{HEADER}start: {json_rule(parameters)}"

    def to_lark(self) -> str:
        """All rules."""
        calls, functions = self._calls, self._functions
        more, further, lead = "", "", "LEAD? " if self._is_led else ""
        if self._is_repeated and calls.between is not None:
            more = f"({self._text(calls.between)} call)*"
        elif self._is_repeated and calls.after is not None:
            further = f"({self._text(calls.after)} block)*"
        self._made = [
            f"start: {lead}calls",
            *([r"LEAD: /\n{1,2}/"] if lead else []),
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
        return HEADER + "\n".join(self._made)

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
