"""JSON schemas as rules of a grammar: how the JSON is laid out, and which properties it may have.

An object takes the properties that its schema names, unless `additionalProperties` says otherwise. JSON Schema would
allow any others, and a model could add them until it is cut off; OpenAI's strict mode and vLLM allow none, either.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any

from cbatch.base.strict_json import referenced

RESERVED_KEYWORD = "x-guidance"
"""The library's keyword for its own options in a JSON schema."""

_ONE_LINE = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", ", "lenient": False}
# A small model can fill its whole budget with blanks if any number of them is allowed.
_PRETTY = {"whitespace_pattern": r"( |\n {0,40})", "lenient": False}

_OPEN = ("additionalProperties", "unevaluatedProperties")
_COMBINED = ("allOf", "anyOf", "oneOf", "$ref", "if", "then", "else", "not", "dependentSchemas")
"""Keywords whose schemas apply to the same object as those beside them."""

_DATA = ("const", "enum", "default", "examples", "example", RESERVED_KEYWORD)
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")

_KEYWORDS = {
    *_OPEN, *_COMBINED, *_DATA, *_BY_NAME,
    *"type items prefixItems additionalItems contains minContains maxContains minItems maxItems uniqueItems".split(),
    *"unevaluatedItems required minProperties maxProperties propertyNames dependentRequired dependencies".split(),
    *"minLength maxLength pattern format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf title".split(),
    *"description id readOnly writeOnly deprecated contentEncoding contentMediaType contentSchema".split(),
    *"nullable discriminator xml externalDocs".split(),
}  # fmt: skip
"""Keywords of the drafts of JSON Schema, of OpenAPI and of other APIs. `$` and `x-` begin further ones."""


def schema_faults(schema: Any) -> Iterator[tuple[bool, str]]:
    """Sentences about words that a schema uses and JSON Schema does not have; and whether it is a type, else a keyword.

    An unknown keyword constrains nothing.
    """
    for name, value in schema.items() if isinstance(schema, dict) else ():
        parts = value if isinstance(value, list) else [value]
        if name == "type":
            for kind in parts:
                if kind not in _TYPES:
                    yield True, f"JSON Schema has no type {kind!r}{_meant(kind, _TYPES)}"
        elif name in _KEYWORDS:
            if name in _BY_NAME and isinstance(value, dict):
                parts = list(value.values())
            for part in parts if name not in _DATA else ():
                yield from schema_faults(part)
        elif not name.startswith(("$", "x-")):
            yield False, f"JSON Schema has no keyword {name!r}, so it constrains nothing{_meant(name, _KEYWORDS)}"


def _meant(name: Any, known: Iterable[str]) -> str:
    found = get_close_matches(str(name), known, 1)
    return f" (did you mean {found[0]!r}?)." if found else "."


def json_rule(schema: dict[str, Any], *, pretty: bool = False) -> str:
    """The rule of a grammar for JSON that is valid for a schema.

    pretty: with line breaks, or as one line
    """
    shared = {reference for part in _parts(schema) if _is_combined(part) for reference in _references(part)}
    targets = [id(target) for reference in shared if (target := referenced(schema, reference)) is not None]
    closed = _closed(schema, set(targets), is_part=False)
    return "%json " + json.dumps(closed | {RESERVED_KEYWORD: _PRETTY if pretty else _ONE_LINE})


def _closed(schema: Any, shared: set[int], *, is_part: bool) -> Any:
    """A copy of a schema in which objects with names of properties take no others.

    shared:  ids of schemas that apply to an object together with others
    is_part: whether this one does
    """
    if not isinstance(schema, dict):
        return schema
    is_part = is_part or id(schema) in shared
    is_combined = _is_combined(schema)
    made: dict[str, Any] = {}
    for name, value in schema.items():
        is_inner = name in _COMBINED and (is_combined or is_part)
        if name in _DATA:
            made[name] = value
        elif name in _BY_NAME and isinstance(value, dict):
            made[name] = {key: _closed(one, shared, is_part=False) for key, one in value.items()}
        elif isinstance(value, list):
            made[name] = [_closed(one, shared, is_part=is_inner) for one in value]
        else:
            made[name] = _closed(value, shared, is_part=is_inner)
    names = made.keys() & {"properties", "patternProperties"}
    if names and not is_part and not is_combined and not made.keys() & set(_OPEN):
        made["additionalProperties"] = False
    return made


def _is_combined(schema: dict[str, Any]) -> bool:
    """Whether several schemas name the properties of one object, so that none of them names all."""
    combining = [name for name in _COMBINED if name in schema]
    several = "allOf" in combining and isinstance(schema["allOf"], list) and len(schema["allOf"]) > 1
    return several or len(combining) > 1 or bool(combining and schema.keys() & {"properties", "patternProperties"})


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all schemas in it."""
    if isinstance(schema, list):
        for one in schema:
            yield from _parts(one)
    elif isinstance(schema, dict):
        yield schema
        for name, value in schema.items():
            if name not in _DATA:
                yield from _parts(value)


def _references(schema: dict[str, Any]) -> Iterator[str]:
    """The references that apply to the same object as a combined schema, however deep in its combinations."""
    for name in _COMBINED:
        value = schema.get(name)
        if name == "$ref" and isinstance(value, str):
            yield value
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict):
                yield from _references(one)
