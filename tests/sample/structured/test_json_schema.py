"""Things that a JSON schema leaves unsaid: which further properties an object has, and where white space stands."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cbatch.sample.structured.json_schema import json_rule

A, B = {"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}
CLOSED_A = A | {"additionalProperties": False}


def made(schema: dict[str, Any]) -> dict[str, Any]:
    rule = json.loads(json_rule(schema).removeprefix("%json "))
    return {name: value for name, value in rule.items() if name != "x-guidance"}


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (A, CLOSED_A),
        (
            {"properties": {"x": A, "enum": A}},
            {"properties": {"x": CLOSED_A, "enum": CLOSED_A}, "additionalProperties": False},
        ),
        ({"items": A, "prefixItems": [A]}, {"items": CLOSED_A, "prefixItems": [CLOSED_A]}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED_A, {"type": "null"}]}),
        ({"$defs": {"x": A}, "$ref": "#/$defs/x"}, {"$defs": {"x": CLOSED_A}, "$ref": "#/$defs/x"}),
        ({"allOf": [A]}, {"allOf": [CLOSED_A]}),
    ],
    ids=str,
)
def test_objects_take_the_properties_that_are_named(schema: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Guards against keys that a model adds until it is cut off, however the object is reached."""
    assert made(schema) == wanted


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "additionalProperties": True, "properties": {"a": {}}},
        {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": {"type": "integer"}},
        {"allOf": [A, B]},
        A | {"anyOf": [B, {"required": ["a"]}]},
        {"$defs": {"a/b": A, "c": B}, "allOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/c"}]},
        {"$defs": {"x": B}, "properties": {"a": {}}, "$ref": "#/$defs/x"},
        {"const": A, "enum": [A]},
        {"$defs": {"x": {"$ref": "https://elsewhere"}}, "anyOf": [{"allOf": [A, B]}]},
    ],
    ids=str,
)
def test_what_several_schemas_name_stays_open(schema: dict[str, Any]) -> None:
    """Guards objects whose properties stand in several places: none of these names all of them."""
    assert made(schema) == schema


def test_white_space_is_one_line_or_bounded() -> None:
    """Guards the two layouts."""
    assert '"item_separator": ", "' in json_rule(A) and '"whitespace_flexible": false' in json_rule(A)
    assert "{0,40}" in json_rule(A, pretty=True)
