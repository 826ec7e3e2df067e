"""What runs in the process that compares answers with JSON schemas and patterns.

It reads lines of JSON from stdin: a list with the seconds that one answer may take, and the checks as pairs of their
kind and their pattern or schema; then a line for each answer, with the number of the check and the text. Each answer
gets a line on stdout: null if it is good, or a text that says why it is not. One that takes too long ends the process.

It imports nothing of this project, so that it starts quickly.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

MAX_CHARACTERS = 300

Check = Callable[[str], str | None]
"""Says why a text is not good, or None."""


def pattern_check(pattern: str) -> Check:
    compiled = re.compile(pattern)

    def check(text: str) -> str | None:
        return None if compiled.fullmatch(text.strip()) else f"it does not match {_short(pattern)}"

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
        raise ValueError(_short(error.message)) from error
    validator = kind(schema, registry=Registry())  # which fetches nothing from anywhere

    def check(text: str) -> str | None:
        try:
            value = json.loads(text, parse_constant=_refuse)
        except RecursionError:
            return "it is not valid JSON: it is nested too deeply"
        except ValueError as error:
            return f"it is not valid JSON: {error}"
        try:
            worst = exceptions.best_match(validator.iter_errors(value))
        except Unresolvable as error:
            return f"the schema cannot be applied: {_short(str(error))}"
        if worst is None:
            return None
        return f"{worst.json_path}: {_short(worst.message)}" if worst.json_path != "$" else _short(worst.message)

    return check


CHECKS: dict[str, Callable[[str], Check]] = {"json-schema": schema_check, "regex": pattern_check}


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not allowed")


def _short(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + "…"


def main() -> None:
    timeout_s, given = json.loads(sys.stdin.readline())
    checks = [CHECKS[kind](value) for kind, value in given]
    for line in sys.stdin:
        number, text = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)  # whose signal ends the process, whatever it is busy with
        error = checks[number](text)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    main()
