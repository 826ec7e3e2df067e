"""Models that think before they answer, in a chat: what is shown, what the model is told later, what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cbatch.cli.chat.commands.session_commands import do_set
from cbatch.cli.chat.session.session_file import read_session
from cbatch.cli.chat.session.store import Store
from cbatch.cli.chat.tui.transcript import Transcript
from cbatch.engine.base.config import EngineConfig
from cbatch.engine.engine import Engine
from tests.cli.chat.test_controller import Rooms, answer_of

FORCED = {"regex": r"<think>\nhm \*\*so\*\*\n</think>\n\n[0-9]"}


def make(change: str) -> Rooms:
    """The demo model with a template that has think tags; `change` says what it writes before an answer."""
    engine = Engine(EngineConfig(dtype="float32", device="cpu"))
    assert engine.tokenizer is not None and engine.tokenizer.chat_template is not None
    template = engine.tokenizer.chat_template
    assert template.count("assistant\n") == 1
    template = template.replace("assistant\n", "assistant\n" + change)
    engine.tokenizer._tokenizer.chat_template = "{# <think> </think> #}" + template
    return Rooms(engine)


@pytest.fixture(scope="module", params=["", "<think>\n"], ids=["thinks or not", "always thinks"])
def rooms(request: pytest.FixtureRequest) -> Iterator[Rooms]:
    made = make(request.param)
    yield made
    assert made.client.driver is not None
    made.client.driver.close()
    made.client.driver.engine.close()


def shown(room: Any) -> list[str]:
    lines = [line for chunk in Transcript().chunks(room.current, 60) for line in chunk]
    return [f"{style}|{text}" for line in lines for style, text in line if text.strip()]


def test_reasoning_is_shown_apart_and_not_told_again(tmp_path: Path) -> None:
    """Guards the style on the screen, the next turn's prompt, and what a saved session has of it."""
    rooms = make("")
    store = Store(tmp_path)
    room = rooms.make(params=FORCED, store=store)
    heard: list[str] = []
    room.on_token = lambda session, answer, text: heard.append(text)
    text = rooms.ask(room, "How many?")
    answer = answer_of(room.current)
    assert text.isdigit() and "".join(heard) == text and answer.reasoning == "hm **so**"
    assert "class:reasoning|hm **so**" in shown(room) and f"|{text}" in shown(room)
    assert room.current.last is not None and room.current.last.messages()[1]["content"] == text
    store.wait()
    (path,) = tmp_path.rglob("*.json")
    kept = answer_of(read_session(path))
    assert (kept.text, kept.reasoning, kept.written) == (text, answer.reasoning, answer.raw)
    with pytest.raises(Exception, match="complete"):
        room.go_on(room.current)
    assert rooms.client.driver is not None
    rooms.client.driver.close()
    rooms.client.driver.engine.close()


def test_thoughts_that_are_cut_off_go_on(rooms: Rooms) -> None:
    """Guards `/stop` and `/continue` inside the reasoning or the answer: together they are the undisturbed one."""
    question = "Tell me a story about a cat named Tom."
    whole = rooms.make()
    rooms.ask(whole, question)
    expected = answer_of(whole.current)
    room = rooms.make()
    room.ask(room.current, question)
    rooms.until(lambda: answer_of(room.current).num_tokens >= 15)
    room.stop(room.current)
    assert answer_of(room.current).written and answer_of(room.current).can_go_on
    room.go_on(room.current)
    rooms.settle(room)
    answer = answer_of(room.current)
    assert (answer.text, answer.reasoning) == (expected.text, expected.reasoning)
    assert bool(answer.reasoning) == answer.is_thinking and bool(answer.text) != answer.is_thinking


def test_one_form_takes_the_place_of_another(rooms: Rooms) -> None:
    """Guards a session that could neither be asked nor loaded after two forms were set in it."""
    desk = SimpleNamespace(room=rooms.make(), say=lambda *lines: None)
    desk.session = desk.room.current
    do_set(desk, "regex [0-9]{2}")
    do_set(desk, 'choice ["yes", "no"]')
    assert desk.session.params == {"choice": ["yes", "no"]}
    do_set(desk, 'response_format {"type": "text"}')
    assert desk.session.params == {}
    do_set(desk, "regex default")
    assert rooms.ask(desk.room, "Hi") or answer_of(desk.room.current).reasoning


def test_a_form_cannot_go_on_in_the_middle(rooms: Rooms) -> None:
    """Guards against the second half of an answer that begins its form anew."""
    room = rooms.make(params={"regex": "[a-z ]{300}", "max_tokens": 3})
    rooms.ask(room, "Speak.")
    room.go_on(room.current)
    rooms.settle(room)
    assert "cannot be continued" in answer_of(room.current).error
