"""What makes an answer good, and how often a model may try."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cbatch.base.errors import ConfigError
from cbatch.extras import require_package
from cbatch.validation import child

CHECK_TIMEOUT_S = 30.0
"""Seconds that the check of one answer may take, unless somebody says otherwise."""

CheckKind = Literal["json-schema", "regex", "command", "function"]
FORMS = "json-schema=FILE, json-schema={...}, regex=PATTERN or command=WORDS"

CheckFunction = Callable[[str], object]
"""Gets an answer. It is good unless the function returns False or a text that says what is wrong, or raises."""

CheckLike = str | Mapping[str, Any] | CheckFunction
"""What a caller of Python may give as a check: one of FORMS, a schema or a function."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that makes an answer good.

    value:    JSON text of a schema, a pattern, or the words of a command as JSON; the name of a function
    function: of that kind
    """

    kind: CheckKind
    value: str
    function: CheckFunction | None = None

    @classmethod
    def parse(cls, text: str) -> Check:
        """Reads one of FORMS. Raises ConfigError if it is none, or cannot be used here."""
        kind, separator, value = text.partition("=")
        if separator and value:
            if kind == "json-schema":
                return cls.of_schema(_schema_text(value))
            if kind == "regex":
                return cls.of_pattern(value)
            if kind == "command":
                return cls.of_command(value)
        raise ConfigError(f"{text!r} is no check; give {FORMS}.")

    @classmethod
    def of_schema(cls, text: str) -> Check:
        require_package("jsonschema")
        try:
            schema = json.dumps(json.loads(text))
            child.schema_check(schema)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"This is no JSON schema: {error}.") from None
        return cls("json-schema", schema)

    @classmethod
    def of_pattern(cls, pattern: str) -> Check:
        try:
            re.compile(pattern)
        except (re.error, RecursionError) as error:
            raise ConfigError(f"{pattern!r} is no pattern: {error}.") from None
        return cls("regex", pattern)

    @classmethod
    def of_command(cls, text: str) -> Check:
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"{text!r} is no command: {error}.") from None
        if not words or shutil.which(words[0]) is None:
            raise ConfigError(f"There is no command {words[0] if words else text!r}.")
        return cls("command", json.dumps(words))

    @classmethod
    def of(cls, value: object) -> Check:
        """A check from Python: one of FORMS, a schema as a mapping, or a function. Raises ConfigError."""
        if isinstance(value, Check):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        if isinstance(value, Mapping):
            try:
                return cls.of_schema(json.dumps(dict(value)))
            except TypeError as error:
                raise ConfigError(f"This is no JSON schema: {error}.") from None
        if callable(value):
            name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
            return cls("function", name, value)
        raise ConfigError(f"A check is a text ({FORMS}), a schema or a function, not {type(value).__name__}.")


@dataclass(frozen=True, slots=True)
class Validation:
    """How the answers of a batch are validated.

    checks:      an answer is good if it passes all of them
    max_tries:   answers that a model may give for a row
    tells_error: whether it sees, from the second try on, its answers so far and what is wrong with them
    timeout_s:   seconds that a check may take; an answer whose check takes longer is not good
    """

    checks: tuple[Check, ...]
    max_tries: int = 1
    tells_error: bool = False
    timeout_s: float = CHECK_TIMEOUT_S

    @classmethod
    def of(
        cls, checks: Iterable[object], *, tries: int = 1, tells_error: bool = False, timeout_s: float = CHECK_TIMEOUT_S
    ) -> Validation | None:
        """None without checks. Raises ConfigError for options that are wrong or make no sense together."""
        made = tuple(map(Check.of, checks))
        if type(tries) is not int or tries < 1:
            raise ConfigError(f"tries must be a whole number of at least 1, not {tries!r}.")
        if not timeout_s > 0:
            raise ConfigError(f"The time for a check must be above 0 s, not {timeout_s!r}.")
        if not made and tries > 1:
            raise ConfigError("More than one try needs something that says which answers are good (validate).")
        if tells_error and tries == 1:
            raise ConfigError("The model can be told what was wrong only if it has more than one try (tries).")
        return cls(made, tries, tells_error, timeout_s) if made else None

    @property
    def identity(self) -> tuple[object, ...]:
        """What of it decides a result, for keys."""
        return tuple((check.kind, check.value) for check in self.checks), self.max_tries, self.tells_error


def _schema_text(value: str) -> str:
    """A schema that stands in the option itself, or in a file."""
    if value.lstrip().startswith("{") or value in ("true", "false"):
        return value
    try:
        return Path(value).read_text()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"Cannot read {value}: {reason}.") from error


def as_checks(value: CheckLike | Sequence[CheckLike] | None) -> Sequence[object]:
    """The checks that a caller of Python gives: none, one, or a list of them."""
    if value is None:
        return []
    return value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
