"""Output for people: no text of a model or a file can control their terminal."""

from __future__ import annotations

import io
import json
import sys

import pytest

from cbatch.cli.common import console
from cbatch.cli.common.console import notice, safe, safe_json, show_progress

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


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_terminal", [True, False])
def test_details_of_progress(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the lines for each replica: below the bar on a terminal, and else at the end of the line."""
    stream = Screen() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(console, "BAR_SECONDS", 0)
    monkeypatch.setattr(console, "LINE_SECONDS", 0)
    details = ["one: busy\x1b[2J", "two: gone"]
    with show_progress(9, lambda: (4, "quick"), lambda: details, quiet=False) as tick:
        tick()
        tick()
        shown = stream.getvalue()
    if is_terminal:
        assert "4/9 rows, quick" in shown and "one: busy[2J" in shown and "two: gone" in shown
        assert "\x1b[2J" not in shown and "one" not in stream.getvalue().rpartition("\r")[2]
    else:
        assert shown.splitlines() == ["cbatch: 4/9 rows, quick; one: busy[2J; two: gone"] * 2
