"""The process that compares answers with JSON schemas and patterns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from cbatch.base.strict_json import parse_json_value

Check = Callable[[str], str | None]
"""Says why a text is not good, or None."""


def pattern_check(pattern: str) -> Check:
    compiled = re.compile(pattern)

    def check(text: str) -> str | None:
        return None if compiled.fullmatch(text.strip()) else f"it does not match {pattern}"

    return check


def schema_check(text: str) -> Check:
    """Raises ValueError for what is no JSON schema."""
    from jsonschema import exceptions, validators
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    schema = json.loads(text)
    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except exceptions.SchemaError as error:
        raise ValueError(error.message) from error
    validator = kind(schema, registry=Registry())  # which fetches nothing from anywhere

    def check(text: str) -> str | None:
        try:
            value = parse_json_value(text)
        except ValueError as error:
            return f"it is not valid JSON: {error}"
        try:
            worst = exceptions.best_match(validator.iter_errors(value))
        except Unresolvable as error:
            return f"the schema cannot be applied: {error}"
        if worst is None:
            return None
        return f"{worst.json_path}: {worst.message}" if worst.json_path != "$" else worst.message

    return check


CHECKS: dict[str, Callable[[str], Check]] = {"json-schema": schema_check, "regex": pattern_check}


class Checks:
    """The checker of answers in the process."""

    def __init__(self, checks: list[tuple[str, str]]) -> None:
        self._checks = [CHECKS[kind](value) for kind, value in checks]

    def error_of(self, number: int, text: str) -> str | None:
        """Why an answer is not good, by a check; None if it is."""
        return self._checks[number](text)
