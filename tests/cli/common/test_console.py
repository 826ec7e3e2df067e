"""Output for people: no text of a model or a file can control their terminal."""

from __future__ import annotations

import json

import pytest

from cbatch.cli.common.console import notice, safe, safe_json

EVIL = "a\x1b[31m\x9b31m\x7f\u202eb"


def test_text_cannot_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the terminal, and against a message that looks like two."""
    assert safe(EVIL) == "a[31m31mb" and safe("tab\tnew\n") == "tab\tnew\n"
    notice(f"bad url x\ncbatch: all fine {EVIL}")
    assert capsys.readouterr().err == "cbatch: bad url x cbatch: all fine a[31m31mb\n"


def test_rows_on_a_terminal_mean_the_same() -> None:
    """Guards JSON on a terminal: control characters are escaped, and the text reads back unchanged."""
    row = json.dumps({"text": EVIL}, ensure_ascii=False).encode() + b"\n"
    shown = safe_json(row)
    assert json.loads(shown) == {"text": EVIL} and shown.endswith(b"}\n") and b"\\u202e" in shown
    assert not any(character in shown.decode() for character in "\x1b\x9b\x7f\u202e")
