"""Commands of the chat in a pseudo-terminal: settings, saved sessions, files, batches, comparisons, leaving."""

from __future__ import annotations

import base64
import json
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.chat_terminal import Chat
from tests.support.fork_server import ForkServer
from tests.support.model_folder import save_model

pytestmark = pytest.mark.slow

CUT = re.compile(r"/\d{1,2}$|,$|\d$(?<!/150)|tok?$|tok/$")


def rows_file(folder: Path, count: int, tokens: int = 60) -> Path:
    path = folder / "in.jsonl"
    rows = [{"prompt": f"Count from {n} to {n + 6}.", "ignore_eos": True, "max_tokens": tokens} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def wait_for_whole_bar(chat: Chat) -> None:
    """Waits until the bar is drawn and nothing in it is cut: neither a number nor a unit."""
    end = time.monotonic() + 20
    while not (bars := [line for line in chat.lines if "[2 other" in line]) or CUT.search(bars[-1]):
        assert time.monotonic() < end, chat.lines
        chat.pump()


def test_a_new_limit_holds_for_a_continued_reply(runs: ForkServer, tmp_path: Path) -> None:
    """Guards `/continue` after `/set max_tokens`, and answers to commands against piling up."""
    with Chat(runs, tmp_path, "--ignore-eos", "--max-tokens", 4) as chat:
        chat.say("Tell me a story.")
        chat.wait("cut off after max_tokens = 4")
        chat.say("/set max_tokens 7")
        chat.wait("max_tokens 7")
        chat.say("/set all temperature 0.5")
        chat.wait("temperature 0.5", gone="max_tokens 7")
        chat.say("/continue")
        chat.wait("cut off after max_tokens = 7", gone="temperature 0.5")
        chat.say("/set seed 5")
        chat.wait("seed 5")
        chat.say("/new other")
        chat.say("/set temperature")
        chat.wait("temperature 0.5")


def test_saved_sessions(runs: ForkServer, tmp_path: Path) -> None:
    """Guards the way back to an old chat: mentioned at the start, by number at once, by its words, and `/delete`."""
    with Chat(runs, tmp_path) as chat:
        chat.say("My name is Ada.")
        chat.wait("Ada!")
        chat.say("/new second")
        chat.say("Spell the word lamp.")
        chat.wait("l-a-m-p")
        assert chat.leave() == 0
    with Chat(runs, tmp_path) as chat:
        chat.wait("2 chats are saved: /load lists them")
        chat.say("/load 1")
        chat.wait("> Spell the word lamp.", "l-a-m-p")
        chat.wait_for_sessions("[1 second]")
        chat.say("/load ada")
        chat.wait("> My name is Ada.")
        chat.wait_for_sessions("1 second [2 main]")
        chat.say("/load")
        chat.wait("1 turn second: Spell the word lamp.", "1 turn My name is Ada.")
        chat.say("/delete 1")
        chat.wait("That session is open")
        chat.say("/close second")
        chat.say("/delete second: no")
        chat.wait("There is no saved session")
        chat.say("/load")
        chat.say("/delete 1")
        chat.wait("“Spell the word lamp.”, 1 turn: the same command again deletes it")
        chat.say("/list")
        chat.say("/delete 1")
        chat.wait("the same command again deletes it")
        chat.say("/delete 1")
        chat.wait("deleted: Spell the word lamp.")
        assert chat.leave() == 0
    with Chat(runs, tmp_path, "--continue", wait_for="main>") as chat:
        chat.wait("> My name is Ada.")
        chat.wait_for_sessions("[1 main]")
        chat.say("What is my name?")
        chat.wait("Your name is Ada.")
    assert len(list(tmp_path.glob("cbatch/sessions/*.json"))) == 1


def test_a_batch_belongs_to_the_session_that_started_it(runs: ForkServer, tmp_path: Path) -> None:
    """Guards reports of a batch, its refusals, the progress in a narrow window, and Ctrl-D beside it."""
    source, out = rows_file(tmp_path, 150), tmp_path / "out.jsonl"
    with Chat(runs, tmp_path) as chat:
        chat.wait("KV cache:")
        chat.say(f"/run {tmp_path}/nosuch -o {out}")
        chat.wait("there is no file")
        assert "writes to" not in chat.text
        chat.say("/new other")
        chat.wait_for_sessions("1 main [2 other]")
        chat.send("\x1b1")
        chat.say(f"/run {source} -o {out}")
        chat.send("\x1b2")
        chat.wait("/150")
        chat.send("\x04")
        chat.wait("A batch is running.")
        for columns in range(40, 20, -3):
            chat.resize(columns, 24)
            wait_for_whole_bar(chat)
        chat.resize(80, 24)
        chat.wait("main*")
        assert "rows ok" not in chat.text
        chat.send("\x1b1")
        chat.wait("writes to", "150 rows ok")


def test_files_go_with_a_message(runs: ForkServer, tmp_path: Path) -> None:
    """Guards `/read`: several files and patterns, blanks in names with Tab, tokens, and taking one away."""
    for name in ("a one.txt", "a two.txt", "b.py"):
        (tmp_path / name).write_text(f"This is {name}.\n")
    with Chat(runs, tmp_path / "state", "--max-tokens", 3) as chat:
        chat.wait("KV cache:")
        chat.send(f"/read {tmp_path}/a o\t")
        chat.wait("a\\ one.txt")
        chat.send(f" {tmp_path}/*.py\r")
        chat.wait("a one.txt, ", "b.py, ", "tokens")
        chat.say("/detach 1")
        chat.wait("b.py, ", gone="a one.txt")
        chat.say(f"/read '{tmp_path}/a two.txt' {tmp_path}/none.txt")
        chat.wait("Cannot read")
        chat.say(f"/read {tmp_path}/a two.txt")
        chat.wait("+ 1 ", "b.py, ", "a two.txt")
        chat.say("What is in them?")
        chat.wait("> What is in them?", "b.py", "tokens")
        chat.say("/read")
        chat.wait("nothing is attached")
    (saved,) = (tmp_path / "state" / "cbatch" / "sessions").glob("*.json")
    attached = json.loads(saved.read_text())["turns"][0]["attached"]
    assert [Path(one["name"]).name for one in attached] == ["b.py", "a two.txt"]


def test_sessions_side_by_side(runs: ForkServer, tmp_path: Path) -> None:
    """Guards `/compare`: the sessions stand in columns while all of them reply, and Esc goes back."""
    with Chat(runs, tmp_path) as chat:
        chat.say("My name is Ada.")
        chat.wait("Ada!")
        chat.say("/new other")
        chat.say("My name is Bob.")
        chat.wait("Bob!")
        chat.say("/switch main")
        chat.say("/compare")
        chat.wait("main │ other")
        chat.say("/compare main main")
        chat.wait("nothing to compare with")
        chat.say("/compare other")
        chat.wait("main │ other", gone="nothing to compare")
        chat.say("/all What is my name?")
        chat.wait("Your name is Ada. │ Your name is Bob.")
        chat.send("\x1b")
        chat.wait("Your name is Ada.", gone="Your name is Bob.")


def test_the_context_fills_up(runs: ForkServer, tmp_path: Path) -> None:
    """Guards the user against a context that is full all of a sudden: the bar and a warning say so before."""
    with Chat(runs, tmp_path, "--max-tokens", 20) as chat:
        chat.say("word " * 400)
        chat.wait("[1 main ")
        percent = re.search(r"\[1 main (\d+)%\]", chat.bar)
        assert percent is not None and 30 < int(percent[1]) < 60
        chat.say("word " * 440)
        chat.wait("The context is", "% full. /trim N drops")
        chat.say("/stats")
        chat.wait("last reply here:", "the first after")


def test_the_clipboard(runs: ForkServer, tmp_path: Path) -> None:
    """Guards `/copy`: the reply goes to the terminal's clipboard, encoded, so that no control byte of it is obeyed."""
    with Chat(runs, tmp_path) as chat:
        chat.say("Spell the word lamp.")
        chat.wait("l-a-m-p")
        assert b"\x1b]52" not in chat.raw
        chat.say("/copy")
        chat.wait("copied 7 characters")
        assert b"\x1b]52;c;" + base64.b64encode(b"l-a-m-p") + b"\x07" in chat.raw
        chat.say("/copy code")
        chat.wait("There is no block of code")


def test_help_fits_the_screen(runs: ForkServer, tmp_path: Path) -> None:
    """Guards `/help` against scrolling away on 24 lines, and its pages for a command and for the keys."""
    with Chat(runs, tmp_path) as chat:
        chat.wait("KV cache:")
        chat.say("/help")
        chat.wait("/retry", "/help NAME explains a command")
        assert any(line.startswith("· /") for line in chat.lines) and "more lines below" not in chat.text
        assert sum("/" in line for line in chat.lines) < 22
        chat.say("/help retry")
        chat.wait("Example", "/retry temperature=0.2,0.7,1,1.3", gone="/help NAME explains")
        chat.say("/help keys")
        chat.wait("Ctrl-J", "Alt-1", gone="temperature=0.2")
        assert any("Enter " in line for line in chat.lines)
        chat.say("/help retyr")
        chat.wait("did you mean /help retry?")


def test_markdown_on_the_screen(runs: ForkServer, tmp_path: Path) -> None:
    """Guards emphasis inside a Chinese sentence against standing there raw, and text after nested fences."""
    text = "这是**重点**内容\n\n```markdown\n```python\nx = 1\n```\n```\n\n"
    text += "| a | b |\n|---|--:|\n| one | 2 |\n\nplain words"
    answer = {"text": text, "seed": 0, "params": {}, "error": "", "code": "", "remark": "", "state": "stop"}
    turn = {"user": "q", "chosen": 0, "answers": [answer]}
    fields = {"name": "n", "system": None, "params": {}, "prelude": [], "dropped": 0, "attempts": 0, "turns": [turn]}
    (tmp_path / "n.json").write_text(json.dumps({"cbatch_session": 1, **fields}))
    with Chat(runs, tmp_path, "--load", tmp_path / "n.json", wait_for="n>") as chat:
        chat.wait("plain words", "one │ 2")
        assert "**" not in "".join(chat.lines)
        cells = {cell.data: cell for row in chat.screen.buffer.values() for cell in row.values()}
        assert cells["重"].bold and not cells["容"].bold
        row = next(n for n, line in enumerate(chat.lines) if line == "plain words")
        assert chat.screen.buffer[row][0].fg == "default"


def test_a_terminal_without_a_cursor(runs: ForkServer, tmp_path: Path) -> None:
    """Guards TERM=dumb: lines in, lines out, commands, and no escape sequences."""
    with Chat(runs, tmp_path, env={"TERM": "dumb"}) as chat:
        chat.say("My name is Ada.")
        chat.wait("Nice to meet you, Ada!")
        chat.say("/new bob")
        chat.wait("bob>")
        chat.say("/list")
        chat.wait("1 turn")
        chat.say("/nosuch")
        chat.wait("There is no command /nosuch")
        chat.say("What is my name?")
        chat.wait("You have not told me")
        chat.say("/retry 2 temperature=0,0.1")
        chat.wait("[1] temperature=0", "[2] temperature=0.1")
        chat.say("/pick 1")
        chat.say("/read ~nosuchuser/x")
        chat.wait("There is no such user: ~nosuchuser/x. bob>")
        chat.say("/switch main")
        chat.wait("bob> /switch main > My name is Ada. Nice to meet you, Ada! main>")
        chat.run.send(signal.SIGINT)
        chat.wait("Ctrl-D leaves. main>")
        assert chat.leave() == 0
        assert b"\x1b" not in chat.raw


def test_two_models(runs: ForkServer, tmp_path: Path) -> None:
    """Guards `/model`: another one replies in one session, both stand side by side; a wrong name harms nothing."""
    other = save_model(tmp_path / "other")
    with Chat(runs, tmp_path, "--max-tokens", 12) as chat:
        chat.say("My name is Ada.")
        chat.wait("Ada!")
        chat.say(f"/model {tmp_path}/none")
        chat.wait("There is no model folder")
        chat.say(f"/retry 2 model=,{other}")
        chat.wait("[1] model=", "[2] model=/", "/pick 1 to 2")
        chat.wait("cut off after max_tokens = 12")
        chat.send("1")
        chat.wait("Nice to meet you, Ada!", gone="[2] model=")
        chat.say("/new second")
        chat.say(f"/model {other}")
        chat.wait("replies of this session come from", "other")
        chat.say("hello")
        chat.wait("cut off after max_tokens = 12")
        chat.say("/model")
        chat.wait("1 the bundled demo model loaded", "used here")
        chat.say("/model close 2")
        chat.wait("is closed")
        chat.say("Spell the word lamp.")
        chat.wait("l-a-m-p")
