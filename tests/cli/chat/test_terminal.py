"""`cbatch chat` as its users see it: keys go into a pseudo-terminal, and the screen is checked."""

from __future__ import annotations

import base64
import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.support.chat_terminal import Chat, write_session
from tests.support.fork_server import ForkServer
from tests.support.model_folder import save_model
from tests.support.tiny_models import make_network

pytestmark = pytest.mark.slow

LONG = ("--ignore-eos", "--max-tokens", 900, "--attention", "reference")
"""Replies that last as long as a test needs, on the slow path."""


@pytest.fixture
def chat(runs: ForkServer, tmp_path: Path) -> Iterator[Chat]:
    with Chat(runs, tmp_path) as made:
        yield made


def test_sessions_stream_side_by_side_and_remember_their_own(chat: Chat) -> None:
    """Guards what the chat is for: two conversations at once that do not mix."""
    chat.say("My name is Ada.", "Ada!")
    chat.say("/new bob")
    chat.say("My name is Bob.", "Bob!")
    chat.say("/set all ignore_eos true")
    chat.say("/set all max_tokens 600")
    chat.say("/switch main")
    chat.say("/all What is my name?")
    chat.wait_for_sessions("[1 main…] 2 bob…")
    chat.wait("Your name is Ada.")
    chat.send("\x1b2")
    chat.wait_for_sessions("1 main… [2 bob…]")
    chat.wait("Your name is Bob.")
    assert "Ada" not in chat.text


def test_typing_while_a_reply_streams(runs: ForkServer, tmp_path: Path) -> None:
    """Guards the input line against streaming output, and the screen against differences when it is drawn anew."""
    sentence = "what I type meanwhile: äöü 日本語 stays whole"
    with Chat(runs, tmp_path, *LONG) as chat:
        chat.say("Tell me a story.", "1 running")
        for end in range(1, len(sentence) + 1):
            chat.send(sentence[end - 1])
            chat.pump(0.01)
            assert sentence.startswith(chat.input), chat.lines
        chat.wait(sentence)
        assert chat.sessions == "[1 main…]", "the answer ended before the typing did"
        chat.send("\x03", "stopped; /continue resumes it")
        chat.settle()
        before = chat.lines
        chat.send("\x0c")
        chat.settle()
        assert chat.lines == before and chat.input == sentence


def test_ctrl_c_and_ctrl_d(runs: ForkServer, tmp_path: Path) -> None:
    """Guards each meaning of Ctrl-C: it stops a reply, so that the message behind it is sent, or clears the input."""
    with Chat(runs, tmp_path, *LONG) as chat:
        chat.send("\x03", "Ctrl-D or /exit leaves.")
        chat.send("\x03\x03")
        chat.settle()
        assert chat.text.count("Ctrl-D or /exit leaves.") == 1
        chat.send("half a line", "main> half a line")
        chat.send("\x04")
        chat.send("\x03", "main>", gone="half a line")
        chat.ask_for_long()
        chat.say("Spell the word lamp.", "(next) > Spell the word lamp.")
        chat.send("a few words")
        chat.send("\x03", "stopped; /continue resumes it", "> Spell the word lamp.", "main> a few words", gone="(next)")
        chat.wait("l-a-m-p")
        chat.send("\x03\x03", "main>", gone="a few words")
        assert chat.leave() == 0


def test_fork_retry_pick_and_undo(chat: Chat) -> None:
    """Guards forks, retries and undoing."""
    chat.say("My name is Ada.", "Ada!")
    chat.say("/fork twin")
    chat.wait_for_sessions("1 main [2 twin]")
    chat.wait("forked from main")
    chat.say("What is my name?", "Your name is Ada.")
    chat.say("/retry 3", "[1] │ [2] │ [3]", "/pick 1 to 3", "temperature 0.7")
    chat.wait_for_sessions("1 main [2 twin]")
    chat.say("/pick 0", "Your name is Ada.", gone="[1] │")
    chat.say("/undo", "twin> What is my name?", gone="Your name is")
    chat.send("\x03")
    chat.say("/switch main", "Ada!", gone="forked from")
    chat.wait_for_sessions("[1 main] 2 twin")


def test_a_batch_runs_under_a_live_chat(runs: ForkServer, tmp_path: Path) -> None:
    """Guards `/run`: the same rows as `cbatch run` writes, a chat that goes on, and a summary at the end."""
    rows = [{"prompt": f"Count from {n} to {n + 6}.", "ignore_eos": True, "max_tokens": 400} for n in range(16)]
    source, out, alone = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "alone.jsonl"))
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert runs.start("run", source, "-o", alone, "--dtype", "float32").code() == 0
    with Chat(runs, tmp_path, "--dtype", "float32") as chat:
        chat.wait("KV cache:")
        chat.say(f"/run {source} -o {out}", "/16,")
        chat.say("Spell the word lamp.", "l-a-m-p")
        assert re.search(r"run \d+/16", chat.bar), "the answer came after the batch"
        chat.wait("16 rows ok, 0 failed")
        chat.say(f"/run {source} -o {out}", "exists and is not empty; --resume continues it")
        assert chat.leave() == 0
    assert out.read_bytes() == alone.read_bytes()


def test_a_batch_is_stopped_and_resumed(runs: ForkServer, tmp_path: Path) -> None:
    """Guards leaving while a batch runs: finished rows are on disk, and the run can be resumed."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": "Tell me a story.", "ignore_eos": True, "max_tokens": 30 + n} for n in range(120)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Chat(runs, tmp_path) as chat:
        chat.wait("KV cache:")
        chat.say(f"/run {source} -o {out}", "/120,")
        while not out.read_bytes():
            chat.pump()
        chat.send("\x04", "A batch is running.", "/120,")
        assert chat.leave() == 0
    kept = len(out.read_bytes().splitlines())
    assert 0 < kept < 120
    assert runs.start("run", source, "-o", out, "--resume").code() == 0
    assert [json.loads(line)["index"] for line in out.read_bytes().splitlines()] == list(range(120))


def test_sessions_survive_a_kill(runs: ForkServer, tmp_path: Path) -> None:
    """Guards a conversation against a kill in the middle of a reply."""
    with Chat(runs, tmp_path) as chat:
        chat.say("My name is Ada.", "Ada!")
        chat.say("/set ignore_eos true")
        chat.say("Tell me a story.", "1 running")
        while "Tell me a story." not in "".join(path.read_text() for path in tmp_path.glob("cbatch/sessions/*.json")):
            chat.pump()
        chat.run.send(signal.SIGKILL)
    with Chat(runs, tmp_path) as chat:
        chat.say("/load", "2 turns My name is Ada.")
        chat.say("/load 1", "> My name is Ada. Nice to meet you, Ada!", "> Tell me a story.")
        chat.say("/undo", "> Tell me a story.")
        chat.send("\x03")
        chat.say("/set ignore_eos false")
        chat.say("What is my name?", "Your name is Ada.")
    modes = {path.name: path.stat().st_mode & 0o777 for path in [tmp_path / "cbatch", *tmp_path.glob("cbatch/**/*")]}
    assert modes.pop("cbatch") == modes.pop("sessions") == 0o700
    assert modes.pop("history.jsonl") == 0o600 and set(modes.values()) == {0o600}


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.exhaustive), (signal.SIGHUP, 129)],
)
def test_a_signal_ends_it_in_good_order(runs: ForkServer, tmp_path: Path, signum: int, code: int) -> None:
    """Guards messages and a partial reply against every signal, and the screen after it."""
    with Chat(runs, tmp_path, *LONG) as chat:
        chat.say("Tell me a story about a cat named Tom.", "a cat named Tom. ", "running")
        chat.say("Hello.", "(next) > Hello.")
        chat.pump(0.3)
        chat.run.send(signum)
        chat.run.send(signal.SIGHUP)
        assert chat.ended() == code
        assert b"\x1b[?1049l" in chat.raw, "the screen of before is not back"
    (kept,) = (tmp_path / "cbatch" / "sessions").glob("*.json")
    turns = json.loads(kept.read_text())["turns"]
    assert [turn["user"] for turn in turns] == ["Tell me a story about a cat named Tom.", "Hello."]
    assert turns[0]["answers"][0]["text"]


def test_a_model_that_cannot_be_loaded(runs: ForkServer, tmp_path: Path) -> None:
    """Guards a chat whose model cannot be loaded: a sentence on the normal screen, and exit code 2."""
    with Chat(runs, tmp_path, "-m", "/no/such/model") as chat:
        assert chat.ended() == 2
        chat.pump(0.2)
        assert "There is no model folder /no/such/model." in chat.text and "Traceback" not in chat.text


def test_a_resized_window_is_drawn_anew(runs: ForkServer, tmp_path: Path) -> None:
    """Guards the screen against leftovers after a resize, down to a window in which nothing fits."""
    with Chat(runs, tmp_path, *LONG) as chat:
        chat.ask_for_long()
        for columns, rows in ((40, 12), (120, 40), (5, 2), (1, 1), (61, 24)):
            chat.resize(columns, rows)
            chat.pump(0.15)
        chat.send("\x03", "stopped; /continue")
        chat.settle()
        before = chat.lines
        assert max(map(len, before)) <= 61 and before[-1].startswith("main>")
        chat.send("\x0c")
        chat.settle()
        assert chat.lines == before


def test_completion_and_history(runs: ForkServer, tmp_path: Path) -> None:
    """Guards Tab for commands, sessions and files, and a history that lasts from one chat to the next."""
    (tmp_path / "some-notes.txt").write_text("My name is Ada.\n")
    with Chat(runs, tmp_path) as chat:
        chat.send("/ren\t", "main> /rename")
        chat.say(" first")
        chat.wait_for_sessions("[1 first]")
        chat.send(f"/read {tmp_path}/some-n\t", "some-notes.txt")
        chat.send("\r", "1 ", "9 tokens")
        chat.say("What is my name?", "> What is my name?", "+ ", "9 tokens")
        assert chat.leave() == 0
    with Chat(runs, tmp_path) as chat:
        chat.send("\x1b[A", "main> What is my name?")
        chat.send("\x03")
        chat.send("What i", "main> What is my name?")
        chat.send("\x12some-n", "some-notes.txt")


def test_the_editor_changes_the_last_message(runs: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `/edit`: the screen comes back, and the new text replaces the old message."""
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nsed -i s/lamp/tree/ "$1"\n')
    editor.chmod(0o700)
    with Chat(runs, tmp_path / "state", env={"EDITOR": str(editor)}) as chat:
        chat.say("Spell the word lamp.", "l-a-m-p")
        chat.say("/edit", "> Spell the word tree.", "t-r-e-e", gone="lamp")
        chat.say("/set temperature 9999", "temperature must be a number")


COLOURS = re.compile(rb"\x1b\[(?:\d+;)*(?:3[0-9]|4[0-9]|9[0-7]|10[0-7])[;m]")


@pytest.mark.parametrize("is_plain", [False, True])
def test_what_stays_of_a_chat(runs: ForkServer, tmp_path: Path, is_plain: bool) -> None:
    """Guards what was said against vanishing with the screen; --no-transcript, --no-history and NO_COLOR leave none."""
    arguments = ["--no-history", "--no-transcript"] if is_plain else []
    with Chat(runs, tmp_path, *arguments, color=not is_plain) as chat:
        chat.say("My name is Ada.", "Ada!")
        assert chat.leave() == 0
        assert bool(COLOURS.search(chat.raw)) != is_plain
        after = chat.raw.rpartition(b"\x1b[?1049l")[2].decode()
        assert ("> My name is Ada." in after and "Nice to meet you, Ada!" in after) != is_plain
    assert bool(list(tmp_path.iterdir())) != is_plain


PIECES = [
    "\x1b", "]52;c;aGk=", "\x07", "]8;;http://x", "[6n", "\x9b", "31m", "\r", "\x08", "‮", "⁦", "\x1b[", "2J", "a", "\n",
]  # fmt: skip


def hostile_model(folder: Path) -> Path:
    """A random model whose tokens are pieces of control sequences."""
    vocabulary = {piece: number for number, piece in enumerate(PIECES)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="a")
    tokenizer.save_pretrained(folder)
    make_network("llama", vocab_size=len(PIECES), max_position_embeddings=2048).save_pretrained(folder)
    return folder


def test_control_sequences_never_reach_the_terminal(runs: ForkServer, tmp_path: Path) -> None:
    """Guards the terminal against control sequences from the model, saved sessions, names and errors."""
    evil = "\x1b]52;c;aGk=\x07\x1b[6n\x9b31m\rx‮"
    write_session(tmp_path / "evil.json", evil, evil, f"n{evil}", error=evil, remark=evil, state="error")
    model = hostile_model(tmp_path / "model")
    with Chat(runs, tmp_path, "-m", model, "--temperature", 5, "--max-tokens", 500) as chat:
        chat.say("a", "cut off")
        chat.say(f"/load {tmp_path}/evil.json", "[2 loaded]", "> ]52;c;aGk=[6n31mx")
        chat.say("\x1b[200~/read /tmp/no-\x1b]52;c;x\x1b[201~", "Cannot read")
        chat.say("/list")
        chat.settle()
        assert chat.leave() == 0, "and prints what was said"
        for piece in (b"\x1b]52", b"\x1b]8", b"\x1b[6n", "\x9b".encode(), b"\x9b31", b"\x07", "‮".encode(), "⁦".encode()):
            assert piece not in chat.raw, piece


UP, DOWN, PAGE_UP, HOME, END = "\x1b[A", "\x1b[B", "\x1b[5~", "\x1b[H", "\x1b[F"
LEFT, RIGHT, ALT_LEFT, ALT_RIGHT, CTRL_LEFT = "\x1b[D", "\x1b[C", "\x1b[1;3D", "\x1b[1;3C", "\x1b[1;5D"
WHEEL_UP = "\x1b[<64;10;5M"


def shown_lines(chat: Chat) -> list[int]:
    return [int(number) for line in chat.lines for number in re.findall(r"^line (\d+)$", line)]


def test_escape(runs: ForkServer, tmp_path: Path) -> None:
    """Guards Esc: it stops a reply, closes the menu, and swallows no key that is typed after it."""
    with Chat(runs, tmp_path, *LONG) as chat:
        chat.ask_for_long()
        chat.send("\x1b", "stopped; /continue resumes it", gone="running")
        chat.pump(0.2)
        chat.send("x", "main> x")
        chat.send("\x03/ex\t\t", "export", "exit")
        chat.send("\x1b")
        chat.settle()
        assert chat.input.startswith("/ex") and "export" not in "".join(chat.lines[:-1])
        chat.send("\x1b")
        chat.pump(0.2)
        chat.send("!", chat.input + "!")


def test_a_draft_stays_in_its_session(runs: ForkServer, tmp_path: Path) -> None:
    """Guards half-typed text against following the user into another session, and keys that switch."""
    with Chat(runs, tmp_path) as chat:
        chat.say("/new bob")
        chat.wait_for_sessions("1 main [2 bob]")
        chat.send("for Bob only", "bob> for Bob only")
        chat.send(ALT_LEFT)
        chat.wait_for_sessions("[1 main] 2 bob")
        assert chat.input == ""
        chat.send("for main")
        chat.send(ALT_RIGHT, "bob> for Bob only")
        chat.send("\x1b1", "main> for main")
        chat.send("\x03")
        chat.say("/switch bob", "bob> for Bob only")
        chat.send("\x03")
        chat.say("Hello.", "> Hello.", "1 main [2 bob ")
        chat.send("half a thought", "bob> half a thought")
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
        chat.send("one three", "main> one three")
        chat.send(CTRL_LEFT + "two ", "main> one two three")
        chat.send("\x05\nby Ctrl-J\\\rby a backslash\x1b\rby Alt-Enter")
        chat.send("\x1b[200~\npasted\n/twice\x1b[201~")
        chat.wait("one two three", "by Ctrl-J", "by a backslash", "by Alt-Enter", "pasted", "/twice")
        assert not any(line.startswith("> ") for line in chat.lines), "it was sent"
        chat.send("\r", "> one two three by Ctrl-J by a backslash by Alt-Enter pasted /twice")
        chat.wait_for_sessions("[1 main]")
        chat.send(UP, "main> one two three")


def test_scrolling(chat: Chat, tmp_path: Path) -> None:
    """Guards the way through a long session: pages add up, the wheel, Home and End, and /find with its next place."""
    lines = "\n".join(f"line {number}" for number in range(100))
    path = write_session(tmp_path / "numbered.json", "Count.", lines)
    chat.say(f"/load {path}", "line 99")
    page = len(shown_lines(chat))
    chat.send(PAGE_UP * 3)
    chat.settle()
    assert shown_lines(chat)[0] < 100 - 3 * (page - 2), "three keys scrolled less than three pages"
    chat.send(HOME, "> Count.", "line 0")
    chat.send(END, "line 99", gone="more lines below")
    bottom = shown_lines(chat)[0]
    chat.send(WHEEL_UP * 2)
    chat.settle()
    assert shown_lines(chat)[0] == bottom - 6
    chat.say("/find line 42", "line 42")
    assert shown_lines(chat)[0] == 42
    chat.say("/find LINE 5", "11 of 11 lines")
    chat.say("/find", "10 of 11 lines")
    chat.send("\x1b", "line 99")


def test_picking_by_key(chat: Chat) -> None:
    """Guards several replies against one that is taken silently: a message waits until the user has picked."""
    chat.say("My name is Ada.", "Ada!")
    chat.say("/retry temperature=0,0.2,0.4", "[1] temperature=0", "[2] temperature=0.2", "[3] temperature=0.4")
    chat.wait_for_sessions("[1 main]")
    chat.say("What is my name?", "Pick a reply first", "main> What is my name?")
    chat.send("\x03", "main>", gone="What is my name?")
    chat.send(RIGHT + RIGHT + LEFT)
    chat.send("\r", "Nice to meet you, Ada!", gone="[1] temperature")
    chat.say("/retry 2 temperature=0.5", "[4] temperature=0.5", "[5] temperature=0.5")
    chat.send("1", "main> 1")
    chat.send("\x7f5", "> My name is Ada.", gone="[4] temperature")
    chat.say("What is my name?", "Your name is Ada.")


def test_vi_keys(runs: ForkServer, tmp_path: Path) -> None:
    """Guards --vi: Esc leaves the insert mode, and letters are commands then."""
    with Chat(runs, tmp_path, "--vi") as chat:
        chat.send("one two", "main> one two")
        chat.send("\x1b")
        chat.pump(0.3)
        chat.send("bcwthree", "main> one three")
        chat.send("\x1b")
        chat.pump(0.3)
        chat.send("0i")
        chat.send("/system \x1b")
        chat.pump(0.3)
        chat.send("\r", "system message: one three")
        chat.send("next", "main> next")


def test_a_long_paste_is_folded(runs: ForkServer, tmp_path: Path) -> None:
    """Guards the screen against a paste of hundreds of lines; the model gets all of it, in its place."""
    lines = "\n".join(f"pasted line {number}" for number in range(40))
    with Chat(runs, tmp_path, "--max-tokens", 3) as chat:
        chat.send(f"Sum up \x1b[200~{lines}\x1b[201~ please", "main> Sum up [pasted 1: 40 lines] please", "tokens")
        assert [line[:4] for line in chat.lines[-3:]] == ["[1 m", "+ [p", "main"], "the list takes one line"
        chat.send("\r", "> Sum up [pasted 1: 40 lines] please", "[1 main")
        chat.say(f"/export {tmp_path}/talk.md", "written to")
    assert f"Sum up {lines} please" in (tmp_path / "talk.md").read_text()


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
        chat.say("Tell me a story.", "cut off after max_tokens = 4")
        chat.say("/set max_tokens 7", "max_tokens 7")
        chat.say("/set all temperature 0.5", "temperature 0.5", gone="max_tokens 7")
        chat.say("/continue", "cut off after max_tokens = 7", gone="temperature 0.5")
        chat.say("/set seed 5", "seed 5")
        chat.say("/new other")
        chat.say("/set temperature", "temperature 0.5")


def test_saved_sessions(runs: ForkServer, tmp_path: Path) -> None:
    """Guards the way back to an old chat: mentioned at the start, by number at once, by its words, and `/delete`."""
    with Chat(runs, tmp_path) as chat:
        chat.say("My name is Ada.", "Ada!")
        chat.say("/new second")
        chat.say("Spell the word lamp.", "l-a-m-p")
        assert chat.leave() == 0
    with Chat(runs, tmp_path) as chat:
        chat.wait("2 chats are saved: /load lists them")
        chat.say("/load 1", "> Spell the word lamp.", "l-a-m-p")
        chat.wait_for_sessions("[1 second]")
        chat.say("/load ada", "> My name is Ada.")
        chat.wait_for_sessions("1 second [2 main]")
        chat.say("/load", "1 turn second: Spell the word lamp.", "1 turn My name is Ada.")
        chat.say("/delete 1", "That session is open")
        chat.say("/close second")
        chat.say("/delete second: no", "There is no saved session")
        chat.say("/load")
        chat.say("/delete 1", "“Spell the word lamp.”, 1 turn: the same command again deletes it")
        chat.say("/list")
        chat.say("/delete 1", "the same command again deletes it")
        chat.say("/delete 1", "deleted: Spell the word lamp.")
        assert chat.leave() == 0
    with Chat(runs, tmp_path, "--continue", wait_for="main>") as chat:
        chat.wait("> My name is Ada.")
        chat.wait_for_sessions("[1 main]")
        chat.say("What is my name?", "Your name is Ada.")
    assert len(list(tmp_path.glob("cbatch/sessions/*.json"))) == 1


def test_a_batch_belongs_to_the_session_that_started_it(runs: ForkServer, tmp_path: Path) -> None:
    """Guards reports of a batch, its refusals, the progress in a narrow window, and Ctrl-D beside it."""
    source, out = rows_file(tmp_path, 150), tmp_path / "out.jsonl"
    with Chat(runs, tmp_path) as chat:
        chat.wait("KV cache:")
        chat.say(f"/run {tmp_path}/nosuch -o {out}", "there is no file")
        assert "writes to" not in chat.text
        chat.say("/new other")
        chat.wait_for_sessions("1 main [2 other]")
        chat.send("\x1b1")
        chat.say(f"/run {source} -o {out}")
        chat.send("\x1b2", "/150")
        chat.send("\x04", "A batch is running.")
        for columns in range(40, 20, -3):
            chat.resize(columns, 24)
            wait_for_whole_bar(chat)
        chat.resize(80, 24)
        chat.wait("main*")
        assert "rows ok" not in chat.text
        chat.send("\x1b1", "writes to", "150 rows ok")


def test_files_go_with_a_message(runs: ForkServer, tmp_path: Path) -> None:
    """Guards `/read`: several files and patterns, blanks in names with Tab, tokens, and taking one away."""
    for name in ("a one.txt", "a two.txt", "b.py"):
        (tmp_path / name).write_text(f"This is {name}.\n")
    with Chat(runs, tmp_path / "state", "--max-tokens", 3) as chat:
        chat.wait("KV cache:")
        chat.send(f"/read {tmp_path}/a o\t", "a\\ one.txt")
        chat.send(f" {tmp_path}/*.py\r", "a one.txt, ", "b.py, ", "tokens")
        chat.say("/detach 1", "b.py, ", gone="a one.txt")
        chat.say(f"/read '{tmp_path}/a two.txt' {tmp_path}/none.txt", "Cannot read")
        chat.say(f"/read {tmp_path}/a two.txt", "+ 1 ", "b.py, ", "a two.txt")
        chat.say("What is in them?", "> What is in them?", "b.py", "tokens")
        chat.say("/read", "nothing is attached")
    (saved,) = (tmp_path / "state" / "cbatch" / "sessions").glob("*.json")
    attached = json.loads(saved.read_text())["turns"][0]["attached"]
    assert [Path(one["name"]).name for one in attached] == ["b.py", "a two.txt"]


def test_sessions_side_by_side(chat: Chat) -> None:
    """Guards `/compare`: the sessions stand in columns while all of them reply, and Esc goes back."""
    chat.say("My name is Ada.", "Ada!")
    chat.say("/new other")
    chat.say("My name is Bob.", "Bob!")
    chat.say("/switch main")
    chat.say("/compare", "main │ other")
    chat.say("/compare main main", "nothing to compare with")
    chat.say("/compare other", "main │ other", gone="nothing to compare")
    chat.say("/all What is my name?", "Your name is Ada. │ Your name is Bob.")
    chat.send("\x1b", "Your name is Ada.", gone="Your name is Bob.")


def test_the_context_fills_up(runs: ForkServer, tmp_path: Path) -> None:
    """Guards the user against a context that is full all of a sudden: the bar and a warning say so before."""
    with Chat(runs, tmp_path, "--max-tokens", 20) as chat:
        chat.say("word " * 400, "[1 main ")
        percent = re.search(r"\[1 main (\d+)%\]", chat.bar)
        assert percent is not None and 30 < int(percent[1]) < 60
        chat.say("word " * 440, "The context is", "% full. /trim N drops")
        chat.say("/stats", "last reply here:", "the first after")


def test_the_clipboard(chat: Chat) -> None:
    """Guards `/copy`: the reply goes to the terminal's clipboard, encoded, so that no control byte of it is obeyed."""
    chat.say("Spell the word lamp.", "l-a-m-p")
    assert b"\x1b]52" not in chat.raw
    chat.say("/copy", "copied 7 characters")
    assert b"\x1b]52;c;" + base64.b64encode(b"l-a-m-p") + b"\x07" in chat.raw
    chat.say("/copy code", "There is no block of code")


def test_help_fits_the_screen(chat: Chat) -> None:
    """Guards `/help` against scrolling away on 24 lines, and its pages for a command and for the keys."""
    chat.wait("KV cache:")
    chat.say("/help", "/retry", "/help NAME explains a command")
    assert any(line.startswith("· /") for line in chat.lines) and "more lines below" not in chat.text
    assert sum("/" in line for line in chat.lines) < 22
    chat.say("/help retry", "Example", "/retry temperature=0.2,0.7,1,1.3", gone="/help NAME explains")
    chat.say("/help keys", "Ctrl-J", "Alt-1", gone="temperature=0.2")
    assert any("Enter " in line for line in chat.lines)
    chat.say("/help retyr", "did you mean /help retry?")


def test_markdown_on_the_screen(runs: ForkServer, tmp_path: Path) -> None:
    """Guards emphasis inside a Chinese sentence against standing there raw, and text after nested fences."""
    text = "这是**重点**内容\n\n```markdown\n```python\nx = 1\n```\n```\n\n"
    text += "| a | b |\n|---|--:|\n| one | 2 |\n\nplain words"
    path = write_session(tmp_path / "n.json", "q", text)
    with Chat(runs, tmp_path, "--load", path, wait_for="n>") as chat:
        chat.wait("plain words", "one │ 2")
        assert "**" not in "".join(chat.lines)
        cells = {cell.data: cell for row in chat.screen.buffer.values() for cell in row.values()}
        assert cells["重"].bold and not cells["容"].bold
        row = next(n for n, line in enumerate(chat.lines) if line == "plain words")
        assert chat.screen.buffer[row][0].fg == "default"


def test_a_terminal_without_a_cursor(runs: ForkServer, tmp_path: Path) -> None:
    """Guards TERM=dumb: lines in, lines out, commands, and no escape sequences."""
    with Chat(runs, tmp_path, env={"TERM": "dumb"}) as chat:
        chat.say("My name is Ada.", "Nice to meet you, Ada!")
        chat.say("/new bob", "bob>")
        chat.say("/list", "1 turn")
        chat.say("/nosuch", "There is no command /nosuch")
        chat.say("What is my name?", "You have not told me")
        chat.say("/retry 2 temperature=0,0.1", "[1] temperature=0", "[2] temperature=0.1")
        chat.say("/pick 1")
        chat.say("/read ~nosuchuser/x", "There is no such user: ~nosuchuser/x. bob>")
        chat.say("/switch main", "bob> /switch main > My name is Ada. Nice to meet you, Ada! main>")
        chat.run.send(signal.SIGINT)
        chat.wait("Ctrl-D leaves. main>")
        assert chat.leave() == 0
        assert b"\x1b" not in chat.raw


def test_two_models(runs: ForkServer, tmp_path: Path) -> None:
    """Guards `/model`: another one replies in one session, both stand side by side; a wrong name harms nothing."""
    other = save_model(tmp_path / "other")
    with Chat(runs, tmp_path, "--max-tokens", 12) as chat:
        chat.say("My name is Ada.", "Ada!")
        chat.say(f"/model {tmp_path}/none", "There is no model folder")
        chat.say(f"/retry 2 model=,{other}", "[1] model=", "[2] model=/", "/pick 1 to 2")
        chat.wait("cut off after max_tokens = 12")
        chat.send("1", "Nice to meet you, Ada!", gone="[2] model=")
        chat.say("/new second")
        chat.say(f"/model {other}", "replies of this session come from", "other")
        chat.say("hello", "cut off after max_tokens = 12")
        chat.say("/model", "1 the bundled demo model loaded", "used here")
        chat.say("/model close 2", "is closed")
        chat.say("Spell the word lamp.", "l-a-m-p")
