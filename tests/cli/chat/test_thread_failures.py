"""No thread of a chat that fails leaves a message without an answer, or the chat without the next one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.cli.chat.engine_client import EngineClient
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.engine.thread import EngineThread
from cbatch.requests.input_processor import InputProcessor
from cbatch.requests.output_processor import OutputProcessor
from cbatch.text.detokenizer import IncrementalDetokenizer
from cbatch.text.output_parser import OutputStream
from tests.support.chat_harness import ChatHarness, reply_of
from tests.support.faults import Fault, Panic

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
