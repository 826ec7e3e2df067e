"""Sessions and their answers on a real engine, without a screen: what is asked, kept, cut off and gone on with."""

from __future__ import annotations

import json
import queue
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cbatch.cli.chat.background_run import Background
from cbatch.cli.chat.controller import Room
from cbatch.cli.chat.engine_client import EngineClient
from cbatch.cli.chat.session.export import append_row, from_result, to_row
from cbatch.cli.chat.session.session import Answer, Session, Turn
from cbatch.cli.chat.session.session_file import read_session
from cbatch.cli.chat.session.store import Store
from cbatch.cli.chat.tui.status import Status
from cbatch.cli.chat.tui.transcript import Transcript
from cbatch.cli.main import run_command
from cbatch.engine import ConfigError
from cbatch.engine.base.config import EngineConfig
from cbatch.engine.engine import Engine

PATIENCE = 60


class Rooms:
    """Makes rooms on one engine, and does for them what a front end's loop does."""

    def __init__(self, engine: Engine) -> None:
        self.client = EngineClient(lambda: engine)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_open = False
        self.client.start(self._calls.put, lambda error: setattr(self, "_is_open", True))
        self.until(lambda: self._is_open)

    def make(self, **options: Any) -> Room:
        return Room(self.client, **options)

    def until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self._calls.get(timeout=PATIENCE)()

    def settle(self, room: Room) -> None:
        self.until(lambda: not any(session.is_busy for session in room.sessions))

    def ask(self, room: Room, text: str, session: Session | None = None) -> str:
        session = session or room.current
        room.ask(session, text)
        self.settle(room)
        assert session.last is not None and session.last.answer is not None
        return session.last.answer.text

    def is_idle(self) -> bool:
        assert self.client.driver is not None
        load = self.client.driver.load
        return load.running == load.waiting == 0

    def wait_idle(self) -> None:
        end = time.monotonic() + PATIENCE
        while not self.is_idle():
            assert time.monotonic() < end, "the engine goes on for nobody"
            time.sleep(0.01)


@pytest.fixture(scope="module")
def rooms() -> Iterator[Rooms]:
    made = Rooms(Engine(EngineConfig(dtype="float32", device="cpu")))
    yield made
    assert made.client.driver is not None
    made.client.driver.close()
    made.client.driver.engine.close()


LONG = {"ignore_eos": True, "max_tokens": 300}


def answer_of(session: Session) -> Answer:
    assert session.last is not None and session.last.answer is not None
    return session.last.answer


def test_a_fork_costs_no_prefill(rooms: Rooms) -> None:
    """Guards `/fork` and later turns: what was said is in the cache, and only what is new is computed."""
    room = rooms.make()
    rooms.ask(room, "My name is Ada.")
    rooms.ask(room, "Tell me a story about a cat named Tom.")
    before = answer_of(room.current)
    twin = room.fork(room.current, "twin")
    assert rooms.ask(room, "What is my name?") == "Your name is Ada."
    answer = answer_of(twin)
    assert answer.prompt_tokens - answer.cached_tokens < 16 + 30
    assert answer.cached_tokens >= before.prompt_tokens + before.num_tokens - 16


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9}])
def test_stopped_and_continued_is_the_whole_answer(rooms: Rooms, params: dict[str, Any]) -> None:
    """Guards `/stop` and `/continue`: together they give what an undisturbed answer gives, sampled ones too."""
    question = "Tell me a story about a cat named Tom."
    whole = rooms.ask(rooms.make(params=params), question)
    room = rooms.make(params=params)
    room.ask(room.current, question)
    for _ in range(2):
        rooms.until(lambda: answer_of(room.current).num_tokens >= 15)
        assert room.stop(room.current)
        assert whole.startswith(answer_of(room.current).text) and answer_of(room.current).text != whole
        room.go_on(room.current)
    rooms.settle(room)
    assert answer_of(room.current).text == whole
    with pytest.raises(ConfigError, match="complete"):
        room.go_on(room.current)


def test_500_cancelled_answers_leave_nothing_behind(rooms: Rooms) -> None:
    """Guards memory: answers cut off at random moments, waiting, in their prefill or later, give their blocks back."""
    driver = rooms.client.driver
    assert driver is not None
    rooms.wait_idle()
    free = driver.engine.blocks.num_free
    chance = random.Random(5)
    room = rooms.make(params=LONG)
    for number in range(49):
        room.open(f"r{number}")
    cancelled = 0
    while cancelled < 500:
        for session in chance.sample(room.sessions, 12):
            if session.is_busy:
                cancelled += room.stop(session)
            else:
                room.ask(session, chance.choice(["Hello.", "Tell me a story. " * 30, "Count from 3 to 9."]))
            if len(session.turns) > 3:
                room.close(session)
                room.open()
        end = time.monotonic() + chance.random() * 0.03
        while time.monotonic() < end:
            try:
                rooms._calls.get(timeout=0.005)()
            except queue.Empty:
                break
    room.leave()
    rooms.wait_idle()
    assert driver.engine.blocks.num_free == free
    driver.engine.scheduler.check_integrity()


def test_retry_keeps_the_answer_before(rooms: Rooms) -> None:
    """Guards alternatives: several at once, each of its own randomness; a retry that is stopped costs nothing."""
    room = rooms.make(params={"temperature": 1.0})
    session = room.current
    first = rooms.ask(room, "Tell me a story about a cat named Tom.")
    assert room.retry(session, 3) == 1
    rooms.settle(room)
    assert session.last is not None
    texts = [answer.text for answer in session.last.answers]
    assert texts[0] == first and len(set(texts)) == 4 and session.last.compares == 1
    room.pick(session, 2)
    assert room.retry(session, 1) == 4
    room.stop(session)
    assert answer_of(session).text == texts[2], "stopped before its first token, it is no answer"
    room.pick(session, 0)
    assert answer_of(session).text == first
    with pytest.raises(ConfigError, match="answers 0 to 4"):
        room.pick(session, 5)


def do_something(room: Room, session: Session, chance: random.Random) -> None:
    actions: list[Callable[[], object]] = [
        lambda: room.retry(session, chance.randint(1, 3)),
        lambda: room.pick(session, chance.randint(0, 3)),
        lambda: room.trim(session, chance.choice([None, 1])),
        lambda: room.go_on(session),
        lambda: room.stop(session),
        lambda: room.undo(session),
        lambda: room.ask(session, "Hello."),
    ]
    chance.choice(actions)()


def test_retries_and_trims_in_any_order(rooms: Rooms) -> None:
    """Guards what is chosen, shown and fallen back on, after every order of retries, picks, trims and stops."""
    chance = random.Random(3)
    transcript = Transcript()
    for number in range(25):
        room = rooms.make(params={"max_tokens": 5})
        session = room.current
        for text in ("word " * 900, "Hello.") if number % 2 else ("Hello.", "word " * 150, "word " * 1200):
            rooms.ask(room, text)
        for _ in range(8):
            with suppress(ConfigError):
                do_something(room, session, chance)
            if chance.random() < 0.5:
                rooms.settle(room)
            turn = session.last
            assert turn is None or 0 <= turn.chosen < len(turn.answers) > turn.fallback >= 0
            transcript.chunks(session, 80)
        room.leave()
    rooms.wait_idle()


def test_a_refused_command_stops_nothing(rooms: Rooms) -> None:
    """Guards an answer that is coming against commands that cannot do anything about it."""
    room = rooms.make(params=LONG)
    room.ask(room.current, "Tell me a story.")
    for action in (lambda: room.go_on(room.current), lambda: room.trim(room.current, None)):
        with pytest.raises(ConfigError):
            action()
    with pytest.raises(ConfigError, match="answers 0 to 0"):
        room.pick(room.current, 3)
    assert room.current.is_busy
    room.leave()
    rooms.wait_idle()


def test_an_engine_that_fails_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the user against waiting for ever: each answer ends with what helps, and what waits is not asked."""
    rooms = Rooms(Engine(EngineConfig(dtype="float32", device="cpu")))
    room = rooms.make()
    room.ask(room.current, "Tell me a story.")
    room.ask(room.current, "Hello.")
    assert rooms.client.driver is not None

    def broken() -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(rooms.client.driver.engine, "step", broken)
    rooms.settle(room)
    answer = answer_of(room.current)
    assert "device lost" in answer.error and "/load opens it" in answer.remark
    assert room.current.queue == ["Hello."]
    assert Status(room, Background()).lines() == ["the engine has failed: device lost"]
    rooms.client.driver.close()
    rooms.client.driver.engine.close()


def test_a_batch_that_ends_early_leaves_the_engine_to_the_chat(rooms: Rooms, tmp_path: Path) -> None:
    """Guards `/run stop`: what is not finished is taken out of the engine, and nothing more is put in."""
    driver = rooms.client.driver
    assert driver is not None
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": f"Tell me story {n}.", "ignore_eos": True, "max_tokens": 20 + 9 * n} for n in range(100)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    background = Background()
    background.start(driver, f"{source} -o {out} --window 50")
    with pytest.raises(ConfigError, match="A batch is running"):
        background.start(driver, f"{source} -o {out}")
    end = time.monotonic() + PATIENCE
    while not (out.exists() and out.read_bytes()):
        assert time.monotonic() < end
        time.sleep(0.01)
    background.stop()
    before = driver.num_tokens
    rooms.wait_idle()
    assert driver.num_tokens - before < 32 * 20, "it went on with rows that nobody waits for"
    background.close()
    assert not background.is_running and 0 < len(out.read_bytes().splitlines()) < 100
    assert driver.engine.blocks.num_used == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "needs a file of rows"),
        ("in.jsonl", "needs a file of rows"),
        ("in.jsonl -o", "requires an argument"),
        ("in.jsonl -o out.jsonl --no-such", "No such option"),
        ("in.jsonl -o out.jsonl --model x", "--model cannot be changed"),
        ("in.jsonl -o out.jsonl --target-step-ms 20", "--target-step-ms cannot be changed"),
        ("in.jsonl -o out.jsonl --retry-errors", "goes with --resume"),
        ("in.jsonl -o /dev/null", "is none"),
        ("'in.jsonl", "No closing quotation"),
        ("--help", "takes the options"),
        ("~nobody-here/x -o y", "no such user"),
    ],
)
def test_what_run_refuses(rooms: Rooms, line: str, message: str) -> None:
    """Guards `/run` against options that make no sense under a chat: a sentence, at once."""
    assert rooms.client.driver is not None
    with pytest.raises(ConfigError, match=message):
        Background().start(rooms.client.driver, line)


def test_a_greedy_session_is_sampled_for_a_retry(rooms: Rooms) -> None:
    """Guards `/retry` where the answer would be the same again."""
    room = rooms.make()
    rooms.ask(room, "Tell me a story about a cat named Tom.")
    room.retry(room.current, 4)
    rooms.settle(room)
    assert room.is_greedy(room.current) and room.current.last is not None
    assert len({answer.text for answer in room.current.last.answers}) > 2


def test_what_waits_is_said_in_order_and_can_be_taken_back(rooms: Rooms) -> None:
    """Guards messages typed while an answer comes, and commands on the last turn in that moment."""
    room = rooms.make(params=LONG)
    session = room.current
    for text in ("Tell me a story.", "Spell the word lamp.", "Hello."):
        room.ask(session, text)
    assert session.queue == ["Spell the word lamp.", "Hello."] and len(session.turns) == 1
    for action in (lambda: room.retry(session, 1), lambda: room.go_on(session), lambda: room.trim(session, None)):
        with pytest.raises(ConfigError, match="waits for its turn"):
            action()
    assert session.is_busy, "a command that is refused stops nothing"
    assert room.undo(session) == "Hello."
    session.params = {}
    room.stop(session)
    rooms.settle(room)
    assert [turn.text for turn in session.turns] == ["Tell me a story.", "Spell the word lamp."]
    assert answer_of(session).text == "l-a-m-p"
    with pytest.raises(ConfigError, match="has gone on"):
        room.replace(session, session.turns[0], "Hello.")
    room.replace(session, session.turns[1], "Spell the word tree.")
    rooms.settle(room)
    assert answer_of(session).text == "t-r-e-e" and len(session.turns) == 2


def test_a_full_context_is_a_message_and_can_be_trimmed(rooms: Rooms) -> None:
    """Guards long conversations: an error that says what helps, `/trim` that asks again, and the start that stays."""
    room = rooms.make(params={"max_tokens": 20}, system="be brief")
    session = room.current
    for number in range(9):
        if not session.turns or not answer_of(session).error:
            rooms.ask(room, f"{number} " + "word " * 150)
    answer = answer_of(session)
    assert answer.code == "prompt_too_long" and "context of 1024" in answer.error and "/trim" in answer.remark
    assert room.trim(session, None) == 0
    rooms.settle(room)
    assert answer_of(session).state in ("stop", "length") and 0 < session.dropped < 8
    assert session.head == [{"role": "system", "content": "be brief"}]
    assert room.trim(session, 100) > 0 and session.dropped == len(session.turns) - 1
    with pytest.raises(ConfigError, match="not full"):
        rooms.ask(room, "Hello.")
        room.trim(session, None)


def test_auto_trim_goes_on_for_ever(rooms: Rooms) -> None:
    """Guards `--auto-trim`: no turn fails, each leaves room for an answer, and the user is told what went."""
    room = rooms.make(params={"max_tokens": 30}, auto_trim=True)
    for number in range(9):
        rooms.ask(room, f"{number} " + "word " * 150)
        assert answer_of(room.current).state in ("stop", "length")
    notes = [item.text for item in room.current.items if not isinstance(item, Turn)]
    assert notes and all("left out from here on" in note for note in notes)
    rooms.ask(room, "word " * 1500)
    assert answer_of(room.current).code == "prompt_too_long", "one message that is too long stays an error"


def test_a_context_that_fills_up_during_an_answer(rooms: Rooms) -> None:
    """Guards an answer without a limit of its own: it ends where the context does, and says so."""
    room = rooms.make(params={"ignore_eos": True})
    rooms.ask(room, "Tell me a story. " + "word " * 300)
    answer = answer_of(room.current)
    assert answer.state == "length" and "the context is full" in answer.remark
    assert answer.prompt_tokens + answer.num_tokens == 1024


def test_an_exported_session_is_a_row_with_the_same_answer(rooms: Rooms, tmp_path: Path) -> None:
    """Guards the way from a chat to a batch and back: the row gives the answer of the chat, and opens as a session."""
    room = rooms.make(params={"temperature": 0.9, "top_p": 0.95}, system="Answer in upper case.", seed=4)
    rooms.ask(room, "My name is Ada.")
    told = rooms.ask(room, "Tell me a story about a cat named Tom.")
    answer = answer_of(room.current)
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    row = to_row(room.current, rooms.client.params(answer.params), 1024, as_messages=True)
    source.write_text('{"prompt": "another"}')
    append_row(source, row)
    assert run_command(["run", str(source), "-o", str(out), "--dtype", "float32", "-q"]) == 0
    assert json.loads(out.read_text().splitlines()[1])["text"] == told
    session = from_result(out, 1, source)
    assert [turn.text for turn in session.turns] == ["My name is Ada.", "Tell me a story about a cat named Tom."]
    assert answer_of(session).text == told and answer_of(session).seed == answer.seed
    assert session.system == "Answer in upper case." and session.params == {"temperature": 0.9, "top_p": 0.95}
    alone = from_result(out, 1, None)
    assert alone.prelude == [{"role": "assistant", "content": told}]
    for index, name, message in [(7, out, "no row with index 7"), (0, tmp_path / "none", "Cannot read")]:
        with pytest.raises(ConfigError, match=message):
            from_result(name, index, None)


def test_sessions_are_kept_as_they_are(rooms: Rooms, tmp_path: Path) -> None:
    """Guards what is on disk: whole after each turn, cut off after leaving, and never that of another session."""
    store = Store(tmp_path)
    room = rooms.make(store=store, params=LONG)
    session = room.current
    room.ask(session, "Tell me a story.")
    rooms.until(lambda: answer_of(session).num_tokens > 20)
    room.ask(session, "And then?")
    room.leave()
    store.close()
    (path,) = (tmp_path / "sessions").glob("*.json")
    found = read_session(path)
    assert found.turns[0].answers[0].text == answer_of_turn(session, 0).text != ""
    assert found.turns[1].text == "And then?" and found.turns[1].answers[0].state == "stopped"
    assert found.params == LONG


def answer_of_turn(session: Session, number: int) -> Answer:
    answer = session.turns[number].answer
    assert answer is not None
    return answer


def test_saving_never_overwrites_another_session(rooms: Rooms, tmp_path: Path) -> None:
    """Guards sessions of yesterday, of the same name, and files that are none."""
    store = Store(tmp_path)
    room = rooms.make(store=store)
    rooms.ask(room, "Hello.")
    path = store.save_as(room.current, "mine")
    assert store.save_as(room.current, "mine") == path
    other = room.open("other")
    rooms.ask(room, "Hello.")
    (tmp_path / "precious.txt").write_text("x")
    for name in ("mine", str(tmp_path / "precious.txt"), str(path)):
        with pytest.raises(ConfigError, match="exists already"):
            store.save_as(other, name)
    for name in ("", ".hidden", "a\nb"):
        with pytest.raises(ConfigError, match="cannot be a name"):
            store.save_as(other, name)


def test_two_chats_do_not_overwrite_each_other(rooms: Rooms, tmp_path: Path) -> None:
    """Guards one file that is open in two chats: the one that comes later goes on in a file of its own."""
    stores = [Store(tmp_path), Store(tmp_path)]
    first, second = (rooms.make(store=store) for store in stores)
    rooms.ask(first, "My name is Ada.")
    stores[0].wait()
    (path,) = (tmp_path / "sessions").glob("*.json")
    stores[1]._stamp = "other"
    stores[1].keeps_at(second.add(read_session(path)), path)
    rooms.ask(first, "Hello.")
    stores[0].wait()
    rooms.ask(second, "What is my name?")
    stores[1].wait()
    assert "Another chat has written" in stores[1].trouble
    kept = {tuple(turn.text for turn in read_session(found).turns) for found in path.parent.glob("*.json")}
    assert kept == {("My name is Ada.", "Hello."), ("My name is Ada.", "What is my name?")}


def test_a_disk_that_fails_costs_no_conversation(rooms: Rooms, tmp_path: Path) -> None:
    """Guards the chat where nothing can be written: it goes on, and the user is told."""
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file")
    room = rooms.make(store=store)
    assert rooms.ask(room, "My name is Ada.")
    store.close()
    assert "cannot be kept" in store.trouble and store.num_written == 0


GOOD: dict[str, Any] = {
    "cbatch_session": 1,
    "name": "n",
    "system": None,
    "params": {},
    "prelude": [],
    "dropped": 0,
    "attempts": 0,
    "turns": [{"user": "u", "chosen": 0, "answers": [{"text": "t", "seed": 0, "params": {}, "error": "", "code": "",
                                                     "remark": "", "state": "stop"}]}],
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"cbatch_session": 2},
        {"name": 5},
        {"params": {"temperature": "hot"}},
        {"params": {"seed": 5}},
        {"params": {"no_such": 5}},
        {"turns": 5},
        {"turns": [{"user": "u", "chosen": 1, "answers": []}]},
        {"turns": [{"user": "u", "chosen": -1, "answers": GOOD["turns"][0]["answers"]}]},
        {"turns": [{"user": "u", "chosen": 0, "answers": [GOOD["turns"][0]["answers"][0] | {"state": "streaming"}]}]},
        {"turns": [{"user": "u", "chosen": 0, "answers": [GOOD["turns"][0]["answers"][0] | {"params": {"x": 1}}]}]},
        {"prelude": [{"role": "user"}]},
        {"dropped": "many"},
    ],
)
def test_a_damaged_session_is_refused_with_a_reason(change: dict[str, Any], tmp_path: Path) -> None:
    """Guards the chat against files that anybody may have written, in every field that is trusted later."""
    path = tmp_path / "s.json"
    path.write_text(json.dumps(GOOD))
    assert read_session(path).turns[0].text == "u"
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(ConfigError, match=r"s\.json"):
        read_session(path)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"[" * 5000, b'{"cbatch_session": NaN}'])
def test_what_is_no_session_is_refused(data: bytes, tmp_path: Path) -> None:
    """Guards `/load` against files of other kinds."""
    path = tmp_path / "s.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"s\.json"):
        read_session(path)
