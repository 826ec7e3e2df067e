"""Checks of answers: what each of them accepts, what it says of the others, and that none can take for ever."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cbatch.base.errors import ConfigError
from cbatch.extras import install_command
from cbatch.validation.validation import Checker, Validation

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name"],
}


@pytest.fixture
def checker_of() -> Iterator[Callable[..., Checker]]:
    """Makes checkers, and ends their processes."""
    made: list[Checker] = []

    def make(*checks: Any, timeout_s: float = 30.0) -> Checker:
        validation = Validation.of(checks, timeout_s=timeout_s)
        assert validation is not None
        made.append(Checker(validation, threading.Event()))
        return made[-1]

    yield make
    for one in made:
        one.close()


PATTERN = "regex=[0-9]+=x|yes"
ANSWERS: list[tuple[Any, str, str | None]] = [
    (SCHEMA, '\n{"name": "é😀", "age": 7}\n', None),
    (SCHEMA, '{"name": "a", "age": 200}', "$.age: 200 is greater than the maximum of 150"),
    (SCHEMA, "[]", "[] is not of type 'object'"),
    (SCHEMA, "Sure! {}", "not valid JSON: Expecting"),
    (SCHEMA, '{"name": "a", "age": NaN}', "NaN is not a JSON value"),
    (SCHEMA, "[" * 100_000, "nested too deeply"),
    (SCHEMA, '{"name": "\\ud800"}', None),
    (PATTERN, "12=x", None),
    (PATTERN, " yes\n", None),
    (PATTERN, "yes!", "it does not match [0-9]+=x|yes"),
    (PATTERN, "12", "it does not match [0-9]+=x|yes"),
    ("command=false", "", "exit code 1"),
]


def test_checks_say_what_is_wrong_and_where(checker_of: Callable[..., Checker]) -> None:
    """Guards answers of the right form, and the sentence about others; one process serves all of a check."""
    checkers = [(one, checker_of(one)) for one in (SCHEMA, PATTERN, "command=false")]
    for check, text, expected in ANSWERS:
        (checker,) = (checker for one, checker in checkers if one is check)
        error = checker.error_of(text)
        assert error is expected is None or (expected is not None and expected in str(error))


def test_a_command_reads_the_answer_and_tells_by_its_exit_code(
    checker_of: Callable[..., Checker], tmp_path: Path
) -> None:
    """Guards commands: no shell, the text on stdin, the last line of what they say."""
    script = tmp_path / "my check.py"
    script.write_text(
        "import sys\ntext = sys.stdin.buffer.read().decode()\nprint('noise')\n"
        "sys.exit(0 if text == 'gut ü; $HOME' else f'first\\nnot {text}')\n"
    )
    checker = checker_of(f"command={sys.executable} '{script}'")
    assert checker.error_of("gut ü; $HOME") is None
    assert checker.error_of("bad. ") == "not bad"


def test_all_checks_have_to_pass(checker_of: Callable[..., Checker]) -> None:
    """Guards several checks of different kinds, in their order, and functions of Python."""

    def short(text: str) -> object:
        return len(text) < 5

    def even(text: str) -> object:
        return None if int(text) % 2 == 0 else f"{text} is odd."

    checker = checker_of("regex=.*[0-9]", short, "command=grep -q 4", even)
    assert checker.error_of("14") is None
    assert checker.error_of("x") == "it does not match .*[0-9]"
    assert checker.error_of("141414") == "short refuses it"
    assert checker.error_of("16") == "exit code 1"
    assert checker.error_of("41") == "41 is odd"
    assert "ValueError: invalid literal" in str(checker.error_of("a4"))


@pytest.mark.parametrize("check", ["regex=(a+)+b", 'json-schema={"pattern": "^(a+)+b$"}', "command=sleep 60"])
def test_no_check_takes_for_ever(checker_of: Callable[..., Checker], check: str) -> None:
    """Guards the run against a pattern that backtracks without end, and a command that hangs; the next is served."""
    checker, started = checker_of(check, timeout_s=0.5), time.monotonic()
    assert checker.error_of('"' + "a" * 60 + '"' if "json" in check else "a" * 60) == "its check took more than 0.5 s"
    assert time.monotonic() - started < 20
    if not check.startswith("command"):
        assert checker.error_of('"aab"' if "json" in check else "aab") is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checks": ["person.json"]}, "is no check; give json-schema="),
        ({"checks": ["regex="]}, "is no check"),
        ({"checks": ["regex=("]}, "is no pattern"),
        ({"checks": ['json-schema={"type": "nothing"}']}, "This is no JSON schema: 'nothing'"),
        ({"checks": ["json-schema={"]}, "This is no JSON schema"),
        ({"checks": ["json-schema=/nowhere/a.json"]}, "Cannot read /nowhere/a.json: No such file"),
        ({"checks": ["command=no-such-command -x"]}, "There is no command 'no-such-command'"),
        ({"checks": ["command=a 'b"]}, "is no command"),
        ({"checks": [5]}, "not int"),
        ({"checks": ["regex=a"], "tries": 0}, "tries must be a whole number of at least 1"),
        ({"checks": [], "tries": 2}, "needs something that says which answers are good"),
        ({"checks": ["regex=a"], "tells_error": True}, "only if it has more than one try"),
        ({"checks": ["regex=a"], "timeout_s": 0.0}, "must be above 0 s"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    """Guards a run of hours against a check that cannot work."""
    with pytest.raises(ConfigError, match=message):
        Validation.of(**options)


def test_a_missing_library_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against rows that all fail because jsonschema is not installed."""
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ConfigError, match=re.escape(install_command("validate"))):
        Validation.of([SCHEMA])


def test_identity_is_what_decides_a_result(tmp_path: Path) -> None:
    """Guards keys: a schema counts by its content, wherever it stands, and its time limit does not count."""
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA, indent=2))

    def identity(check: object, **options: Any) -> object:
        made = Validation.of([check], **options)
        assert made is not None
        return made.identity

    same = {identity(one) for one in (f"json-schema={file}", SCHEMA, f"json-schema={json.dumps(SCHEMA)}")}
    assert len(same) == 1 and identity(SCHEMA, timeout_s=1.0) in same
    others = [
        identity({"type": "object"}),
        identity("regex=a"),
        identity("regex=b"),
        identity("command=cat"),
        identity("command=cat -n"),
        identity("regex=a", tries=2),
        identity("regex=a", tries=2, tells_error=True),
        identity(os.path.basename),
    ]
    assert len({*others, *same}) == 9
