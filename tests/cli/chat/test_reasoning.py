"""Models that think before they reply: what the screen shows, what later prompts contain, and what is saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.base.params import PARAMS
from cbatch.cli.chat.commands.settings import do_set
from cbatch.cli.chat.engine_client import EngineClient
from cbatch.cli.chat.screen import Transcript
from cbatch.cli.chat.session.export import to_row
from cbatch.cli.chat.session.session import Session
from cbatch.cli.chat.session.store import SessionStore, read_session
from cbatch.cli.common.exits import UserError
from tests.support.chat_harness import ChatHarness, reply_of

FORCED = {"regex": r"<think>\nhm \*\*so\*\*\n</think>\n\n[0-9]"}


def make(change: str) -> ChatHarness:
    """The demo model with a template that has think tags. `change` is what the template writes before a reply."""
    engine = Engine(EngineConfig(dtype="float32", device="cpu"))
    assert engine.tokenizer is not None and engine.tokenizer.chat_template is not None
    template = engine.tokenizer.chat_template
    assert template.count("assistant\n") == 1
    template = template.replace("assistant\n", "assistant\n" + change)
    engine.tokenizer.templates = "{# <think> </think> #}" + template
    return ChatHarness(engine)


@pytest.fixture(scope="module", params=["", "<think>\n"], ids=["thinks or not", "always thinks"])
def harness(request: pytest.FixtureRequest) -> Iterator[ChatHarness]:
    made = make(request.param)
    yield made
    made.engine.close()


def shown(controller: Any) -> list[str]:
    transcript = Transcript()
    transcript.shows_reasoning = True
    lines = [line for chunk in transcript.chunks(controller.current, 60) for line in chunk]
    return [f"{style}|{text}" for line in lines for style, text in line if text.strip()]


def test_reasoning_is_shown_apart_and_not_told_again(tmp_path: Path) -> None:
    """Guards the style on the screen, the next turn's prompt, and the saved session."""
    harness = make("")
    store = SessionStore(tmp_path)
    controller = harness.make(params=FORCED, store=store)
    heard: list[str] = []
    controller.on_token = lambda session, reply, text: heard.append(text)
    text = harness.ask(controller, "How many?")
    reply = reply_of(controller.current)
    assert text.isdigit() and "".join(heard) == text and reply.reasoning == "hm **so**"
    assert "class:reasoning|hm **so**" in shown(controller) and f"|{text}" in shown(controller)
    folded = [line for chunk in Transcript().chunks(controller.current, 60) for line in chunk]
    assert "· thought, 2 words; Ctrl-T shows them" in ["".join(part for _, part in line) for line in folded]
    assert controller.current.last is not None and controller.current.last.messages()[1]["content"] == text
    store.wait()
    (path,) = tmp_path.rglob("*.json")
    kept = reply_of(read_session(path))
    assert (kept.text, kept.reasoning, kept.generated) == (text, reply.reasoning, reply.raw)
    with pytest.raises(Exception, match="complete"):
        controller.continue_reply(controller.current)
    harness.engine.close()


def test_thoughts_that_are_cut_off_go_on(harness: ChatHarness) -> None:
    """Guards `/stop` and `/continue` inside the reasoning or the text: together they give the undisturbed reply."""
    question = "Tell me a story about a cat named Tom."
    whole = harness.make()
    harness.ask(whole, question)
    expected = reply_of(whole.current)
    controller = harness.make()
    controller.send(controller.current, question)
    harness.until(lambda: reply_of(controller.current).num_tokens >= 15)
    controller.stop(controller.current)
    assert reply_of(controller.current).generated and reply_of(controller.current).can_continue
    controller.continue_reply(controller.current)
    harness.settle(controller)
    reply = reply_of(controller.current)
    assert (reply.text, reply.reasoning) == (expected.text, expected.reasoning)
    assert bool(reply.reasoning) != bool(reply.text)


def test_one_form_takes_the_place_of_another(harness: ChatHarness) -> None:
    """Guards a session that could neither be used nor loaded after two constraints were set in it."""
    context: Any = SimpleNamespace(controller=harness.make(), show=lambda *lines: None)
    context.session = context.controller.current
    do_set(context, "regex [0-9]{2}")
    do_set(context, 'choice ["yes", "no"]')
    assert context.session.params == {"choice": ["yes", "no"]}
    do_set(context, 'response_format {"type": "text"}')
    assert context.session.params == {}
    do_set(context, "regex default")
    assert harness.ask(context.controller, "Hi") or reply_of(context.controller.current).reasoning


def test_a_form_cannot_go_on_in_the_middle(harness: ChatHarness) -> None:
    """Guards against the second half of a reply that starts its constraint anew."""
    controller = harness.make(params={"regex": "(?i)[a-z ]{300}", "max_tokens": 3})
    harness.ask(controller, "Speak.")
    controller.continue_reply(controller.current)
    harness.settle(controller)
    assert "cannot be continued" in reply_of(controller.current).error


def test_other_names_of_parameters_are_understood() -> None:
    """Guards /set: its help, the names of vLLM and ollama, and what it says for those that a chat has not."""
    session = Session("main")
    client = EngineClient(lambda: None)  # type: ignore[arg-type,return-value]
    controller = SimpleNamespace(save=lambda session: None, client_of=lambda session: client, sessions=[session])
    said: list[str] = []
    context: Any = SimpleNamespace(session=session, controller=controller, show=lambda *lines: said.extend(lines))
    do_set(context, "top_p")
    assert said == ["top_p               0.95  (default of a chat)", f"  {PARAMS['top_p'].help}"]
    do_set(context, "num_predict 5")
    do_set(context, 'guided_json {"type": "object"}')
    assert session.params["max_tokens"] == 5 and "json_schema" in session.params["response_format"]
    for text, message in [
        ("temp 1", "did you mean 'temperature'"),
        ("num_ctx 4096", "sets the context of all requests"),
        ("enable_thinking false", "--template-kwargs"),
        ("n 3", "n cannot be set in a chat"),
    ]:
        with pytest.raises(UserError, match=message):
            do_set(context, text)


def test_variables_reach_the_chat_template() -> None:
    """Guards --template-kwargs: a model is told not to think, and an exported row says so too."""
    harness = make("' + ('' if enable_thinking | default(true) else '<think>\n\n</think>\n\n') + '")
    lengths = []
    for kwargs in ({}, {"enable_thinking": False}):
        harness.client.template_kwargs = kwargs
        controller = harness.make(params={"max_tokens": 2})
        harness.ask(controller, "Hi")
        lengths.append(reply_of(controller.current).prompt_tokens)
        row = to_row(controller.current, {}, as_messages=True, template_kwargs=kwargs)
        assert row.get("chat_template_kwargs", {}) == kwargs
    block = harness.engine.encode("<think>\n\n</think>\n\n", raw=True)
    assert lengths[1] == lengths[0] + len(block)
    harness.engine.close()
