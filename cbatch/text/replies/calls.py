"""Reads tool calls as a declaration says. A call counts only if it is whole. No reader raises."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from cbatch.base.outputs import ToolCall
from cbatch.base.strict_json import json_at, referenced, whole_json
from cbatch.text.detokenizer import partial_match_length
from cbatch.text.replies.declaration import NAME, PLACE, Calls

MAX_INVALID_CALLS = 100
"""After so many tags without a call, the rest of an output counts as text: the model is repeating itself.

Each such tag costs time in proportion to the length of the output.
"""

_SPOTS = {
    "name": f"(?P<name>{NAME})",
    "id": r"[^\s<>\[\]{}]*",
    "key": r"(?P<key>[^<>\n\"/][^<>\n\"]*?)",
    "kind": r"(?P<kind>\w*)",
}
_BETWEEN = re.compile(r"[\s,]*")
_SURROGATE = re.compile("[\ud800-\udfff]")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_PYTHON_WORDS = {"true": True, "false": False, "null": None}
_GEMMA_QUOTE, _GEMMA_KEY = '<|"|>', re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:")


class Found(NamedTuple):
    """The calls of a text, and what stands in front of, between and behind them.

    is_cut: the end of the text was an unfinished call, which is left out
    """

    pieces: list[str]
    calls: list[ToolCall]
    is_cut: bool = False


def find_calls(text: str, calls: Calls, tools: Sequence[Mapping[str, Any]], *, is_cut: bool = False) -> Found:
    """
    text:   from the tag of the first call on
    tools:  the request's tools; their schemas give the types of arguments that are written as text
    is_cut: the output was cut off at its end
    """
    readers = [_reader(one) for one in (calls, *calls.also)]
    pieces, found = list[str](), list[ToolCall]()
    begin = place = num_invalid = 0
    while num_invalid < MAX_INVALID_CALLS and (start := readers[0].start(text, place)):
        place = max(start[1], 1)
        block = next(filter(None, (one.read_block(text, *start, tools) for one in readers)), None)
        if is_cut and not (block and block[2]) and readers[0].is_unfinished(text, *start, tools):
            return Found([*pieces, text[begin : start[0]]], found, is_cut=True)
        if block is not None:
            found += block[0]
            pieces.append(text[begin : start[0]])
            begin = place = block[1]
        else:
            num_invalid += 1
    rest = text[begin:]
    if is_cut and num_invalid < MAX_INVALID_CALLS:
        rest = rest[: len(rest) - max((partial_match_length(rest, tag) for tag in calls.tags), default=0)]
    return Found([*pieces, rest], found, is_cut=len(rest) < len(text) - begin)


Block = tuple[list[ToolCall], int, bool]
"""Calls, where they end, and whether they are surely whole."""


class _Reader:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        before, self._place, after = calls.parts
        own_head = calls.head.replace("{name}", _SPOTS["name"])
        self._head = re.compile(own_head or _pattern(before))
        self._tail = re.compile(_pattern(after))
        before, _, after = calls.parameter.partition("{value}")
        self._parameter = re.compile(_pattern(before.removesuffix("\n")) + ("\n?" if before.endswith("\n") else ""))
        self._parameter_end = after
        tags = "|".join(r"\s*".join(map(re.escape, tag.split())) for tag in calls.tags) or r"(?!)"
        if calls.head and not calls.opening:
            tags = own_head
        opening = _pattern(calls.opening.rstrip(" [\n")) or r"(?!)"
        self._opening = re.compile(opening)
        self._start = re.compile(f"(?P<opening>{opening}\\s*)|{tags}")
        end = re.escape(calls.end_tag)
        self._end = re.compile(rf"\s*+(?:{end}|(?={tags})|\Z)" if end else "")

    def start(self, text: str, at: int) -> tuple[int, int] | None:
        """Where the next block begins, and where its first call does."""
        if at == 0 and self._calls.bare and text.lstrip().startswith(self._calls.bare):
            return 0, len(text) - len(text.lstrip())
        found = self._start.search(text, at)
        return (found.start(), found.end()) if found else None

    def is_unfinished(self, text: str, start: int, at: int, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a block has no end, and, if it has no tag, names a function."""
        calls = self._calls
        end = calls.end_tag or ("" if calls.is_object else (calls.parts[2] + calls.closing).strip())
        if calls.opening and "".join(calls.opening.split()).startswith("".join(text[start:].split())):
            return True
        begun = self._start.match(text, start)
        later = self._opening if begun and begun["opening"] else self._start
        if (end and text.find(end, at) >= 0) or later.search(text, max(at, 1)):
            return False
        if not calls.bare or begun:
            return True
        written, before = "".join(text.split()), calls.bare_opening + calls.parts[0].partition("{name}")[0]
        heads = ["".join((before + tool["function"]["name"]).split()) for tool in tools]
        return any(written.startswith(head) or head.startswith(written) for head in heads)

    def read_block(self, text: str, start: int, at: int, tools: Sequence[Mapping[str, Any]]) -> Block | None:
        opening = self._start.match(text, start)
        has_opening = opening is not None and opening["opening"] is not None
        if opening is not None and not has_opening:
            at = start
        if self._place == "python":
            return self._read_python(text, at)
        try:
            found = self._read_objects(text, at) if self._calls.is_object else self._read_calls(text, at, tools)
        except RecursionError:
            return None
        if found is None:
            return None
        calls, place = found
        if self._calls.bare:
            return (calls, len(text), True) if not text[place:].strip() else None
        if not has_opening:
            end = self._end.match(text, place)
            return calls, end.end() if end else place, True
        end = self._end.match(text, place)
        is_closed = not self._calls.end_tag or (end is not None and end[0].endswith(self._calls.end_tag))
        return (calls, end.end(), is_closed) if end else None

    def _read_objects(self, text: str, at: int) -> tuple[list[ToolCall], int] | None:
        """JSON: calls one after another, or a list of them. If one item is not a call, all of it is none."""
        calls, place = list[ToolCall](), at
        # The decoder's error counts lines from the beginning of the text.
        while text.startswith(("{", "["), place) and (parsed := json_at(text, place)) is not None:
            values = parsed[0] if isinstance(parsed[0], list) else [parsed[0]]
            new = [call for value in values if (call := self._of_object(value))]
            if not new or len(new) != len(values):
                return None
            calls, at = calls + new, parsed[1]
            place = _next_place(text, at) if self._calls.between is not None else len(text)
        return (calls, at) if calls else None

    def _of_object(self, value: Any) -> ToolCall | None:
        if not isinstance(value, dict):
            return None
        if not self._calls.keys:
            return to_call(*next(iter(value.items()))) if len(value) == 1 else None
        names = (self._calls.keys[1], "arguments", "parameters")
        key = next((name for name in names if name in value), None)
        if key is None and self._calls.bare:  # it may be an answer in JSON
            return None
        return to_call(value.get(self._calls.keys[0]), value[key] if key is not None else None)

    def _read_calls(self, text: str, at: int, tools: Sequence[Mapping[str, Any]]) -> tuple[list[ToolCall], int] | None:
        calls = list[ToolCall]()
        place: int | None = at
        while place is not None and (head := self._head.match(text, place)):
            read: tuple[Any, int] | None
            if self._place == "json":
                read = json_at(text, head.end())
            elif self._place == "gemma":
                read = _gemma_at(text, head.end(), self._calls.parts[2])
            else:
                read = self._arguments_at(text, head.end(), _schema_of(tools, head["name"]))
            tail = self._tail.match(text, read[1]) if read else None
            call = to_call(head["name"], read[0]) if read else None
            if tail is None or call is None:
                return (calls, at) if calls and not self._calls.end_tag else None
            calls.append(call)
            at = tail.end()
            place = _next_place(text, at) if self._calls.between is not None else None
        return (calls, at) if calls else None

    def _arguments_at(self, text: str, at: int, schema: Mapping[str, Any]) -> tuple[Any, int] | None:
        """The arguments from a place on, or the items of a list, and where they end."""
        arguments, items, properties = dict[str, Any](), list[Any](), schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        while parameter := self._parameter.match(text, at):
            key = parameter["key"]
            end = _parameter_end(self._parameter_end, key).search(text, parameter.end())
            if end is None:
                return None
            value, kind = text[parameter.end() : end.start()], parameter.groupdict().get("kind")
            own = resolve(properties.get(key, schema.get("items")), schema)
            inner = self._arguments_at(value, 0, {**schema, **own}) if self._calls.nests else None
            if inner is not None and inner[0] and not value[inner[1] :].strip():
                arguments[key] = inner[0]
            else:
                is_text = is_written_as_text(own) if not kind else kind == self._calls.kinds[0]
                arguments[key] = value if is_text else _value(value)
            items.append(arguments[key])
            at = end.end()
        is_list = self._calls.nests and arguments.keys() == {"item"}
        return (items if is_list else arguments), at

    def _read_python(self, text: str, at: int) -> Block | None:
        end = text.find(self._calls.end_tag, at) if self._calls.end_tag else -1
        stop = len(text) if end < 0 else end
        calls = _python_calls(text[at:stop])
        return (calls, stop + (len(self._calls.end_tag) if end >= 0 else 0), end >= 0) if calls else None


_reader = lru_cache(maxsize=64)(_Reader)


def _pattern(template: str) -> str:
    """A regular expression for a text with places, which takes any white space where the text has some."""
    parts = re.split(r"(\{\w+\}|\s+)", template)
    return "".join(
        _SPOTS[spot[1]] if (spot := PLACE.fullmatch(part)) else r"\s*" if part.isspace() else re.escape(part)
        for part in parts
    )


def _next_place(text: str, at: int) -> int:
    found = _BETWEEN.match(text, at)
    return found.end() if found else at


@lru_cache(maxsize=256)
def _parameter_end(after: str, key: str) -> re.Pattern[str]:
    escaped = _pattern(after.removeprefix("\n").replace("{key}", key) if "{key}" in after else after.removeprefix("\n"))
    return re.compile(("\n?" if after.startswith("\n") else "") + escaped)


def _schema_of(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    found = next((tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name), None)
    return found if isinstance(found, dict) else {}


def resolve(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A property's schema, behind a reference into the schema that it is a part of."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    found = referenced(root, reference) if isinstance(reference, str) and reference.startswith("#") else schema
    return found if isinstance(found, dict) else {}


def is_written_as_text(schema: Mapping[str, Any]) -> bool:
    """Whether an argument is written as text. It is JSON if its schema gives a type other than string."""
    kinds = schema.get("type")
    return not isinstance(kinds, str | list) or "string" in kinds


def _value(text: str) -> Any:
    # Templates write earlier calls back through str(), so models write these words as Python does.
    parsed = whole_json(_WORDS.get(text.strip(), text))
    return parsed[0] if parsed else text


class _Words(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_PYTHON_WORDS[node.id]) if node.id in _PYTHON_WORDS else node


def _python_calls(text: str) -> list[ToolCall] | None:
    """A list of calls of functions by names, with literals as keyword arguments. JSON's words are taken, too."""
    try:
        written = ast.parse(text.strip(), mode="eval").body
        calls = [_python_call(one) for one in written.elts] if isinstance(written, ast.List) else []
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return [call for call in calls if call] if all(calls) else None


def _python_call(node: ast.expr) -> ToolCall | None:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        return None
    given = {one.arg: ast.literal_eval(_Words().visit(one.value)) for one in node.keywords}
    return to_call(ast.unparse(node.func), given) if None not in given else None


def _gemma_at(text: str, at: int, after: str) -> tuple[Any, int] | None:
    """`{key:<|"|>text<|"|>,other:[1,true]}`, up to the text behind it, as JSON."""
    end = text.find(after, at)
    if end < 0:
        return None
    pieces = ("{" + text[at:end] + "}").split(_GEMMA_QUOTE)
    for number, piece in enumerate(pieces):
        pieces[number] = json.dumps(piece) if number % 2 else _GEMMA_KEY.sub(r'\1"\2":', piece)
    parsed = whole_json("".join(pieces))
    return (parsed[0], end) if parsed else None


def to_call(name: Any, given: Any) -> ToolCall | None:
    """The call of a function with arguments: an object, its JSON, or None for none. None if they are anything else."""
    if isinstance(given, str):
        parsed = whole_json(given)
        given = parsed[0] if parsed else given
    arguments = {} if given is None else given
    if not isinstance(name, str) or not name or _SURROGATE.search(name) or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return None
    return ToolCall(name, _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text))
