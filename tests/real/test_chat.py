"""A conversation with a real model, as it is typed, and answers in a form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cbatch.api import Engine
from cbatch.cli.chat.commands.registry import FrontEnd, execute_line
from cbatch.cli.chat.session.session import Session
from cbatch.cli.chat.session.store import SessionStore
from scripts.real_model import SMOLLM2
from tests.support.chat_harness import ChatHarness, reply_of
from tests.support.real_models import engine_of

pytestmark = pytest.mark.real

TURNS = (
    "Hello, I am Ada and I live in Paris.",
    "What is the capital of France?",
    "And what is the capital of Italy?",
    "Which animals live in the sea?",
    "Thank you!",
)
OTHER_TURN = "And what is the capital of Japan?"
PARAMS = {"temperature": 0, "max_tokens": 24}

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "maximum": 10**9}},
    "required": ["name", "people"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with engine_of(SMOLLM2.folder, speculate="off") as made:
        yield made


def test_five_turns_and_a_fork(engine: Engine, tmp_path: Path) -> None:
    """Guards replies from the cache: each is that of the whole conversation, and so are both branches of a fork."""
    harness = ChatHarness(engine)
    chat = FrontEnd(harness.make(params=PARAMS), SessionStore(tmp_path))

    def say(text: str, session: Session, messages: list[dict[str, str]]) -> None:
        """Asks in the chat and by the whole conversation."""
        said = harness.ask(chat.controller, text, session)
        messages.append({"role": "user", "content": text})
        assert said == engine.chat(messages, PARAMS).text != ""
        messages.append({"role": "assistant", "content": said})

    main, messages = chat.session, []
    for turn in TURNS[:3]:
        say(turn, main, messages)
    assert "Paris" in messages[3]["content"] and "Rome" in messages[5]["content"]
    execute_line(chat, "/fork other")
    assert chat.session.name == "other" and chat.session is not main
    other = list(messages)
    say(OTHER_TURN, chat.session, other)
    assert "Tokyo" in other[-1]["content"]
    for turn in TURNS[3:]:
        say(turn, main, messages)
    for session in (chat.session, main):
        reply = reply_of(session)
        assert reply.prompt_tokens - reply.cached_tokens < 16 + 24, "only the last message was computed"
    harness.wait_idle()


def test_json_by_schema(engine: Engine) -> None:
    """Guards masks over a real vocabulary: every answer is of the schema, and the facts are still the model's."""
    prompts = [f"Give the name and the number of people of {city} as JSON." for city in ("Paris", "Rome", "Berlin")]
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}}
    for prompt, done in zip(prompts, engine.generate(list(prompts), form | {"max_tokens": 60}), strict=True):
        assert done.finish_reason == "stop", done.text
        found: dict[str, Any] = json.loads(done.text)
        assert set(found) == {"name", "people"} and isinstance(found["people"], int) and found["name"] in prompt


def test_drafts_change_nothing(engine: Engine) -> None:
    """Guards `speculate` on text that repeats itself: drafts are taken, and the tokens are those without any."""
    text = "red, green, blue, black, white, grey, pink, brown"
    asked = f"Repeat this list of colours three times: {text}"
    prompts = [asked, {"prompt": f"{text}. {text}. {text}. red,", "raw": True}, "Say hello.", "Count from 1 to 12."]
    params = {"max_tokens": 48}
    expected = [list(done.token_ids) for done in engine.generate(prompts, params)]
    with engine_of(SMOLLM2.folder, speculate=4) as drafting:
        assert [list(done.token_ids) for done in drafting.generate(prompts, params)] == expected
        stats = drafting.stats()
    assert stats.num_accepted_tokens > 20 and stats.num_drafted_tokens > stats.num_accepted_tokens
