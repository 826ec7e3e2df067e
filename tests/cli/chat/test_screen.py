"""How a session is drawn: wrapping, the status bar. All of it fits, and nothing steers the terminal."""

from __future__ import annotations

import subprocess
import sys
import unicodedata
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.utils import get_cwidth

from cbatch.cli.chat.background_run import BackgroundRun
from cbatch.cli.chat.controller import ChatController
from cbatch.cli.chat.markdown.lines import StyledLine, wrap_plain
from cbatch.cli.chat.session.session import Notice, Reply, Session, Turn
from cbatch.cli.chat.stats import ChatStats
from cbatch.cli.chat.tui.screen import Transcript, conversation_lines, status_bar, visible_lines

TEXT = st.text(st.one_of(st.characters(), st.sampled_from("  \n\n`*-#> \x1b\r\t日本👍\u200d\u0301")), max_size=200)


def texts(lines: list[StyledLine]) -> list[str]:
    return ["".join(text for _, text in line) for line in lines]


@given(TEXT, st.integers(2, 60))
def test_plain_text_loses_nothing_but_blanks(text: str, width: int) -> None:
    """Guards what the user typed against being swallowed by a wrap; no line is too wide, or steers the terminal."""
    lines = texts(wrap_plain(text, width))
    assert all(get_cwidth(line) <= width for line in lines)
    assert not any(unicodedata.category(character) == "Cc" for line in lines for character in line)
    shown = "".join("".join(lines).split())
    kept = (c for c in text if unicodedata.category(c) != "Cc" and c not in "\u061c\u200e\u200f\u2028\u2029")
    bidi = {chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
    assert shown == "".join("".join(c for c in kept if c not in bidi).split())


def test_alternatives_stand_side_by_side_where_they_fit() -> None:
    """Guards `/retry N`: columns on a wide screen, one below the other on a narrow one."""
    session = Session("s")
    replies = [Reply(text, state="stop") for text in ("old", "one two", "three", "four")]
    session.items.append(Turn("q", replies, 1, first_compared=1))
    wide = texts([line for chunk in Transcript().chunks(session, 80) for line in chunk])
    assert [line.split("│") for line in wide[2:4]] == [
        ["[1]".ljust(25), " [2]".ljust(26), " [3]".ljust(25)],
        ["one two".ljust(25), " three".ljust(26), " four".ljust(25)],
    ]
    narrow = texts([line for chunk in Transcript().chunks(session, 40) for line in chunk])
    assert narrow[2:4] == ["[1]", "one two"] and "old" not in "".join(narrow)


@pytest.mark.parametrize(
    ("height", "top", "expected"), [(4, None, (6, 0)), (4, 2, (2, 4)), (40, 3, (0, 0)), (1, 99, (9, 0))]
)
def test_the_visible_part(height: int, top: int | None, expected: tuple[int, int]) -> None:
    """Guards scrolling: the end is followed unless the user has scrolled up, and every line can be reached."""
    chunks = [[[("", str(n))] for n in range(start, start + 2)] for start in range(0, 10, 2)]
    lines, start, end = visible_lines(chunks, height, top)
    assert (start, end - start) == expected and len(lines) == min(height, 10)
    assert texts(lines)[0] == str(start)


@pytest.mark.parametrize("width", [1, 5, 20, 80, 200])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_the_bar_fits_and_shows_the_current_session(width: int, count: int) -> None:
    """Guards the bar at any width, with any number of sessions, and with names of wide characters."""
    client: Any = SimpleNamespace(engine=None)
    controller = ChatController(client)
    for number in range(count - 1):
        controller.new_session(f"日本{number}" if number % 2 else None)
    controller.switch(controller.sessions[count // 2])
    background = BackgroundRun()
    line = texts([status_bar(controller, ChatStats(controller), background, width)])[0]
    assert get_cwidth(line) <= width
    if width >= 20:
        assert f"[{count // 2 + 1} " in line


def test_notes_stand_together_and_turns_apart() -> None:
    """Guards the blank lines of a transcript."""
    session = Session("s", items=[Notice("a"), Notice("b"), Turn("q", [Reply("x", state="stop")]), Notice("c")])
    lines = [line for chunk in Transcript().chunks(session, 30) for line in chunk]
    assert texts(lines) == ["· a", "· b", "", "> q", "", "x", "", "· c"]


def test_code_is_printed_unbroken_at_the_end() -> None:
    """Guards code that is selected in the terminal after the chat: each of its lines is one line."""
    code = "x = 1  # " + "long " * 60
    answer = Reply(f"```python\n{code}\n```\n" + "word " * 60, state="stop", requested_at=1.0)
    loaded = Turn("before", [Reply("not from this chat", state="stop")])
    session = Session("s", items=[loaded, Turn("q", [answer])])
    lines = texts(list(conversation_lines(session, 80)))
    assert code.rstrip() in [line.rstrip() for line in lines] and "not from this chat" not in "".join(lines)
    assert max(len(line) for line in lines if "word" in line) <= 80


def test_the_prompt_waits_for_no_library() -> None:
    """Guards the time to the prompt: what lays out Markdown, and the engine, are imported after it."""
    code = (
        "import sys, cbatch.cli.chat.tui.terminal, cbatch.cli.chat.session.store\n"
        "cbatch.cli.chat.tui.terminal.BackgroundRun()\n"
        "late = {'markdown_it', 'numpy', 'pygments.lexers', 'tokenizers', 'torch', 'transformers'}\n"
        "print(sorted(late & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_what_libraries_print_does_not_reach_the_screen() -> None:
    """Guards the screen against output of Python, C libraries, child processes and progress bars."""
    code = """
import os, subprocess, sys
from cbatch.cli.common.stdout import capture_output
lines = []
with capture_output(lines.append) as terminal:
    os.write(2, b"from C\\n")
    print("from Python", file=sys.stderr)
    print("on stdout", flush=True)
    subprocess.run(["echo", "from a child"])
    os.write(2, b" 10%\\r 20%\\r\\n")
    terminal.write("the screen")
print(sorted(lines))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shown = sorted(["from C", "from Python", "on stdout", "from a child", " 10%", " 20%"])
    assert (done.stdout, done.stderr) == (f"the screen{shown}\n", "")
