"""Sessions and their replies on a real engine, without a screen: requested, saved, stopped, continued, and failing."""

from __future__ import annotations

import json
import queue
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.base.errors import EngineError
from cbatch.cli.chat.background_run import BackgroundRun
from cbatch.cli.chat.commands.registry import FrontEnd, execute_line
from cbatch.cli.chat.controller import ChatController, Variant
from cbatch.cli.chat.engine_client import EngineClient
from cbatch.cli.chat.screen import Transcript, status_bar
from cbatch.cli.chat.session.export import append_row, to_row
from cbatch.cli.chat.session.session import Attachment, Reply, Session, Turn
from cbatch.cli.chat.session.store import SessionStore, has_own_name, modified_at, read_session, to_json
from cbatch.cli.chat.stats import ChatStats
from cbatch.cli.common.exits import UserError
from cbatch.cli.main import run_command
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.engine.thread import EngineThread
from cbatch.requests.input_processor import InputProcessor
from cbatch.requests.output_processor import OutputProcessor
from cbatch.text.detokenizer import IncrementalDetokenizer
from cbatch.text.replies.stream import OutputStream
from tests.support.chat_harness import ChatHarness, reply_of
from tests.support.faults import TIMEOUT_S, Fault, Panic, wait_until


@pytest.fixture(scope="module")
def harness() -> Iterator[ChatHarness]:
    made = ChatHarness(Engine(EngineConfig(dtype="float32", device="cpu")))
    yield made
    made.engine.close()


LONG = {"ignore_eos": True, "max_tokens": 300, "loop_guard": False}


def test_a_fork_costs_no_prefill(harness: ChatHarness) -> None:
    """Guards `/fork` and later turns: the conversation is in the cache, and only what is new is computed."""
    controller = harness.make()
    harness.ask(controller, "My name is Ada.")
    harness.ask(controller, "Tell me a story about a cat named Tom.")
    before = reply_of(controller.current)
    copy = controller.fork(controller.current, "twin")
    assert harness.ask(controller, "What is my name?") == "Your name is Ada."
    reply = reply_of(copy)
    assert reply.prompt_tokens - reply.cached_tokens < 16 + 30
    assert reply.cached_tokens >= before.prompt_tokens + before.num_tokens - 16


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9}])
def test_a_stopped_and_continued_reply_is_the_whole_reply(harness: ChatHarness, params: dict[str, Any]) -> None:
    """Guards `/stop` and `/continue`: together they give the undisturbed reply, sampled or not."""
    question = "Tell me a story about a cat named Tom."
    whole = harness.ask(harness.make(params=params), question)
    controller = harness.make(params=params)
    controller.send(controller.current, question)
    for _ in range(2):
        harness.until(lambda: reply_of(controller.current).num_tokens >= 15)
        assert controller.stop(controller.current)
        assert whole.startswith(reply_of(controller.current).text) and reply_of(controller.current).text != whole
        controller.continue_reply(controller.current)
    harness.settle(controller)
    assert reply_of(controller.current).text == whole
    with pytest.raises(UserError, match="complete"):
        controller.continue_reply(controller.current)


def test_cancelled_replies_leave_nothing_behind(harness: ChatHarness) -> None:
    """Guards memory: replies stopped at random moments, waiting, in prefill or later, give their blocks back."""
    engine = harness.engine
    harness.wait_idle()
    free = engine.core.scheduler.pool.num_free
    chance = random.Random(5)
    controller = harness.make(params=LONG)
    for number in range(49):
        controller.new_session(f"r{number}")
    cancelled = 0
    while cancelled < 250:
        for session in chance.sample(controller.sessions, 12):
            if session.is_busy:
                cancelled += controller.stop(session)
            else:
                controller.send(session, chance.choice(["Hello.", "Tell me a story. " * 30, "Count from 3 to 9."]))
            if len(session.turns) > 3:
                controller.close(session)
                controller.new_session()
        with suppress(queue.Empty):
            for _ in range(chance.randint(0, 100)):
                harness._callbacks.get(timeout=0.005)()
    controller.end_all()
    harness.wait_idle()
    assert engine.core.scheduler.pool.num_free == free
    engine.core.scheduler.check_integrity()


def test_retry_keeps_the_previous_reply(harness: ChatHarness) -> None:
    """Guards alternatives: several at once, sampled also in a greedy session; a retry that is stopped costs nothing."""
    controller = harness.make(params={"temperature": 0.0})
    session = controller.current
    first = harness.ask(controller, "Tell me a story about a cat named Tom.")
    assert harness.client.params(session.params).greedy and controller.retry(session, [Variant()] * 3) == 1
    harness.settle(controller)
    assert session.last is not None
    texts = [reply.text for reply in session.last.replies]
    assert texts[0] == first and len(set(texts)) > 2 and session.last.first_compared == 1
    controller.pick(session, 2)
    assert controller.retry(session, [Variant()]) == 4
    controller.stop(session)
    assert reply_of(session).text == texts[2], "stopped before its first token, it is no answer"
    controller.retry(session, [Variant()] * 2)
    controller.stop(session)
    assert session.last.is_undecided == any(reply.text for reply in session.last.replies[-2:])


def test_retries_and_trims_in_any_order(harness: ChatHarness) -> None:
    """Guards which reply is chosen, shown and fallen back to, after retries, picks, trims and stops in any order."""
    chance, transcript = random.Random(3), Transcript()
    for number in range(25):
        controller = harness.make(params={"max_tokens": 5})
        session = controller.current
        for text in ("word " * 900, "Hello.") if number % 2 else ("Hello.", "word " * 150, "word " * 1200):
            harness.ask(controller, text)
        for _ in range(8):
            actions: list[Callable[[], object]] = [
                partial(controller.retry, session, [Variant()] * chance.randint(1, 3)),
                partial(controller.pick, session, chance.randint(0, 3)),
                partial(controller.trim, session, chance.choice([None, 1])),
                partial(controller.send, session, "Hello."),
                *(partial(each, session) for each in (controller.continue_reply, controller.stop, controller.undo)),
            ]
            with suppress(UserError):
                chance.choice(actions)()
            if chance.random() < 0.5:
                harness.settle(controller)
            turn = session.last
            assert turn is None or 0 <= turn.chosen < len(turn.replies) > turn.fallback >= 0
            transcript.chunks(session, 80)
        controller.end_all()
    harness.wait_idle()


def test_an_engine_that_fails_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the user against waiting for ever: each reply ends with advice, and queued messages are not sent."""
    harness = ChatHarness(Engine(EngineConfig(dtype="float32", device="cpu")))
    controller = harness.make()
    controller.send(controller.current, "Tell me a story.")
    controller.send(controller.current, "Hello.")
    monkeypatch.setattr(harness.engine.core, "step", Mock(side_effect=RuntimeError("device lost")))
    harness.settle(controller)
    reply = reply_of(controller.current)
    assert "device lost" in reply.error and "/load opens it" in reply.remark
    assert [turn.text for turn in controller.current.queue] == ["Hello."]
    assert ChatStats(controller).lines() == ["the engine has failed: device lost"]
    harness.engine.close()


def test_queued_messages_are_sent_in_order_and_can_be_taken_back(harness: ChatHarness) -> None:
    """Guards messages typed while a reply streams, and commands for the last turn at that moment."""
    controller = harness.make(params=LONG)
    session = controller.current
    for text in ("Tell me a story.", "Spell the word lamp.", "Hello."):
        controller.send(session, text)
    assert [turn.text for turn in session.queue] == ["Spell the word lamp.", "Hello."] and len(session.turns) == 1
    for action in (
        lambda: controller.retry(session, [Variant()]),
        lambda: controller.continue_reply(session),
        lambda: controller.trim(session, None),
    ):
        with pytest.raises(UserError, match="still queued"):
            action()
    assert session.is_busy, "a command that is refused stops nothing"
    assert controller.undo(session) == "Hello."
    session.params = {}
    controller.stop(session)
    harness.settle(controller)
    assert [turn.text for turn in session.turns] == ["Tell me a story.", "Spell the word lamp."]
    assert reply_of(session).text == "l-a-m-p"
    with pytest.raises(UserError, match="moved on"):
        controller.replace(session, session.turns[0], "Hello.")
    controller.replace(session, session.turns[1], "Spell the word tree.")
    harness.settle(controller)
    assert reply_of(session).text == "t-r-e-e" and len(session.turns) == 2


def test_a_full_context_is_a_message_and_can_be_trimmed(harness: ChatHarness) -> None:
    """Guards long conversations: the error gives advice, `/trim` asks again, and the system message stays."""
    controller = harness.make(params={"max_tokens": 20}, system="be brief")
    session = controller.current
    for number in range(9):
        if not session.turns or not reply_of(session).error:
            harness.ask(controller, f"{number} " + "word " * 150)
    reply = reply_of(session)
    assert reply.code == "prompt_too_long" and "context of 1024" in reply.error and "/trim" in reply.remark
    assert controller.trim(session, None) == 0
    harness.settle(controller)
    assert reply_of(session).state in ("stop", "length") and 0 < session.dropped < 8
    assert session.system_messages == [{"role": "system", "content": "be brief"}]
    assert controller.trim(session, 100) > 0 and session.dropped == len(session.turns) - 1
    with pytest.raises(UserError, match="not full"):
        harness.ask(controller, "Hello.")
        controller.trim(session, None)


def test_auto_trim_goes_on_for_ever(harness: ChatHarness) -> None:
    """Guards `--auto-trim`: no turn fails, each leaves room for a reply, and the user is told what was dropped."""
    controller = harness.make(params={"max_tokens": 30}, auto_trim=True)
    for number in range(9):
        harness.ask(controller, f"{number} " + "word " * 150)
        assert reply_of(controller.current).state in ("stop", "length")
    notes = [item.text for item in controller.current.items if not isinstance(item, Turn)]
    assert notes and all("no longer sees" in note for note in notes)
    harness.ask(controller, "word " * 1500)
    assert reply_of(controller.current).code == "prompt_too_long", "one message that is too long stays an error"


def test_a_context_that_fills_up_during_a_reply(harness: ChatHarness) -> None:
    """Guards a reply without `max_tokens`: it ends with the context, and says so."""
    controller = harness.make(params={"ignore_eos": True, "loop_guard": False})
    harness.ask(controller, "Tell me a story. " + "word " * 300)
    reply = reply_of(controller.current)
    assert reply.state == "length" and "the context is full" in reply.remark
    assert reply.prompt_tokens + reply.num_tokens == 1024


def test_an_exported_session_is_a_row_with_the_same_reply(harness: ChatHarness, tmp_path: Path) -> None:
    """Guards the way from a chat to a batch: the row gives the reply of the chat."""
    controller = harness.make(params={"temperature": 0.9, "top_p": 0.95}, system="Answer in upper case.", run_seed=4)
    harness.ask(controller, "My name is Ada.")
    told = harness.ask(controller, "Tell me a story about a cat named Tom.")
    reply = reply_of(controller.current)
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given = {**harness.client.chat_params, **reply.params, "max_tokens": 1024}
    row = to_row(controller.current, given, as_messages=True)
    source.write_text('{"prompt": "another"}')
    append_row(source, row)
    assert run_command(["run", str(source), "-o", str(out), "--dtype", "float32", "-q"]) == 0
    assert json.loads(out.read_text().splitlines()[1])["text"] == told


def test_saving_never_overwrites_another_session(harness: ChatHarness, tmp_path: Path) -> None:
    """Guards older sessions of the same name, files that are not sessions, and what another chat has written."""
    store = SessionStore(tmp_path)
    controller = harness.make(store=store)
    harness.ask(controller, "Hello.")
    path = store.save_as(controller.current, "mine")
    assert store.save_as(controller.current, "mine") == path
    other = controller.new_session("other")
    harness.ask(controller, "Hello.")
    (tmp_path / "precious.txt").write_text("x")
    for name in ("mine", str(tmp_path / "precious.txt"), str(path)):
        with pytest.raises(UserError, match="exists already"):
            store.save_as(other, name)
    for name in ("", ".hidden", "a\nb"):
        with pytest.raises(UserError, match="cannot be a name"):
            store.save_as(other, name)
    path.write_text(path.read_text() + "\n")
    with pytest.raises(UserError, match="Another chat has changed"):
        store.save_as(controller.sessions[0], "mine")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/load none", "no saved session none; /load lists them"),
        ("/load what?", "no saved session what"),
        ("/load none.json", "Cannot read .*none.json: No such file"),
        ("/load ~nobody-here/x", "no such user"),
        ("/switch", r"missing: /switch NAME\|NUMBER"),
        ("/pick ", "missing: /pick K"),
        ("/export", "missing: /export FILE"),
        ("/export s.md", "no message yet"),
        ("/lod", "did you mean /load"),
        ("/model 99", "Type a number from 1 to"),
        ("/run in.jsonl", "needs an input file"),
        ("/run in.jsonl -o", "requires an argument"),
        ("/run in.jsonl -o out.jsonl --no-such", "No such option"),
        ("/run in.jsonl -o out.jsonl --model x", "--model cannot be changed"),
        ("/run in.jsonl -o out.jsonl --retry-errors", "needs --resume"),
        ("/run in.jsonl -o /dev/null", "is not one"),
        ("/run 'in.jsonl", "No closing quotation"),
        ("/run --help", "takes the options"),
        ("/run ~nobody-here/x -o y", "no such user"),
    ],
)
def test_what_commands_refuse(harness: ChatHarness, tmp_path: Path, line: str, message: str) -> None:
    """Guards what is typed wrong after a slash: the message says what is wrong, and what to type instead."""
    chat = FrontEnd(harness.make(), SessionStore(tmp_path))
    chat.set_input = Mock()  # type: ignore[method-assign]
    with pytest.raises(UserError, match=message):
        execute_line(chat, line)


def in_two_chats(harness: ChatHarness, folder: Path) -> tuple[list[SessionStore], ChatController, ChatController, Path]:
    """Two chats with a store each, the first of which has begun a session, and the session's file."""
    stores = [SessionStore(folder), SessionStore(folder)]
    first, second = (harness.make(store=store) for store in stores)
    harness.ask(first, "My name is Ada.")
    stores[0].wait()
    (path,) = (folder / "sessions").glob("*.json")
    return stores, first, second, path


def test_two_chats_do_not_overwrite_each_other(harness: ChatHarness, tmp_path: Path) -> None:
    """Guards a file that is open in two chats: the second one continues in a file of its own."""
    stores, first, second, path = in_two_chats(harness, tmp_path)
    stores[1]._run_id = "other"
    second.open_saved(stores[1].open(path))
    harness.ask(first, "Hello.")
    stores[0].wait()
    harness.ask(second, "What is my name?")
    stores[1].wait()
    assert "Another chat has changed" in stores[1].save_error
    kept = {tuple(turn.text for turn in read_session(found).turns) for found in path.parent.glob("*.json")}
    assert kept == {("My name is Ada.", "Hello."), ("My name is Ada.", "What is my name?")}


def test_a_chat_spares_what_another_has_added_to_its_own_file(harness: ChatHarness, tmp_path: Path) -> None:
    """Guards the chat that began a file against the one that continued it, as `cbatch chat -c QUESTION` does."""
    stores, first, second, path = in_two_chats(harness, tmp_path)
    second.open_saved(stores[1].open(path))
    harness.ask(second, "What is my name?")
    stores[1].wait()
    harness.ask(first, "Hello.")
    stores[0].wait()
    assert "Another chat has changed" in stores[0].save_error
    assert [turn.text for turn in read_session(path).turns] == ["My name is Ada.", "What is my name?"]
    assert first.current.path is not None and not has_own_name(first.current.path)
    assert [turn.text for turn in read_session(first.current.path).turns] == ["My name is Ada.", "Hello."]


def test_a_disk_that_fails_costs_no_conversation(harness: ChatHarness, tmp_path: Path) -> None:
    """Guards a chat that cannot write: it goes on, and the user is told."""
    (tmp_path / "file").write_text("")
    store = SessionStore(tmp_path / "file")
    assert harness.ask(harness.make(store=store), "My name is Ada.")
    store.close()
    assert "cannot be saved" in store.save_error and not store.written


def test_the_last_session_is_the_one_that_was_used_last(harness: ChatHarness, tmp_path: Path) -> None:
    """Guards --continue and the order of /load: leaving gives no time to sessions that nobody has touched."""
    store = SessionStore(tmp_path)
    controller = harness.make(store=store)
    first = controller.current
    harness.ask(controller, "My name is Ada.")
    controller.new_session("other")
    harness.ask(controller, "Hello.")
    before: list[float] = []
    for _ in range(2):
        controller.end_all()
        store.wait()
        times = [modified_at(path) for path in store.files()]
        assert times == (before or times)
        before = times
        controller.switch(first)
    harness.ask(controller, "What is my name?", first)
    controller.end_all()
    store.close()
    assert next(store.saved_sessions()).title == "My name is Ada."


def test_a_text_that_cannot_be_counted_harms_nobody(harness: ChatHarness) -> None:
    """Guards the thread that encodes messages: later replies still come."""
    chat = FrontEnd(harness.make(), None)  # type: ignore[arg-type]
    chat.measure(chat.session, Attachment("a", "caf\udce9"))
    assert harness.ask(harness.make(), "My name is Ada.") == "Nice to meet you, Ada!"


def test_how_far_a_prompt_is_read(harness: ChatHarness) -> None:
    """Guards the status while a long prompt is read, which was 0 tok/s: the share of it that is read."""
    controller = harness.make()
    session, bars = controller.current, list[str]()
    stats, background = ChatStats(controller), BackgroundRun()

    def look(record: object) -> None:
        bars.append("".join(text for _, text in status_bar(controller, stats, background, 80)))

    harness.engine.on_step = look
    controller.send(session, "word " * 900)
    harness.settle(controller)
    harness.engine.on_step = None
    shares = [int(found[1]) for bar in bars if (found := re.search(r"running, (\d+)% of the prompt read", bar))]
    assert shares == sorted(shares) and shares[-1] == 100 and shares[0] > 0
    assert controller.share_read(session) is None


@pytest.mark.parametrize(("states", "kept"), [(["stop"], "a"), (["stop", "streaming"], "a"), (["streaming"], None)])
def test_a_copy_ends_with_the_last_complete_reply(states: list[Any], kept: str | None) -> None:
    """Guards `/fork` while a reply goes on, also one of `/retry`: half a reply is not what the copy goes on from."""
    replies = [Reply(text, state=state) for text, state in zip("ab", states, strict=False)]
    session = Session("main", items=[Turn("q", [Reply("one", state="stop")]), Turn("r", replies, len(replies) - 1)])
    copy = session.copied("twin")
    shown = [turn.reply.text for turn in copy.turns if turn.reply is not None]
    assert shown == ["one", *([kept] if kept else [])]
    assert not copy.is_busy and session.is_busy == ("streaming" in states), "the session itself has changed"


def test_a_picked_reply_goes_on(harness: ChatHarness) -> None:
    """Guards a reply that is picked while it streams: only the others are stopped. What is refused stops none."""
    controller = harness.make(params=LONG)
    session = controller.current
    harness.ask(controller, "Hello.")
    controller.retry(session, [Variant()] * 2)
    for refused in (partial(controller.continue_reply, session), partial(controller.trim, session, None)):
        with pytest.raises(UserError):
            refused()
    with pytest.raises(UserError, match="replies 0 to 2"):
        controller.pick(session, 3)
    assert session.last is not None and session.is_busy, "what is refused stops nothing"
    first, second = session.last.replies[1:]
    harness.until(lambda: second.num_tokens > 3)
    controller.pick(session, 2)
    assert first.state == "stopped" and second.is_open
    harness.settle(controller)
    assert second.state == "length" and second.num_tokens == 300 and session.last.reply is second


def test_pastes_of_a_session_have_names_of_their_own(tmp_path: Path) -> None:
    """Guards a message against the text of another paste, also after a session was loaded and a message undone."""
    old = Session("s")
    paste = old.fold_paste("old\n" * 20)
    old.items.append(Turn(f"a {paste.name}", [Reply("x", state="stop")], attachments=[paste]))
    old.draft = old.fold_paste("draft\n" * 20).name
    path = tmp_path / "s.json"
    path.write_text(json.dumps(to_json(old)))
    found = read_session(path)
    new = found.fold_paste("new\n" * 20)
    assert len({new.name, paste.name, found.draft}) == 3
    client: Any = SimpleNamespace(engine=None)
    controller = ChatController(client)
    controller.open_saved(found)
    assert found.unfold(controller.undo(found)) == "a " + "old\n" * 20
    assert found.unfold(found.draft) == "draft\n" * 20


def test_a_model_that_is_closed_while_it_loads(harness: ChatHarness) -> None:
    """Guards `/model close` at any moment: its engine is closed, its sessions go back, queued messages are sent."""
    may_open, opened = threading.Event(), list[Engine]()

    def open_model(name: str) -> Engine:
        may_open.wait(TIMEOUT_S)
        opened.append(Engine(EngineConfig(dtype="float32", device="cpu")))
        return opened[0]

    controller = harness.make(open_model=open_model)
    session = controller.current
    controller.use_model(session, "other")
    controller.send(session, "My name is Ada.")
    controller.send(session, "What is my name?")
    controller.unload_model("other")
    assert session.model == "" and "other is closed" in str(session.items)
    may_open.set()
    harness.settle(controller)
    assert reply_of(session).text and reply_of(session).state == "stop"
    with pytest.raises(EngineError, match="closed"):
        wait_until(lambda: opened and not opened[0].thread, TIMEOUT_S)  # raises once the engine is closed
    with pytest.raises(UserError, match="is not loaded"):
        controller.unload_model("other")


def test_a_model_that_does_not_load(harness: ChatHarness) -> None:
    """Guards messages to a model that cannot be loaded: they get an error, and the session a model that can reply."""
    controller = harness.make(open_model=Mock(side_effect=UserError("There is no other.")))
    session = controller.current
    controller.use_model(session, "other")
    controller.send(session, "Hello.")
    harness.settle(controller)
    assert "There is no other" in reply_of(session).error
    harness.until(lambda: session.model == "")
    assert harness.ask(controller, "My name is Ada.") == "Nice to meet you, Ada!"


ANSWER = {"text": "t", "state": "stop"}
GOOD = {"cbatch_session": 1, "name": "n", "turns": [{"user": "u", "answers": [ANSWER]}]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"[" * 5000,
        b'{"cbatch_session": NaN}',
        {"cbatch_session": 2},
        {"seed": True},
        {"params": {"temperature": "hot"}},
        {"params": {"seed": 5}},
        {"turns": 5},
        {"turns": [{"user": "u", "chosen": -1, "answers": [ANSWER]}]},
        {"turns": [{"user": "u", "chosen": 0, "answers": [ANSWER | {"state": "streaming"}]}]},
        {"turns": [{"user": "u", "chosen": 0, "answers": [ANSWER | {"params": {"x": 1}}]}]},
        {"turns": [{"user": "u", "chosen": 0, "answers": [ANSWER | {"rounds": [{"text": "", "calls": [{}]}]}]}]},
        {"prelude": [{"role": "user"}]},
        {"dropped": "many"},
    ],
    ids=lambda data: str(data)[:40],
)
def test_what_is_no_session_is_refused(data: bytes | dict[str, Any], tmp_path: Path) -> None:
    """Guards `/load` against files of other kinds, and damage in every field that is used later."""
    path = tmp_path / "s.json"
    path.write_text(json.dumps(GOOD))
    assert read_session(path).turns[0].text == "u"
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(GOOD | data).encode())
    with pytest.raises(UserError, match=r"s\.json"):
        read_session(path)


def test_a_torn_session_tells_its_line(tmp_path: Path) -> None:
    """Guards the place of damage in a file of many lines, of which only the column was told."""
    (path := tmp_path / "s.json").write_text(json.dumps(GOOD, indent=1)[:60])
    with pytest.raises(UserError, match=r"s\.json, line 6, column \d+: "):
        read_session(path)


PLACES: list[tuple[type, str]] = [
    (EngineClient, "_encode"),
    (EngineClient, "_submit_to_engine"),
    (InputProcessor, "encode"),
    (EngineThread, "submit"),
    (EngineThread, "_deliver"),
    (OutputProcessor, "take"),
    (IncrementalDetokenizer, "push_all"),
    (OutputStream, "push"),
    (SteppingEngine, "add_request"),
    (SteppingEngine, "step"),
]


@pytest.fixture
def chat(model_folder: Path) -> Iterator[ChatHarness]:
    with Engine(EngineConfig(model=str(model_folder), device="cpu", max_seqs=4)) as engine:
        yield ChatHarness(engine)


@pytest.mark.parametrize(("owner", "name"), PLACES, ids=lambda place: getattr(place, "__name__", place))
def test_a_message_that_breaks_something_is_told(
    owner: type, name: str, chat: ChatHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the client's thread, the engine's, and what they call: a chat must not wait for a thread that is gone."""
    controller = chat.make()
    controller.current.params |= {"max_tokens": 4, "ignore_eos": True}
    with monkeypatch.context() as patch:
        Fault(patch, owner, name, Panic("boom"))
        chat.ask(controller, "hello")
    assert "boom" in reply_of(controller.current).error
    chat.ask(controller, "hello")
    failure = chat.client.failure
    if failure is None:
        chat.wait_idle()
    assert reply_of(controller.current).error == (f"The engine failed: {failure}" if failure is not None else "")
