"""Validation of answers: the checks, how often a model may try, and the process that checks."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cbatch.base.errors import ConfigError, reason_of
from cbatch.extras import require_package
from cbatch.isolate.child import Limits
from cbatch.isolate.process import MAX_ERROR_CHARACTERS, run_process
from cbatch.isolate.sandbox import Sandbox
from cbatch.isolate.worker import WorkerDied, WorkerFailed
from cbatch.validation import child

CHECK_TIMEOUT_S = 30.0
"""Seconds that the check of one answer may take, unless somebody says otherwise."""

CheckKind = Literal["json-schema", "regex", "command", "function"]
FORMS = "json-schema=FILE, json-schema={...}, regex=PATTERN or command=WORDS"

CheckFunction = Callable[[str], object]
"""Gets an answer. It is good unless the function returns False or a text that says what is wrong, or raises."""

CheckLike = str | Mapping[str, Any] | CheckFunction
"""A check as a caller of Python may give it: one of FORMS, a schema or a function."""


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
            raise ConfigError(f"This is no JSON schema: {str(error)[:MAX_ERROR_CHARACTERS]}.") from None
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
        """The part of it that decides a result, for keys."""
        return tuple((check.kind, check.value) for check in self.checks), self.max_tries, self.tells_error


def _schema_text(value: str) -> str:
    if value.lstrip().startswith("{") or value in ("true", "false"):
        return value
    try:
        return Path(value).read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read {value}: {reason_of(error)}.") from error


def as_checks(value: CheckLike | Sequence[CheckLike] | None) -> Sequence[object]:
    """The checks that a caller of Python gives: none, one, or a list of them."""
    if value is None:
        return []
    return value if isinstance(value, Sequence) and not isinstance(value, str) else [value]


class Checker:
    """Belongs to one thread, except `close`.

    Patterns and schemas can take for ever, and the interpreter could do nothing else meanwhile, so they run in a
    process that is kept for the next answer.
    """

    def __init__(self, validation: Validation, cancelled: threading.Event) -> None:
        """`cancelled`: ends commands when it is set."""
        self._validation, self._cancelled = validation, cancelled
        self._in_child = [check for check in validation.checks if check.kind in child.CHECKS]
        checks = [(check.kind, check.value) for check in self._in_child]
        limits = Limits(wall_seconds=validation.timeout_s)
        self.sandbox = Sandbox("cbatch.validation.child:Checks", checks, limits=limits)

    def error_of(self, text: str) -> str | None:
        """Why an answer is not good, in a sentence without a full stop; None if it is."""
        for check in self._validation.checks:
            if check.kind == "command":
                error = self._run(json.loads(check.value), text)
            elif check.function is not None:
                error = _call(check, text)
            else:
                error = self._ask(self._in_child.index(check), text)
            if error is not None:
                return " ".join(error.split())[:MAX_ERROR_CHARACTERS].rstrip(". ")
        return None

    def close(self) -> None:
        """Ends the process, and with it a check that runs. May be called on any thread."""
        self.sandbox.close()

    def _run(self, words: list[str], text: str) -> str | None:
        try:
            result = run_process(words, text.encode("utf-8", "replace"), self._validation.timeout_s, self._cancelled)
        except OSError as error:
            return f"the check {words[0]} cannot be run: {error.strerror}"
        if result.exit_code is None:
            return self._too_long
        return None if result.exit_code == 0 else result.last_words

    def _ask(self, number: int, text: str) -> str | None:
        try:
            error: str | None = self.sandbox.call("error_of", number, text)
        except WorkerDied as died:
            error = self._too_long if died.is_late else f"the check ended without a result (exit code {died.code})"
        except (WorkerFailed, OSError) as failed:
            error = f"the check ended without a result ({failed})"
        return error

    @property
    def _too_long(self) -> str:
        return f"its check took more than {self._validation.timeout_s:g} s"


def _call(check: Check, text: str) -> str | None:
    assert check.function is not None
    try:
        found = check.function(text)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if found is False:
        return f"{check.value.rpartition('.')[2]} refuses it"
    return found if isinstance(found, str) else None
