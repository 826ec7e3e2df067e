"""`cbatch chat` without a terminal: lines in, replies out, exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cbatch.cli.chat.engine_client import fitted
from cbatch.cli.main import run_command
from tests.support.chat_terminal import Chat, write_session
from tests.support.faults import wait_until
from tests.support.fork_server import ForkServer

pytestmark = pytest.mark.slow

Talk = Callable[..., tuple[int, str, str]]


@pytest.fixture
def talk(runs: ForkServer, tmp_path: Path) -> Talk:
    """Pipes text into a chat. Returns its exit code, stdout and stderr."""

    def call(text: str | bytes, *arguments: object, env: dict[str, str] | None = None) -> tuple[int, str, str]:
        files = {name: tmp_path / name for name in ("stdin", "stdout", "stderr")}
        for path in files.values():
            path.write_bytes(b"")
        files["stdin"].write_bytes(text.encode() if isinstance(text, str) else text)
        code = runs.start("chat", *arguments, env=env, **{name: str(path) for name, path in files.items()}).code()
        return code, files["stdout"].read_text(), files["stderr"].read_text()

    return call


def test_each_line_is_a_turn_of_one_conversation(talk: Talk) -> None:
    """Guards `echo hi | cbatch chat`: only replies on stdout, the rest on stderr, and what was said is remembered."""
    said = (0, "Nice to meet you, Ada!\nYour name is Ada.\n")
    assert talk("My name is Ada.\n\nWhat is my name?", "--lines") == (*said, ""), "nothing of loading"
    assert "demo model" in talk("Hello.", "--lines", "-v")[2]
    assert talk("My name is Ada.\r\n", "-q")[1:] == ("Nice to meet you, Ada!\n", "")


def test_a_question_and_a_document(talk: Talk) -> None:
    """Guards `git diff | cbatch chat "Write a message"`: one message, one reply, and the question comes first."""
    assert talk("", "Spell", "the word", "lamp.") == (0, "l-a-m-p\n", ""), "words need no quotes"
    assert talk("My name is Ada.\nWhat is my name?\n", "-q")[1].count("\n") == 1, "two lines are one message"
    code, out, _ = talk("lamp.\n", "-q", "--json", "Spell the word")
    assert code == 0
    whole = json.loads(out)
    assert whole["index"] == 0 and whole["finish_reason"] == "stop" and whole["text"]
    alone = json.loads(talk("Spell the word\n\nlamp.", "-q", "--json")[1])
    assert alone == whole, "a question and a document are one message, with a blank line between them"
    assert set(whole["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}


def test_a_document_that_does_not_fit(talk: Talk) -> None:
    """Guards `git diff | cbatch chat` if the diff is long: the error names --fit, which leaves out the middle."""
    first, last = "My name is Ada.\n", "What is my name?\n"
    document = first + "".join(f"+ line {number}\n" for number in range(2000)) + last
    code, out, err = talk(document, "Read this:")
    assert (code, out) == (1, "") and err.endswith("--fit cuts the document in the middle.\n")
    code, out, err = talk(document, "--json", "--fit", "Read this:")
    assert code == 0 and re.fullmatch(r"cbatch: .* context: [\d,]+ characters in its middle are left out\n", err)
    assert 600 < json.loads(out)["usage"]["prompt_tokens"] <= 768, "a quarter is left for the reply"
    assert talk(first, "-q", "--fit", "Hello.")[1:] == talk(first, "-q", "Hello.")[1:]
    code, _, err = talk(first, "--fit", "word " * 1500)
    assert code == 1 and "--fit" not in err.splitlines()[-1]


def test_text_that_is_cut_to_fit() -> None:
    """Guards what `fitted` keeps: beginning and end, whole lines if there are any, in as many tokens as there are."""
    engine: Any = SimpleNamespace(encode=lambda text, raw: text.split(" "))
    for text in ("one two\n" * 500, "word " * 3000, "x" * 5000):
        assert fitted(engine, text, 0) == ("", len(text))
        for room in (1, 10, 100):
            shorter, left_out = fitted(engine, text, room)
            beginning, note, end = shorter.partition(f"\n[{left_out:,} characters left out]\n\n")
            assert note and text.startswith(beginning) and text.endswith(end)
            assert len(beginning) + left_out + len(end) == len(text)
            if " " in text:
                assert room // 2 * 0.9 - 3 <= len(beginning.split(" ")) <= max(room // 2, 1)
    assert fitted(engine, "short text", 2) == ("short text", 0)


def test_a_question_goes_on_with_the_last_session(runs: ForkServer, talk: Talk, tmp_path: Path) -> None:
    """Guards `cbatch chat -c QUESTION`: it remembers, and is remembered; a question alone saves nothing."""
    with Chat(runs, tmp_path) as chat:
        chat.say("My name is Ada.", "Ada!")
        assert chat.leave() == 0
    state = {"XDG_STATE_HOME": str(tmp_path)}
    assert talk("", "-q", "Spell the word lamp.", env=state)[0] == 0
    assert talk("", "-q", "-c", "What is my name?", env=state) == (0, "Your name is Ada.\n", "")
    (saved,) = (tmp_path / "cbatch" / "sessions").glob("*.json")
    assert [turn["user"] for turn in json.loads(saved.read_text())["turns"]] == ["My name is Ada.", "What is my name?"]
    assert talk("Spell the word lamp.", "-q", env=state | {"CBATCH_CHAT_CONTINUE": "1"})[:2] == (0, "l-a-m-p\n")
    assert len(json.loads(saved.read_text())["turns"]) == 3
    assert talk("", "-q", "--load", "nobody", "Hello.", env=state)[0] == 2


def test_what_is_typed_counts_for_a_saved_session(talk: Talk, tmp_path: Path) -> None:
    """Guards -c and --load with settings, which were ignored: they hold from now on, others of the session stay."""
    path = write_session(tmp_path / "n.json", "My name is Ada.", "Nice to meet you, Ada!")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"params": {"top_p": 0.5, "max_tokens": 9}, "seed": 3}))
    typed = ["--max-tokens", 2, "--regex", "[0-9]+", "--temperature", 0, "--system", "Count.", "--seed", 7]
    code, out, _ = talk("", "-q", "--load", path, *typed, "Spell the word lamp.")
    assert code == 0 and re.fullmatch("[0-9]{1,4}\n", out)
    saved = json.loads(path.read_text())
    params = {"top_p": 0.5, "max_tokens": 2, "regex": "[0-9]+", "temperature": 0.0}
    assert (saved["params"], saved["system"], saved["seed"]) == (params, "Count.", None)
    configured = talk("", "-q", "--load", path, "Hello.", env={"CBATCH_CHAT_MAX_TOKENS": "50"})
    assert configured[0] == 0 and json.loads(path.read_text())["params"] == params, "defaults of the user are no order"


def test_a_reply_that_repeats_itself_is_stopped(talk: Talk) -> None:
    """Guards replies that loop to the end of the context: they stop, and say so."""
    code, out, err = talk("", "-q", "--json", "--ignore-eos", "--temperature", 0, "Hello.")
    row = json.loads(out)
    assert code == 0 and (row["finish_reason"], row["stop_reason"]) == ("stop", "loop")
    assert row["usage"]["completion_tokens"] < 900 and "--no-loop-guard lets it go on" in err


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_lines_that_get_no_reply(talk: Talk, form: list[str]) -> None:
    """Guards the other lines and the exit code: the message says which line is bad; --json has an object for each."""
    text = b"My name is Ada.\n\xff\n" + b"word " * 1500 + b"\nWhat is my name?\n"
    code, out, err = talk(text, "-q", "--lines", *form)
    second, third = err.splitlines()
    assert code == 1 and "line 2, byte 1: not valid UTF-8" in second
    assert "line 3" in third and "context of 1024" in third and "--auto-trim" in third
    if not form:
        assert out == "Nice to meet you, Ada!\nYour name is Ada.\n"
        return
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2, 3] and rows[3]["text"] == "Your name is Ada."
    assert [row["error"]["code"] for row in rows[1:3]] == ["invalid_utf8", "prompt_too_long"]


def test_auto_trim(talk: Talk) -> None:
    """Guards a long conversation through a pipe, which nobody can type /trim into."""
    text = ("word " * 150 + "\n") * 9
    assert talk(text, "-q", "--lines", "--max-tokens", 20, "--auto-trim")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "/no/such/model"], "no model folder"),
        (["--temperature", "-1"], "--temperature"),
        (["--allow-tools"], "goes with --tools"),
        (["--no-mouse"], "--no-mouse is for a chat on a terminal"),
        (["--vi"], "--vi is for a chat on a terminal"),
        (["--lines", "--fit"], "--fit is for a document on stdin"),
        (["a\udcff"], "The QUESTION is not valid UTF-8 (character 2)"),
        (["--no-such-option"], "No such option"),
        (["--lines", "Hello."], "does not go with it"),
        (["--continue", "--load", "x"], "give one of them"),
        (["--replicas", "2"], "--replicas and --ray are for /run"),
        (["--n", "3"], "/retry N gives several"),
        (["--logprobs", "3"], "--logprobs is for cbatch run"),
    ],
)
def test_what_is_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards usage errors: a sentence and exit code 2, even if no message comes."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello.")))
    assert run_command(["chat", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and "Traceback" not in err


def test_the_help_offers_only_what_a_chat_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the help against options that are refused: --n and --logprobs are for `cbatch run`."""
    assert run_command(["chat", "--help-all"]) == 0
    options = set(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out))
    assert {"--temperature", "--continue", "--tools", "--preset"} <= options and not {"--n", "--logprobs"} & options


def test_a_reader_that_goes_away_and_a_full_disk(runs: ForkServer, tmp_path: Path) -> None:
    """Guards `cbatch chat | head -1`: it ends silently. Also an output that cannot be written."""
    text, err = tmp_path / "in", tmp_path / "err"
    text.write_text("Count from 3 to 9.\n" * 50)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    run = runs.start("chat", "-q", "--lines", stdin=str(text), stdout=str(fifo), stderr=str(err))
    assert select.select([reader], [], [], 60)[0] and os.read(reader, 1)
    os.close(reader)
    assert run.code() == 141 and err.read_text() == ""
    run = runs.start("chat", "-q", stdin=str(text), stdout="/dev/full", stderr=str(err))
    assert run.code() == 3 and "No space left" in err.read_text()


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.exhaustive)]
)
def test_signals(runs: ForkServer, tmp_path: Path, signum: int, code: int) -> None:
    """Guards the exit codes of a chat in a pipeline that is interrupted in the middle of a reply."""
    text, out, err = (tmp_path / name for name in ("in", "out", "err"))
    text.write_text("Tell me a story.\n")
    files = {"stdin": str(text), "stdout": str(out), "stderr": str(err)}
    run = runs.start("chat", "-q", "--ignore-eos", "--no-loop-guard", "--max-tokens", 1000, **files)
    wait_until(lambda: out.exists() and out.read_bytes(), 60)
    run.send(signum)
    assert run.code() == code and "Interrupted" in err.read_text() and out.read_text().endswith("\n")


def test_the_installed_command() -> None:
    """Guards the whole way, with nothing imported before: one line in, one reply out."""
    command = [sys.executable, "-m", "cbatch", "chat", "-q"]
    done = subprocess.run(command, input="Spell the word lamp.", capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "l-a-m-p\n", "")
