"""`cbatch chat` as its users see it: keys go into a pseudo-terminal, and the screen is checked."""

from __future__ import annotations

import base64
import json
import re
import signal
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

LONG = ("--ignore-eos", "--no-loop-guard", "--max-tokens", 900, "--attention", "reference")
"""Replies that last as long as a test needs, on the slow path."""

UP, PAGE_UP, HOME, END = "\x1b[A", "\x1b[5~", "\x1b[H", "\x1b[F"
LEFT, RIGHT, ALT_LEFT, ALT_RIGHT, CTRL_LEFT = "\x1b[D", "\x1b[C", "\x1b[1;3D", "\x1b[1;3C", "\x1b[1;5D"
WHEEL_UP = "\x1b[<64;10;5M"


@pytest.fixture(scope="module")
def shared(runs: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chat]:
    folder = tmp_path_factory.mktemp("state")
    editor = folder / "editor"
    editor.write_text('#!/bin/sh\nsed -i s/lamp/tree/ "$1"\n')
    editor.chmod(0o700)
    with Chat(runs, folder, "--no-history", env={"EDITOR": str(editor)}) as made:
        yield made


@pytest.fixture
def chat(shared: Chat) -> Chat:
    """A chat with one empty session, which has served other tests before."""
    shared.say("\x03\x03/new last")
    shared.until(lambda: "last]" in shared.bar)
    for _ in range(shared.sessions.count(" ") // 2):
        shared.say("/close 1")
    shared.wait_for_sessions("[1 last]")
    shared.say("/rename main")
    shared.wait_for_sessions("[1 main]")
    return shared


def test_sessions_stream_side_by_side_and_remember_their_own(chat: Chat) -> None:
    """Guards what the chat is for: two conversations at once that do not mix; and `/compare`, which Esc ends."""
    chat.say("My name is Ada.", "Ada!")
    chat.say("/compare main main", "nothing to compare with")
    chat.say("/new bob")
    chat.say("My name is Bob.", "Bob!")
    chat.say("/set ignore_eos true")
    chat.say("/set max_tokens 600")
    chat.say("/switch main")
    chat.say("/all What is my name?")
    chat.wait_for_sessions("[1 main] 2 bob…")
    chat.wait("Your name is Ada.")
    chat.say("/compare bob", "main │ bob", "Your name is Ada. │", "│ Your name is Bob.", gone="max_tokens")
    chat.send("\x1b", "Your name is Ada.", gone="Your name is Bob.")
    chat.send("\x1b2")
    chat.wait("Your name is Bob.", gone="Ada")
    assert "[2 bob" in chat.sessions  # which may have ended meanwhile


def test_typing_while_a_reply_streams(runs: ForkServer, tmp_path: Path) -> None:
    """Guards the input line against streaming output, and the screen against leftovers, also after it was resized."""
    sentence = "what I type meanwhile: äöü 日本語 stays whole"
    with Chat(runs, tmp_path, *LONG) as chat:
        chat.say("Tell me a story.", "1 running")
        for end in range(1, len(sentence) + 1):
            chat.send(sentence[end - 1])
            chat.pump(0.005)
            assert sentence.startswith(chat.input), chat.lines
        chat.wait(sentence)
        for columns, rows in ((40, 12), (120, 40), (5, 2), (1, 1), (61, 24)):
            chat.resize(columns, rows)
            chat.pump(0.1)
        chat.wait(sentence)
        assert chat.sessions == "[1 main…]", "the answer ended before the typing did"
        chat.send("\x1b", "stopped; /continue resumes it", gone=" running")
        chat.settle()
        before = chat.lines
        assert max(map(len, before)) <= 61 and before[-1].startswith("main>")
        chat.send("\x0c")
        chat.settle()
        assert chat.lines == before and chat.input == sentence


def test_what_stops_a_reply(runs: ForkServer, tmp_path: Path) -> None:
    """Guards each meaning of Ctrl-C and Esc, the message behind a stopped reply, and keys that follow Esc."""
    with Chat(runs, tmp_path, *LONG) as chat:
        chat.send("\x03", "Ctrl-D or /exit leaves.")
        chat.send("\x03\x03half a line", "main> half a line")
        assert chat.text.count("Ctrl-D or /exit leaves.") == 1
        chat.send("\x04")
        chat.send("\x03", "main>", gone="half a line")
        chat.ask_for_long()
        chat.say("Spell the word lamp.", "(next) > Spell the word lamp.")
        chat.send("a few words")
        chat.send("\x03", "1 running", "main>", gone="a few words")
        chat.send("\x03", "stopped; /continue resumes it", "> Spell the word lamp.", gone="(next)")
        chat.wait("l-a-m-p")
        chat.send(UP, "main> a few words")
        chat.send("\x1b", "stopped; /continue resumes it", gone="running")
        chat.send("x", "main> a few wordsx")
        chat.send("\x03", "main>", gone="a few words")
        chat.send("/ex\t\t", "export", "exit")
        chat.send("\x1b")
        chat.until(lambda: chat.input.startswith("/ex") and "export" not in "".join(chat.lines[:-1]))
        typed = chat.input
        chat.send("!", typed + "!")
        chat.send("\x03", "main>", gone="!")
        assert chat.leave() == 0


def test_forks_and_retries(chat: Chat) -> None:
    """Guards forks, undoing, and several replies: a message waits until one is picked, by a key or by `/pick`."""
    chat.say("My name is Ada.", "Ada!")
    chat.say("/fork twin", "forked from main")
    chat.wait_for_sessions("1 main [2 twin]")
    chat.say("What is my name?", "Your name is Ada.")
    chat.say("/retry 3", "[1] │ [2] │ [3]", "/pick 1 to 3")
    chat.wait_for_sessions("1 main [2 twin]")
    chat.say("/pick 0", "Your name is Ada.", gone="[1] │")
    chat.say("/undo", "twin> What is my name?", gone="Your name is")
    chat.send("\x03")
    chat.say("/retry temperature=0,0.2,0.4", "[1] temperature=0", "[2] temperature=0.2", "[3] temperature=0.4")
    chat.wait_for_sessions("1 main [2 twin]")
    chat.say("What is my name?", "(next) > What is my name?", gone="Your name is Ada.")
    chat.send(RIGHT + RIGHT + LEFT)
    chat.send("\r", "Nice to meet you, Ada!", "Your name is Ada.", gone="[1] temperature")
    chat.say("/retry 2 temperature=0.5", "[1] temperature=0.5", "[2] temperature=0.5")
    chat.send("5", "twin> 5")
    chat.send("\x7f2", "> My name is Ada.", gone="[1] temperature")
    chat.say("/switch main", "Ada!", gone="forked from")


def test_a_fork_while_a_reply_goes_on(runs: ForkServer, tmp_path: Path) -> None:
    """Guards `/fork` in the middle of a reply, half of which was the copy's last one: it ends before that message."""
    with Chat(runs, tmp_path, *LONG) as chat:
        chat.say("/set ignore_eos false", "false")
        chat.say("My name is Ada.", "Ada!")
        chat.say("/set ignore_eos true", "true")
        chat.ask_for_long()
        chat.say("/fork twin", "forked from main", "Ada!", gone="Tell me a story.")
        chat.wait_for_sessions("1 main… [2 twin]")


def test_a_window_of_ten_lines(chat: Chat) -> None:
    """Guards `/retry` and `/compare` in a small window: each reply and session can be seen, and no hint takes lines."""
    chat.resize(55, 10)
    for setting in ("max_tokens 60", "ignore_eos true", "loop_guard false"):
        chat.say(f"/set {setting}")
    chat.say("Tell me a story.", "cut off after", gone="/set")
    chat.say("/retry temperature=0.1,0.2,0.3", "[1 main", "/pick 1 to 3")
    for keys, label in ((RIGHT, "[2] temperature=0.2"), (RIGHT, "[3] temperature=0.3"), (RIGHT, "[1] temperature=0.1")):
        chat.send(keys)
        chat.until(lambda label=label: chat.lines[0] == label, f"{label} is not on the top")  # type: ignore[misc]
        assert sum("Left" in line for line in chat.lines) == 0
    chat.send("1", "cut off after", gone="/pick")
    for name in ("twin", "third"):
        chat.say(f"/fork {name}", "forked from")
    chat.say("/compare", "third (2/2: Left, Right)", gone="forked from")
    chat.send(LEFT, "main │ twin (1/2: Left, Right)")
    chat.say("/list", "third (2/2: Left, Right)", "3 third")
    chat.say("/compare off")
    chat.resize(80, 24)


def rows_file(folder: Path, count: int, tokens: int) -> Path:
    path = folder / "in.jsonl"
    rows = [{"prompt": f"Count from {n} to {n + 6}.", "ignore_eos": True, "max_tokens": tokens} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_batch_under_a_live_chat_is_stopped_and_resumed(runs: ForkServer, tmp_path: Path) -> None:
    """Guards `/run`: replies go first, Ctrl-D asks, finished rows are kept, and all rows are those of `cbatch run`."""
    source, out, alone = rows_file(tmp_path, 64, 60), tmp_path / "out.jsonl", tmp_path / "alone.jsonl"
    with Chat(runs, tmp_path, "--dtype", "float32") as chat:
        chat.wait("KV cache:")
        chat.say(f"/run {source} -o {out}", "/64,")
        chat.say("Spell the word lamp.", "l-a-m-p")
        assert re.search(r"run \d+/64", chat.bar), "the answer came after the batch"
        chat.until(out.read_bytes)
        chat.send("\x04", "A batch is running.", "/64,")
        chat.say("/run stop", "Interrupted", gone="/64,")
        chat.say("/run stop", "No batch is running.")
        assert chat.leave() == 0
    assert 0 < len(out.read_bytes().splitlines()) < 64
    for arguments in ((out, "--resume"), (alone,)):
        assert runs.start("run", source, "--dtype", "float32", "-o", *arguments).code() == 0
    assert out.read_bytes() == alone.read_bytes()


CUT = re.compile(r"/\d{1,2}$|,$|\d$(?<!/100)|tok?$|tok/$")


def test_a_batch_belongs_to_the_session_that_started_it(runs: ForkServer, tmp_path: Path) -> None:
    """Guards reports of a batch, its refusals, and its progress in a narrow window, where no number or unit is cut."""
    source, out = rows_file(tmp_path, 100, 40), tmp_path / "out.jsonl"
    with Chat(runs, tmp_path) as chat:
        chat.wait("KV cache:")
        chat.say(f"/run {tmp_path}/nosuch -o {out}", "there is no file")
        assert "writes to" not in chat.text
        chat.say("/new other")
        chat.wait_for_sessions("1 main [2 other]")
        chat.send("\x1b1")
        chat.say(f"/run {source} -o {out}")
        chat.send("\x1b2", "/100")
        for columns in (40, 34, 28, 22):
            chat.resize(columns, 24)
            chat.until(lambda: (bars := [one for one in chat.lines if "[2 other" in one]) and not CUT.search(bars[-1]))
        chat.resize(80, 24)
        chat.wait("main*")
        assert "100 rows:" not in chat.text
        chat.send("\x1b1", "writes to", "100 rows: 0 ok, 100 cut off at max_tokens, 0 failed", "is done")
        chat.say(f"/run {source} -o {out}", "exists and is not empty; --resume continues it")


def test_sessions_survive_a_kill(runs: ForkServer, tmp_path: Path) -> None:
    """Guards a conversation, and what was typed, against a kill in the middle of a reply; and who may read them."""
    with Chat(runs, tmp_path) as chat:
        chat.say("My name is Ada.", "Ada!")
        chat.say("/set ignore_eos true")
        chat.say("Tell me a story.", "1 running")
        chat.until(lambda: any("Tell me a story." in path.read_text() for path in tmp_path.rglob("*.json")))
        chat.run.send(signal.SIGKILL)
    with Chat(runs, tmp_path) as chat:
        chat.send(UP, "main> Tell me a story.")
        chat.send("\x03")
        chat.send("My n", "main> My name is Ada.")
        chat.send("\x03")
        chat.send("\x12ignore", "/set ignore_eos true")
        chat.send("\x03\x03", "main>", gone="ignore")
        chat.say("/load", "2 turns My name is Ada.")
        chat.say("/load 1", "> My name is Ada. Nice to meet you, Ada!", "> Tell me a story.")
        chat.say("/undo", "> Tell me a story.")
        chat.send("\x03")
        chat.say("/set ignore_eos false")
        chat.say("What is my name?", "Your name is Ada.")
    modes = {path.name: path.stat().st_mode & 0o777 for path in [tmp_path / "cbatch", *tmp_path.glob("cbatch/**/*")]}
    assert modes.pop("cbatch") == modes.pop("sessions") == 0o700
    assert modes.pop("history.jsonl") == 0o600 and set(modes.values()) == {0o600}


EXHAUSTIVE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        (signal.SIGHUP, 129),
        pytest.param(signal.SIGTERM, 143, marks=EXHAUSTIVE),
        pytest.param(signal.SIGINT, 130, marks=EXHAUSTIVE),
    ],
)
def test_a_signal_ends_it_in_good_order(runs: ForkServer, tmp_path: Path, signum: int, code: int) -> None:
    """Guards messages and a partial reply against every signal, and the screen after it."""
    with Chat(runs, tmp_path, *LONG) as chat:
        chat.ask_for_long("Tell me a story about a cat named Tom.")
        chat.say("Hello.", "(next) > Hello.")
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
        chat.wait("There is no model folder /no/such/model.")
        assert "Traceback" not in chat.text


def test_the_editor_changes_the_last_message(chat: Chat) -> None:
    """Guards `/edit`: the screen comes back, and the new text replaces the old message."""
    chat.say("Spell the word lamp.", "l-a-m-p")
    chat.say("/edit", "> Spell the word tree.", "t-r-e-e", gone="lamp")
    chat.say("/edit", "Nothing was changed.")
    chat.say("/set temperature 9999", "temperature must be a number")


def test_a_wrong_form_is_told_when_it_is_set(chat: Chat) -> None:
    """Guards `/set regex`: a mistake in it was told by the next reply, which failed."""
    chat.say("/set regex [a", 'regex "[a"', "The regex cannot be used: unclosed character class")
    chat.say("/set regex [ab]", 'regex "[ab]"', gone="cannot be used")
    chat.say("/set regex default")


def test_a_long_answer_to_a_command_begins_at_its_top(chat: Chat) -> None:
    """Guards `/help` and `/load` on a low terminal, which showed their last lines; what is sent next is at the end."""
    chat.resize(50, 10)
    chat.say("/help", "/retry", "more lines below: PageDown, End", gone="/run")
    chat.send("\x1b[6~\x1b[6~\x1b[6~\x1b[6~\x1b[6~", "/help NAME explains")
    chat.say("My name is Ada.", "Ada!")
    chat.say("/stats", "model:", "more lines below")
    chat.resize(80, 24)


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
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="a").save_pretrained(folder)
    make_network("llama", vocab_size=len(PIECES), max_position_embeddings=2048).save_pretrained(folder)
    return folder


def test_control_sequences_never_reach_the_terminal(runs: ForkServer, tmp_path: Path) -> None:
    """Guards the terminal against control sequences from the model, saved sessions, names and errors."""
    evil = "\x1b]52;c;aGk=\x07\x1b[6n\x9b31m\rx‮"
    write_session(tmp_path / "evil.json", evil, evil, f"n{evil}", error=evil, remark=evil, state="error")
    model = hostile_model(tmp_path / "model")
    with Chat(runs, tmp_path, "-m", model, "--temperature", 5, "--max-tokens", 250) as chat:
        chat.say("a", "cut off")
        chat.say(f"/load {tmp_path}/evil.json", "[2 loaded]", "> ]52;c;aGk=[6n31mx")
        chat.say("\x1b[200~/read /tmp/no-\x1b]52;c;x\x1b[201~", "Cannot read")
        chat.say("/list", "1 turn")
        assert chat.leave() == 0, "and prints what was said"
        titles = re.compile(rb"\x1b\]2;[^\x00-\x1f\x7f]*\a")  # which the chat sets, from names of sessions
        assert "2;loaded · cbatch".encode() in b"".join(titles.findall(chat.raw))
        raw = titles.sub(b"", chat.raw)
        for piece in (b"\x1b]52", b"\x1b]8", b"\x1b[6n", "\x9b".encode(), b"\x9b31", b"\x07", "‮".encode(), "⁦".encode()):
            assert piece not in raw, piece


def test_a_draft_stays_in_its_session(runs: ForkServer, tmp_path: Path) -> None:
    """Guards half-typed text against following the user into another session, keys that switch, and --continue."""
    with Chat(runs, tmp_path) as chat:
        chat.say("/new bob")
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
    (kept,) = (tmp_path / "cbatch" / "sessions").glob("*.json")
    assert json.loads(kept.read_text())["draft"] == "", "a draft that was cleared is back"


def test_lines_and_pastes_are_edited(chat: Chat, tmp_path: Path) -> None:
    """Guards the usual keys, the three ways to begin a new line, and pastes: long ones are folded, but sent whole."""
    lines = "\n".join(f"pasted line {number}" for number in range(40))
    chat.say("/set max_tokens 3")
    chat.send("one three", "main> one three")
    chat.send(CTRL_LEFT + "two ", "main> one two three")
    chat.send("\x05\nby Ctrl-J\\\rby a backslash\x1b\rby Alt-Enter")
    chat.send("\x1b[200~\npasted\n/twice\x1b[201~")
    chat.wait("one two three", "by Ctrl-J", "by a backslash", "by Alt-Enter", "pasted", "/twice")
    assert not any(line.startswith("> ") for line in chat.lines), "it was sent"
    chat.send("\r", "> one two three by Ctrl-J by a backslash by Alt-Enter pasted /twice", "cut off after")
    chat.send(UP, "main> one two three")
    chat.send("\x03")
    chat.send(f"Sum up \x1b[200~{lines}\x1b[201~ please", "main> Sum up [pasted 1: 40 lines] please", "tokens")
    assert [line[:4] for line in chat.lines[-3:]] == ["[1 m", "+ [p", "main"], "the list takes one line"
    chat.send("\r", "> Sum up [pasted 1: 40 lines] please", "[1 main")
    chat.say(f"/export {tmp_path}/talk.md", "written to")
    assert f"Sum up {lines} please" in (tmp_path / "talk.md").read_text()
    for keys in ("\x7f", "\x1b[D\x1b[D\x1b[D\x1b[3~", "\x17"):
        chat.send(f"a \x1b[200~{lines}\x1b[201~", ": 40 lines]")
        chat.send(keys)
        chat.send("\x05b", "main> a b", gone="40 lines] b")
        chat.send("\x03")
    chat.send("\x1b[200~if x:\n\tgo\x1b[201~")
    chat.until(lambda: "    go" in chat.lines, "the tab is not as wide as in a file")
    chat.send("\x03")


def test_a_file_is_overwritten_only_when_asked_twice(chat: Chat, tmp_path: Path) -> None:
    """Guards `/export` over a file that is there: it asks, and anything else that is typed means no."""
    path = tmp_path / "talk.md"
    path.write_text("precious")
    chat.say("Spell the word lamp.", "l-a-m-p")
    for line in (f"/export {path}", "/list", f"/export {path}"):
        chat.say(line, "1 main" if line == "/list" else "the same command again replaces it")
    assert path.read_text() == "precious"
    chat.say(f"/export {path}", "written to")
    assert "l-a-m-p" in path.read_text()


def test_files_after_an_at_sign(chat: Chat, tmp_path: Path) -> None:
    """Guards `@file` in a message: Tab completes it, the file goes along, and a name that is none is text."""
    (tmp_path / "my notes.txt").write_text("The lamp is green.\n")
    chat.send(f"See @{tmp_path}/my\t", "my\\ notes.txt")
    chat.send(", and @nobody.\r", "+ my notes.txt, 7 tokens", gone="[1 main…")


def test_a_file_that_does_not_fit(chat: Chat, tmp_path: Path) -> None:
    """Guards `/read` of more than the context: it is said at once, `/fit` keeps what fits, and hints say what helps."""
    path = tmp_path / "long.txt"
    path.write_text("".join(f"line {number}\n" for number in range(3000)))
    chat.say("My name is Ada.", "Ada!")
    chat.say(f"/read {path}", "tokens, does not fit: there is room for 692 beside", "/fit attaches")
    chat.say("Sum up.", "this message alone is too long", "/fit cuts its files", gone="/trim")
    chat.say("/undo", "main> Sum up.")
    chat.send("\x03")
    chat.say("/fit", "characters in its middle are left out", "+ 1 long.txt, 6", gone="22,890")
    chat.say("Sum up.", "+ long.txt, ", gone="too long")
    chat.until(lambda: "…" not in chat.sessions)
    chat.say("/stats", "last reply here")


def num_bells(chat: Chat) -> int:
    """How often the bell rang; the end of a title is none."""
    return re.sub(rb"\x1b\].*?\a", b"", chat.raw).count(b"\a")


def test_an_earlier_message_is_edited(runs: ForkServer, tmp_path: Path) -> None:
    """Guards `/edit N`: a copy goes on from there, and nothing of the session is lost; and the terminal's title."""
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nsed -i s/Ada/Bob/ "$1"\n')
    editor.chmod(0o700)
    with Chat(runs, tmp_path, *LONG, "--bell", 0.001, env={"EDITOR": str(editor)}) as chat:
        chat.say("/set ignore_eos false", "false")
        chat.say("My name is Ada.", "Ada!")
        chat.say("What is my name?", "Your name is Ada.")
        chat.say("/edit 2", "> My name is Bob.", "Nice to meet you, Bob!", gone="Ada")
        chat.wait_for_sessions("1 main [2 s2]")
        chat.say("What is my name?", "Your name is Bob.")
        chat.say("/switch main", "Your name is Ada.")
        chat.until(lambda: chat.screen.title == "main · cbatch", "the title does not say which session is shown")
        chat.say("/set ignore_eos true")
        chat.ask_for_long()
        chat.send("\x1b2")
        chat.until(lambda: chat.screen.title == "main … cbatch", "the title does not say which session replies")
        assert (bells := num_bells(chat)) > 0, "no bell at the end of a reply"
        chat.say("/stop all")
        chat.until(lambda: chat.screen.title == "s2 · cbatch")
        assert num_bells(chat) == bells, "a bell for a reply that the user has stopped"
        assert chat.leave() == 0 and b"\x1b[23;0t" in chat.raw


def shown_lines(chat: Chat) -> list[int]:
    return [int(number) for line in chat.lines for number in re.findall(r"^line (\d+)$", line)]


def test_scrolling(chat: Chat, tmp_path: Path) -> None:
    """Guards the way through a long session: pages add up, the wheel, Home and End, and /find with its next place."""
    lines = "\n".join(f"line {number}" for number in range(100))
    path = write_session(tmp_path / "numbered.json", "Count.", lines)
    chat.say(f"/load {path}", "line 99")
    page = len(shown_lines(chat))
    chat.send(PAGE_UP * 3)
    chat.until(lambda: shown_lines(chat)[0] < 100 - 3 * (page - 2), "three keys scrolled less than three pages")
    chat.send(HOME, "> Count.", "line 0")
    chat.send(END, "line 99", gone="more lines below")
    bottom = shown_lines(chat)[0]
    chat.send(WHEEL_UP * 2)
    chat.until(lambda: shown_lines(chat)[0] == bottom - 6)
    chat.say("/find line 42", "line 42")
    assert shown_lines(chat)[0] == 42
    chat.say("/find LINE 5", "11 of 11 lines")
    chat.say("/find", "10 of 11 lines")
    chat.send("\x1b", "line 99")


def test_vi_keys(runs: ForkServer, tmp_path: Path) -> None:
    """Guards --vi: Esc leaves the insert mode, and letters are commands then."""

    def leave_insert_mode() -> None:
        before = chat.screen.cursor.x
        chat.send("\x1b")
        chat.until(lambda: chat.screen.cursor.x < before)

    with Chat(runs, tmp_path, "--vi") as chat:
        chat.send("one two", "main> one two")
        leave_insert_mode()
        chat.send("bcwthree", "main> one three")
        leave_insert_mode()
        chat.send("0i/system ", "main> /system one three")
        leave_insert_mode()
        chat.send("\r", "system message: one three")
        chat.send("next", "main> next")


def test_a_new_limit_holds_for_a_continued_reply(chat: Chat) -> None:
    """Guards `/continue` after `/set max_tokens`, and answers to commands against piling up."""
    chat.say("/set ignore_eos true")
    chat.say("/set max_tokens 4")
    chat.say("Tell me a story.", "cut off after max_tokens = 4")
    chat.say("/set max_tokens 7", "max_tokens 7")
    chat.say("/set all temperature 0.5", "temperature 0.5", gone="max_tokens 7")
    chat.say("/continue", "cut off after max_tokens = 7", gone="temperature 0.5")
    chat.say("/new other")
    chat.say("/set temperature", "temperature 0.5")
    chat.say("/set all temperature default", "temperature 0.7 (default of a chat)")


def test_paths_and_the_shell(chat: Chat) -> None:
    """Guards lines that begin with a path, which are messages, and `!`: what a command writes goes with a message."""
    for text in ("/etc/hosts what is this?", "/usr/bin/env: no such file", "!really"):
        chat.say(f"!{text}" if text[0] == "!" else text, f"> {text}")
        chat.until(lambda: not chat.sessions.endswith("…]"))
    chat.say("!echo /a/b; exit 3", "1 line, it ended with code 3", "+ 1 $ echo /a/b; exit 3, 5 tokens")
    chat.say("What is it?", "+ $ echo /a/b; exit 3, ", gone="+ 1 $")
    chat.say("!true", "true: no output")
    chat.say("!sleep 1000 & sleep 1000", "running sleep")
    chat.say("!true", "A command is running")
    chat.send("\x1b", "no output, it was stopped")


def test_bytes_that_are_not_utf8(chat: Chat) -> None:
    """Guards pastes in another encoding: a sentence says so, and they are sent."""
    chat._child.send(b"\x1b[200~caf\xe9 au lait\x1b[201~")
    chat.wait("1 byte of the paste not in UTF-8", "main> caf? au lait")
    chat.send("\r", "> caf? au lait")


def test_a_loop_stops_and_goes_on(chat: Chat) -> None:
    """Guards a reply that repeats itself: it stops with a note, `/continue` goes on, and `/set` says what is set."""
    chat.say("/set ignore_eos true", "true")
    chat.say("/set temperature 0", "temperature 0.0")
    chat.say("Hello.", "(stopped because it repeats itself; /continue goes on", gone="1 running")
    chat.say("/set loop_guard", "loop_guard true (default of a chat)")
    chat.say("/set max_tokens 3")
    chat.say("/continue", "cut off after max_tokens = 3", gone="repeats itself")


def test_saved_sessions(runs: ForkServer, tmp_path: Path) -> None:
    """Guards the way back to an old chat: mentioned at the start, by number at once, by its words, and `/delete`."""
    folder = tmp_path / "cbatch" / "sessions"
    folder.mkdir(parents=True)
    write_session(folder / "20260101-000000-1-1.json", "My name is Ada.", "Nice to meet you, Ada!", "main")
    second = write_session(folder / "20260101-000000-1-2.json", "Spell the word lamp.", "l-a-m-p", "second")
    with Chat(runs, tmp_path) as chat:
        chat.wait("2 chats are saved: /load lists them")
        chat.say("/load 1", "> Spell the word lamp.", "l-a-m-p")
        chat.wait_for_sessions("[1 second]")
        chat.say("/load ada", "> My name is Ada.")
        chat.wait_for_sessions("1 second [2 main]")
        chat.say("What is my name?", "Your name is Ada.")
        chat.say("/load", "2 turns My name is Ada.", "1 turn second: Spell the word lamp.")
        chat.say("/delete 2", "That session is open")
        chat.say("/close second")
        chat.wait_for_sessions("[1 main]")
        chat.say("/delete second: no", "There is no saved session")
        chat.say("/delete second", "“Spell the word lamp.”, 1 turn: the same command again deletes it")
        chat.say("/list", "2 turns")
        chat.say("/delete second", "the same command again deletes it")
        chat.say("/delete second", "deleted: Spell the word lamp.")
        assert chat.leave() == 0
    assert not second.exists() and len(list(folder.iterdir())) == 1


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
        sessions = tmp_path / "state" / "cbatch" / "sessions"
        chat.until(lambda: list(sessions.glob("*.json")), "it is not saved:")
    (saved,) = sessions.glob("*.json")
    attached = json.loads(saved.read_text())["turns"][0]["attached"]
    assert [Path(one["name"]).name for one in attached] == ["b.py", "a two.txt"]


def test_the_context_fills_up(chat: Chat) -> None:
    """Guards the user against a context that is full all of a sudden: the bar and a warning say so before."""
    chat.say("/set max_tokens 20")
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
    chat.say("/help", "/retry", "/help NAME explains a command")
    assert any(line.startswith("· /") for line in chat.lines) and "more lines below" not in chat.text
    assert sum("/" in line for line in chat.lines) < 22
    chat.say("/help retry", "Example", "/retry temperature=0.2,0.7,1,1.3", gone="/help NAME explains")
    chat.say("/help keys", "Ctrl-J", "Alt-1", gone="temperature=0.2")
    assert any("Enter " in line for line in chat.lines)
    chat.say("/help retyr", "did you mean /help retry?")
    chat.resize(50, 45)
    chat.say("/help", "/retry ask again, once or N times /pick keep one of several")
    chat.say("/help keys", "Ctrl-D: leaves, on an empty line")
    chat.resize(80, 24)


def test_markdown_on_the_screen(chat: Chat, tmp_path: Path) -> None:
    """Guards emphasis inside a Chinese sentence, colours of code, and text after nested fences."""
    text = "这是**重点**内容\n\n```python\ny = 7\n```\n\n```markdown\n```python\nx = 1\n```\n```\n\n"
    text += "| a | b |\n|---|--:|\n| one | 2 |\n\nplain words"
    chat.say(f"/load {write_session(tmp_path / 'n.json', 'q', text)}", "plain words", "one │ 2")
    assert "**" not in "".join(chat.lines)
    cells = {cell.data: cell for row in chat.screen.buffer.values() for cell in row.values()}
    assert cells["重"].bold and not cells["容"].bold and cells["7"].fg == "cyan"
    row = next(n for n, line in enumerate(chat.lines) if line == "plain words")
    assert chat.screen.buffer[row][0].fg == "default"
    chat.say("/copy code 1", "copied 6 characters")
    assert b"\x1b]52;c;" + base64.b64encode(b"y = 7\n") + b"\x07" in chat.raw


def test_a_terminal_without_a_cursor(runs: ForkServer, tmp_path: Path) -> None:
    """Guards TERM=dumb: lines in, lines out, and no escape sequences."""
    with Chat(runs, tmp_path, env={"TERM": "dumb"}, wait_for="one per line") as chat:
        chat.say("My name is Ada.", "Nice to meet you, Ada!")
        chat.say("What is my name?", "Your name is Ada.")
        assert chat.leave() == 0
        assert b"\x1b" not in chat.raw


def test_two_models(runs: ForkServer, tmp_path: Path) -> None:
    """Guards `/model`: another one replies in one session, both stand side by side; a wrong name harms nothing."""
    other = save_model(tmp_path / "other")
    with Chat(runs, tmp_path, "--max-tokens", 12, "--temperature", 0) as chat:
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
