"""`cbatch chat` as its users see it: keys go into a pseudo-terminal, and the screen is checked."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.support.chat_terminal import Chat
from tests.support.fork_server import ForkServer
from tests.support.tiny_models import make_network

pytestmark = pytest.mark.slow

LONG = ("--ignore-eos", "--max-tokens", 900, "--attention", "reference")
"""Replies that last as long as a test needs, on the slow path."""


def test_sessions_stream_side_by_side_and_remember_their_own(runs: ForkServer, tmp_path: Path) -> None:
    """Guards what the chat is for: two conversations at once that do not mix."""
    with Chat(runs, tmp_path) as chat:
        chat.say("My name is Ada.")
        chat.wait("Ada!")
        chat.say("/new bob")
        chat.say("My name is Bob.")
        chat.wait("Bob!")
        chat.say("/set ignore_eos true")
        chat.say("/set max_tokens 600")
        chat.say("/switch main")
        chat.say("/set ignore_eos true")
        chat.say("/set max_tokens 600")
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
        chat.say("Tell me a story.")
        chat.wait("1 running")
        for end in range(1, len(sentence) + 1):
            chat.send(sentence[end - 1])
            chat.pump(0.01)
            assert sentence.startswith(chat.input), chat.lines
        chat.wait(sentence)
        assert chat.sessions == "[1 main…]", "the answer ended before the typing did"
        chat.send("\x03")
        chat.wait("stopped; /continue resumes it")
        chat.settle()
        before = chat.lines
        chat.send("\x0c")
        chat.settle()
        assert chat.lines == before and chat.input == sentence


def test_ctrl_c_and_ctrl_d(runs: ForkServer, tmp_path: Path) -> None:
    """Guards each meaning of Ctrl-C: it stops a reply, so that the message behind it is sent, or clears the input."""
    with Chat(runs, tmp_path, *LONG) as chat:
        chat.send("\x03")
        chat.wait("Ctrl-D or /exit leaves.")
        chat.send("\x03\x03")
        chat.settle()
        assert chat.text.count("Ctrl-D or /exit leaves.") == 1
        chat.send("half a line")
        chat.wait("main> half a line")
        chat.send("\x04")
        chat.send("\x03")
        chat.wait("main>", gone="half a line")
        chat.ask_for_long()
        chat.say("Spell the word lamp.")
        chat.wait("(next) > Spell the word lamp.")
        chat.send("a few words")
        chat.send("\x03")
        chat.wait("stopped; /continue resumes it", "> Spell the word lamp.", "main> a few words", gone="(next)")
        chat.wait("l-a-m-p")
        chat.send("\x03\x03")
        chat.wait("main>", gone="a few words")
        assert chat.leave() == 0


def test_fork_retry_pick_and_undo(runs: ForkServer, tmp_path: Path) -> None:
    """Guards forks, retries and undoing."""
    with Chat(runs, tmp_path) as chat:
        chat.say("My name is Ada.")
        chat.wait("Ada!")
        chat.say("/fork twin")
        chat.wait_for_sessions("1 main [2 twin]")
        chat.wait("forked from main")
        chat.say("What is my name?")
        chat.wait("Your name is Ada.")
        chat.say("/retry 3")
        chat.wait("[1] │ [2] │ [3]", "/pick 1 to 3", "temperature 0.7")
        chat.wait_for_sessions("1 main [2 twin]")
        chat.say("/pick 0")
        chat.wait("Your name is Ada.", gone="[1] │")
        chat.say("/undo")
        chat.wait("twin> What is my name?", gone="Your name is")
        chat.send("\x03")
        chat.say("/switch main")
        chat.wait("Ada!", gone="forked from")
        chat.wait_for_sessions("[1 main] 2 twin")


def test_a_batch_runs_under_a_live_chat(runs: ForkServer, tmp_path: Path) -> None:
    """Guards `/run`: the same rows as `cbatch run` writes, a chat that goes on, and a summary at the end."""
    rows = [{"prompt": f"Count from {n} to {n + 6}.", "ignore_eos": True, "max_tokens": 400} for n in range(16)]
    source, out, alone = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "alone.jsonl"))
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert runs.start("run", source, "-o", alone, "--dtype", "float32").code() == 0
    with Chat(runs, tmp_path, "--dtype", "float32") as chat:
        chat.wait("KV cache:")
        chat.say(f"/run {source} -o {out}")
        chat.wait("/16,")
        chat.say("Spell the word lamp.")
        chat.wait("l-a-m-p")
        assert re.search(r"run \d+/16", chat.bar), "the answer came after the batch"
        chat.wait("16 rows ok, 0 failed")
        chat.say(f"/run {source} -o {out}")
        chat.wait("exists and is not empty; --resume continues it")
        assert chat.leave() == 0
    assert out.read_bytes() == alone.read_bytes()


def test_a_batch_is_stopped_and_resumed(runs: ForkServer, tmp_path: Path) -> None:
    """Guards leaving while a batch runs: finished rows are on disk, and the run can be resumed."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": "Tell me a story.", "ignore_eos": True, "max_tokens": 30 + n} for n in range(120)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Chat(runs, tmp_path) as chat:
        chat.wait("KV cache:")
        chat.say(f"/run {source} -o {out}")
        chat.wait("/120,")
        while not out.read_bytes():
            chat.pump()
        chat.send("\x04")
        chat.wait("A batch is running.", "/120,")
        assert chat.leave() == 0
    kept = len(out.read_bytes().splitlines())
    assert 0 < kept < 120
    assert runs.start("run", source, "-o", out, "--resume").code() == 0
    assert [json.loads(line)["index"] for line in out.read_bytes().splitlines()] == list(range(120))


def test_sessions_survive_a_kill(runs: ForkServer, tmp_path: Path) -> None:
    """Guards a conversation against a kill in the middle of a reply."""
    with Chat(runs, tmp_path) as chat:
        chat.say("My name is Ada.")
        chat.wait("Ada!")
        chat.say("/set ignore_eos true")
        chat.say("Tell me a story.")
        chat.wait("1 running")
        while "Tell me a story." not in "".join(path.read_text() for path in tmp_path.glob("cbatch/sessions/*.json")):
            chat.pump()
        chat.run.send(signal.SIGKILL)
    with Chat(runs, tmp_path) as chat:
        chat.say("/load")
        chat.wait("2 turns My name is Ada.")
        chat.say("/load 1")
        chat.wait("> My name is Ada. Nice to meet you, Ada!", "> Tell me a story.")
        chat.say("/undo")
        chat.wait("> Tell me a story.")
        chat.send("\x03")
        chat.say("/set ignore_eos false")
        chat.say("What is my name?")
        chat.wait("Your name is Ada.")
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
        chat.say("Tell me a story about a cat named Tom.")
        chat.wait("a cat named Tom. ", "running")
        chat.say("Hello.")
        chat.wait("(next) > Hello.")
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
        chat.send("\x03")
        chat.wait("stopped; /continue")
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
        chat.send("/ren\t")
        chat.wait("main> /rename")
        chat.say(" first")
        chat.wait_for_sessions("[1 first]")
        chat.send(f"/read {tmp_path}/some-n\t")
        chat.wait("some-notes.txt")
        chat.send("\r")
        chat.wait("1 ", "9 tokens")
        chat.say("What is my name?")
        chat.wait("> What is my name?", "+ ", "9 tokens")
        assert chat.leave() == 0
    with Chat(runs, tmp_path) as chat:
        chat.send("\x1b[A")
        chat.wait("main> What is my name?")
        chat.send("\x03")
        chat.send("What i")
        chat.wait("main> What is my name?")
        chat.send("\x12some-n")
        chat.wait("some-notes.txt")


def test_the_editor_changes_the_last_message(runs: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `/edit`: the screen comes back, and the new text replaces the old message."""
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nsed -i s/lamp/tree/ "$1"\n')
    editor.chmod(0o700)
    with Chat(runs, tmp_path / "state", env={"EDITOR": str(editor)}) as chat:
        chat.say("Spell the word lamp.")
        chat.wait("l-a-m-p")
        chat.say("/edit")
        chat.wait("> Spell the word tree.", "t-r-e-e", gone="lamp")
        chat.say("/set temperature 9999")
        chat.wait("temperature must be a number")


COLOURS = re.compile(rb"\x1b\[(?:\d+;)*(?:3[0-9]|4[0-9]|9[0-7]|10[0-7])[;m]")


@pytest.mark.parametrize("is_plain", [False, True])
def test_what_stays_of_a_chat(runs: ForkServer, tmp_path: Path, is_plain: bool) -> None:
    """Guards what was said against vanishing with the screen; --no-transcript, --no-history and NO_COLOR leave none."""
    arguments = ["--no-history", "--no-transcript"] if is_plain else []
    with Chat(runs, tmp_path, *arguments, color=not is_plain) as chat:
        chat.say("My name is Ada.")
        chat.wait("Ada!")
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
    session = {
        "cbatch_session": 1, "name": f"n{evil}", "system": None, "params": {}, "prelude": [], "dropped": 0,
        "attempts": 0, "turns": [{"user": evil, "chosen": 0, "answers": [
            {"text": evil, "seed": 0, "params": {}, "error": evil, "code": "", "remark": evil, "state": "error"}]}],
    }  # fmt: skip
    (tmp_path / "evil.json").write_text(json.dumps(session))
    model = hostile_model(tmp_path / "model")
    with Chat(runs, tmp_path, "-m", model, "--temperature", 5, "--max-tokens", 500) as chat:
        chat.say("a")
        chat.wait("cut off")
        chat.say(f"/load {tmp_path}/evil.json")
        chat.wait("[2 loaded]", "> ]52;c;aGk=[6n31mx")
        chat.say("\x1b[200~/read /tmp/no-\x1b]52;c;x\x1b[201~")
        chat.wait("Cannot read")
        chat.say("/list")
        chat.settle()
        assert chat.leave() == 0, "and prints what was said"
        for piece in (b"\x1b]52", b"\x1b]8", b"\x1b[6n", "\x9b".encode(), b"\x9b31", b"\x07", "‮".encode(), "⁦".encode()):
            assert piece not in chat.raw, piece
