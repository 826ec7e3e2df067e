"""Output for people: no text of a model or a file can control their terminal."""

from __future__ import annotations

import io
import json
import os
import select
import sys
import termios

import pytest

from cbatch.cli.common import console
from cbatch.cli.common.console import OutputStream, notice, safe, safe_json, show_progress

EVIL = "a\x1b[31m\x9b31m\x7f\u202eb"


def test_text_cannot_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the terminal, and against a message that looks like two."""
    assert safe(EVIL) == "a[31m31mb" and safe("tab\tnew\n") == "tab\tnew\n"
    notice(f"bad url x\ncbatch: all fine {EVIL}")
    assert capsys.readouterr().err == "cbatch: bad url x cbatch: all fine a[31m31mb\n"


def test_a_message_quotes_no_megabytes(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the terminal against a variable or a cell of megabytes that an error quotes."""
    notice("the value '" + "[" * 10**6 + "' is not valid JSON")
    said = capsys.readouterr().err
    assert len(said) < 1100 and "the value '[[" in said and said.endswith("[' is not valid JSON\n")


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


@pytest.mark.parametrize("kind", [OutputStream, io.FileIO])
def test_rows_are_not_glued_to_the_bar(kind: type[io.FileIO], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a terminal that shows both rows and progress: each row has a line of its own, and the bar comes back."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    with os.fdopen(os.dup(theirs), "w") as stderr, os.fdopen(ours, "rb", 0) as screen:
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setattr(console, "BAR_SECONDS", 0)
        with show_progress(9, lambda: (4, "quick"), quiet=False) as tick, kind(theirs, "wb") as stdout:
            tick()
            for number in range(2):
                assert stdout.write(b'{"row": %d}\n' % number) == 11
            shown = b""
            while select.select([screen], [], [], 0.2)[0]:
                shown += screen.read(4096)
    *rows, last = [line.rpartition("\r")[2] for line in shown.decode().split("\r\n")]
    is_clean = rows == ['{"row": 0}', '{"row": 1}']
    assert is_clean is (kind is OutputStream) and ("4/9 rows, quick" in last) is is_clean
