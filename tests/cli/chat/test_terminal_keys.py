"""Keys of the chat in a pseudo-terminal: what each one does to the reply, the line, the sessions and the screen."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.support.chat_terminal import Chat
from tests.support.fork_server import ForkServer

pytestmark = pytest.mark.slow

LONG = ("--ignore-eos", "--max-tokens", 900, "--attention", "reference")
UP, DOWN, PAGE_UP, HOME, END = "\x1b[A", "\x1b[B", "\x1b[5~", "\x1b[H", "\x1b[F"
LEFT, RIGHT, ALT_LEFT, ALT_RIGHT, CTRL_LEFT = "\x1b[D", "\x1b[C", "\x1b[1;3D", "\x1b[1;3C", "\x1b[1;5D"
WHEEL_UP = "\x1b[<64;10;5M"


def numbered(folder: Path, count: int = 100) -> Path:
    """A saved session whose reply has this many lines, each with its number."""
    path = folder / "numbered.json"
    text = "\\n".join(f"line {number}" for number in range(count))
    answer = f'{{"text": "{text}", "seed": 0, "params": {{}}, "error": "", "code": "", "remark": "", "state": "stop"}}'
    turn = f'{{"user": "Count.", "chosen": 0, "answers": [{answer}]}}'
    rest = '"system": null, "params": {}, "prelude": [], "dropped": 0, "attempts": 0'
    path.write_text(f'{{"cbatch_session": 1, "name": "numbered", {rest}, "turns": [{turn}]}}')
    return path


def shown_lines(chat: Chat) -> list[int]:
    return [int(number) for line in chat.lines for number in re.findall(r"^line (\d+)$", line)]


def test_escape(runs: ForkServer, tmp_path: Path) -> None:
    """Guards Esc: it stops a reply, closes the menu, and swallows no key that is typed after it."""
    with Chat(runs, tmp_path, *LONG) as chat:
        chat.ask_for_long()
        chat.send("\x1b")
        chat.wait("stopped; /continue resumes it", gone="running")
        chat.pump(0.2)
        chat.send("x")
        chat.wait("main> x")
        chat.send("\x03/ex\t\t")
        chat.wait("export", "exit")
        chat.send("\x1b")
        chat.settle()
        assert chat.input.startswith("/ex") and "export" not in "".join(chat.lines[:-1])
        chat.send("\x1b")
        chat.pump(0.2)
        chat.send("!")
        chat.wait(chat.input + "!")


def test_a_draft_stays_in_its_session(runs: ForkServer, tmp_path: Path) -> None:
    """Guards half-typed text against following the user into another session, and keys that switch."""
    with Chat(runs, tmp_path) as chat:
        chat.say("/new bob")
        chat.wait_for_sessions("1 main [2 bob]")
        chat.send("for Bob only")
        chat.wait("bob> for Bob only")
        chat.send(ALT_LEFT)
        chat.wait_for_sessions("[1 main] 2 bob")
        assert chat.input == ""
        chat.send("for main")
        chat.send(ALT_RIGHT)
        chat.wait("bob> for Bob only")
        chat.send("\x1b1")
        chat.wait("main> for main")
        chat.send("\x03")
        chat.say("/switch bob")
        chat.wait("bob> for Bob only")
        chat.send("\x03")
        chat.say("Hello.")
        chat.wait("> Hello.", "1 main [2 bob ")
        chat.send("half a thought")
        chat.wait("bob> half a thought")
        chat.run.send(signal.SIGTERM)
        assert chat.ended() == 143
    with Chat(runs, tmp_path, "-c", wait_for="bob>") as chat:
        chat.wait("> Hello.", "bob> half a thought")
        chat.send("\x03")
        assert chat.leave() == 0
    with Chat(runs, tmp_path, "-c", wait_for="bob>") as chat:
        chat.wait("> Hello.")
        chat.settle()
        assert chat.input == "", "a draft that was cleared is back"


def test_lines_are_edited_by_the_usual_keys(runs: ForkServer, tmp_path: Path) -> None:
    """Guards Ctrl-Left, which moves by a word, the three ways to begin a new line, and a paste of several."""
    with Chat(runs, tmp_path, "--max-tokens", 3) as chat:
        chat.send("one three")
        chat.wait("main> one three")
        chat.send(CTRL_LEFT + "two ")
        chat.wait("main> one two three")
        chat.send("\x05\nby Ctrl-J\\\rby a backslash\x1b\rby Alt-Enter")
        chat.send("\x1b[200~\npasted\n/twice\x1b[201~")
        chat.wait("one two three", "by Ctrl-J", "by a backslash", "by Alt-Enter", "pasted", "/twice")
        assert not any(line.startswith("> ") for line in chat.lines), "it was sent"
        chat.send("\r")
        chat.wait("> one two three by Ctrl-J by a backslash by Alt-Enter pasted /twice")
        chat.wait_for_sessions("[1 main]")
        chat.send(UP)
        chat.wait("main> one two three")


def test_scrolling(runs: ForkServer, tmp_path: Path) -> None:
    """Guards the way through a long session: pages add up, the wheel, Home and End, and /find with its next place."""
    with Chat(runs, tmp_path) as chat:
        chat.say(f"/load {numbered(tmp_path)}")
        chat.wait("line 99")
        page = len(shown_lines(chat))
        chat.send(PAGE_UP * 3)
        chat.settle()
        assert shown_lines(chat)[0] < 100 - 3 * (page - 2), "three keys scrolled less than three pages"
        chat.send(HOME)
        chat.wait("> Count.", "line 0")
        chat.send(END)
        chat.wait("line 99", gone="more lines below")
        bottom = shown_lines(chat)[0]
        chat.send(WHEEL_UP * 2)
        chat.settle()
        assert shown_lines(chat)[0] == bottom - 6
        chat.say("/find line 42")
        chat.wait("line 42")
        assert shown_lines(chat)[0] == 42
        chat.say("/find LINE 5")
        chat.wait("11 of 11 lines")
        chat.say("/find")
        chat.wait("10 of 11 lines")
        chat.send("\x1b")
        chat.wait("line 99")


def test_picking_by_key(runs: ForkServer, tmp_path: Path) -> None:
    """Guards several replies against one that is taken silently: a message waits until the user has picked."""
    with Chat(runs, tmp_path) as chat:
        chat.say("My name is Ada.")
        chat.wait("Ada!")
        chat.say("/retry temperature=0,0.2,0.4")
        chat.wait("[1] temperature=0", "[2] temperature=0.2", "[3] temperature=0.4")
        chat.wait_for_sessions("[1 main]")
        chat.say("What is my name?")
        chat.wait("Pick a reply first", "main> What is my name?")
        chat.send("\x03")
        chat.wait("main>", gone="What is my name?")
        chat.send(RIGHT + RIGHT + LEFT)
        chat.send("\r")
        chat.wait("Nice to meet you, Ada!", gone="[1] temperature")
        chat.say("/retry 2 temperature=0.5")
        chat.wait("[4] temperature=0.5", "[5] temperature=0.5")
        chat.send("1")
        chat.wait("main> 1")
        chat.send("\x7f5")
        chat.wait("> My name is Ada.", gone="[4] temperature")
        chat.say("What is my name?")
        chat.wait("Your name is Ada.")


def test_vi_keys(runs: ForkServer, tmp_path: Path) -> None:
    """Guards --vi: Esc leaves the insert mode, and letters are commands then."""
    with Chat(runs, tmp_path, "--vi") as chat:
        chat.send("one two")
        chat.wait("main> one two")
        chat.send("\x1b")
        chat.pump(0.3)
        chat.send("bcwthree")
        chat.wait("main> one three")
        chat.send("\x1b")
        chat.pump(0.3)
        chat.send("0i")
        chat.send("/system \x1b")
        chat.pump(0.3)
        chat.send("\r")
        chat.wait("system message: one three")
        chat.send("next")
        chat.wait("main> next")


def test_a_long_paste_is_folded(runs: ForkServer, tmp_path: Path) -> None:
    """Guards the screen against a paste of hundreds of lines; the model gets all of it, in its place."""
    lines = "\n".join(f"pasted line {number}" for number in range(40))
    with Chat(runs, tmp_path, "--max-tokens", 3) as chat:
        chat.send(f"Sum up \x1b[200~{lines}\x1b[201~ please")
        chat.wait("main> Sum up [pasted 1: 40 lines] please", "tokens")
        assert [line[:4] for line in chat.lines[-3:]] == ["[1 m", "+ [p", "main"], "the list takes one line"
        chat.send("\r")
        chat.wait("> Sum up [pasted 1: 40 lines] please", "[1 main")
        chat.say(f"/export {tmp_path}/talk.md")
        chat.wait("written to")
    assert f"Sum up {lines} please" in (tmp_path / "talk.md").read_text()
