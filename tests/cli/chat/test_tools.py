"""Tools in a chat: asked about, run, refused and cancelled, with their results back in the conversation."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cbatch.base.outputs import ToolCall
from cbatch.cli.chat.controller import ChatController, Variant
from cbatch.cli.chat.session.session import CANCELLED, REFUSED
from cbatch.cli.chat.session.store import read_session, to_json
from cbatch.cli.chat.toolbox import ToolBox
from cbatch.cli.common.exits import UserError
from cbatch.requests.output_processor import StreamEvent
from cbatch.tools.tool import Tool, command
from tests.support.chat_harness import reply_of
from tests.support.chat_templates import QWEN3
from tests.support.chat_terminal import Chat
from tests.support.fork_server import ForkServer
from tests.support.model_folder import make_tokenizer
from tests.support.tiny_models import make_network
from tests.support.tool_calls import TAGS

ECHO = Tool("echo", "Says it again.", {"type": "object", "required": ["text"]}, command("echo", "{text}"))
SLOW = Tool("slow", "Takes long.", {}, command("sleep", "100"))


class ScriptedClient:
    """Replies as a test says, in place of a model."""

    engine, failure = None, None

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.callbacks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def require_engine(self) -> None:
        """It is always ready."""

    def submit(self, request: Any) -> None:
        self.asked.append(request)

    def cancel(self, request: Any) -> None:
        pass

    def post(self, callback: Callable[[], None]) -> None:
        self.callbacks.put(callback)

    def params(self, params: Any) -> Any:
        return SimpleNamespace(max_tokens=None, greedy=True)

    def reply(self, text: str = "", *calls: tuple[str, Any]) -> None:
        """The whole reply to the last request: a text, and calls with their arguments."""
        made = tuple(ToolCall(name, json.dumps(arguments)) for name, arguments in calls)
        usage = SimpleNamespace(cached_tokens=0)
        completion: Any = SimpleNamespace(note=None, stop_reason=None, tool_calls=made, usage=usage)
        reason: Any = "tool_calls" if calls else "stop"
        event = StreamEvent(text=text, raw=text, token_id=1, finish_reason=reason, completion=completion)
        self.asked[-1].on_event(event, 0.0)

    def wait(self) -> None:
        """Waits for the result of one call."""
        self.callbacks.get(timeout=60)()


@pytest.fixture
def client() -> ScriptedClient:
    return ScriptedClient()


def make(client: Any, tools: Iterable[Tool] = (ECHO, SLOW), **options: Any) -> ChatController:
    return ChatController(client, tools=ToolBox(list(tools), **options))


def test_a_call_is_asked_about_and_its_result_goes_back(client: ScriptedClient, tmp_path: Path) -> None:
    """Guards the whole round: nothing runs unasked, the model gets the result, and later turns and files have it."""
    controller = make(client)
    session = controller.current
    controller.send(session, "Say hi.")
    assert [tool["function"]["name"] for tool in client.asked[0].tools] == ["echo", "slow"]
    client.reply("Let me see.", ("echo", {"text": "hi"}))
    turn = session.turns[0]
    assert session.is_busy and str(session.asking) == 'echo({"text": "hi"})'
    controller.answer_call(session, is_allowed=True)
    client.wait()
    said, result = client.asked[1].message_groups[-1][1:]
    assert said["content"] == "Let me see." and said["tool_calls"][0]["function"]["name"] == "echo"
    assert (result["role"], result["content"], result["tool_call_id"]) == ("tool", "hi", said["tool_calls"][0]["id"])
    client.reply("It said hi.")
    assert reply_of(session).text == "It said hi." and not session.is_busy
    assert [message["role"] for message in turn.messages()] == ["user", "assistant", "tool", "assistant"]
    (tmp_path / "s.json").write_text(json.dumps(to_json(session)))
    assert read_session(tmp_path / "s.json").turns[0].messages() == turn.messages()


def test_always_and_no(client: ScriptedClient) -> None:
    """Guards the answers: `always` also runs what else waits and what comes later, `no` tells the model."""
    controller = make(client)
    session = controller.current
    controller.send(session, "x")
    client.reply("", ("slow", {}), ("echo", {"text": "a"}), ("echo", {"text": "b"}), ("none", {}))
    uses = reply_of(session).uses
    assert [use.state for use in uses] == ["asking", "asking", "asking", "done"] and "no tool none" in uses[3].result
    controller.answer_call(session, is_allowed=False)
    assert uses[0].result == REFUSED
    controller.answer_call(session, is_allowed=True, always=True)
    client.wait()
    client.wait()
    assert [use.result for use in uses[1:3]] == ["a", "b"] and len(client.asked) == 2
    client.reply("", ("echo", {"text": "c"}))
    client.wait()
    assert reply_of(session).uses[-1].result == "c"
    with pytest.raises(UserError, match="No call waits"):
        controller.answer_call(session, is_allowed=True)


def test_rounds_are_bounded(client: ScriptedClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a model that calls tools for ever: at last it has to reply without them."""
    monkeypatch.setattr("cbatch.cli.chat.toolbox.MAX_TOOL_ROUNDS", 2)
    controller = make(client, allows_all=True)
    controller.send(controller.current, "x")
    for _ in range(2):
        client.reply("", ("echo", {"text": "a"}))
        client.wait()
    assert [bool(request.tools) for request in client.asked] == [True, True, False]
    client.reply("done")
    assert reply_of(controller.current).text == "done"


def test_a_stopped_reply_ends_its_tools(client: ScriptedClient) -> None:
    """Guards Esc while a tool runs: its process ends, and what it gives later is ignored."""
    controller = make(client, allows_all=True)
    session = controller.current
    controller.send(session, "x")
    client.reply("", ("slow", {}))
    assert controller.stop(session) and not session.is_busy and len(client.asked) == 1
    controller.continue_reply(session)
    client.reply("", ("slow", {}))
    client.wait()
    assert [use.result for use in reply_of(session).uses] == [CANCELLED, ""] and len(client.asked) == 2
    assert controller.stop(session)


def test_another_model_goes_on_with_its_own_calls(client: ScriptedClient) -> None:
    """Guards `/retry model=A,B` with tools: the results go back to the model that has called them."""
    other = ScriptedClient()
    controller = make(client, allows_all=True)
    controller.clients["other"] = other  # type: ignore[assignment]
    client.engine = SimpleNamespace(limits=SimpleNamespace(sequence=SimpleNamespace(longest=512)))  # type: ignore[assignment]
    controller.context_share = lambda session: 0.0  # type: ignore[method-assign]
    session = controller.current
    controller.send(session, "x")
    client.reply("one")
    controller.retry(session, [Variant(model="other"), Variant()])
    other.reply("", ("echo", {"text": "a"}))
    client.wait()
    assert len(other.asked) == 2 and reply_of(session).model == "other"


CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": 2, "b": 3\}\}\n</tool_call>'


def tool_model(folder: Path) -> Path:
    """A random model whose chat template takes tools."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = QWEN3
    tokenizer.add_special_tokens({"extra_special_tokens": TAGS})
    tokenizer.save_pretrained(folder)
    network = make_network("llama", vocab_size=len(tokenizer), max_position_embeddings=4096, eos_token_id=2)
    network.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_tools_on_the_screen(runs: ForkServer, tmp_path: Path) -> None:
    """Guards --tools in a real chat: the call is shown, a key allows it, and the result follows."""
    (tmp_path / "tools.py").write_text('def add(a: int, b: int) -> int:\n    """Adds."""\n    return a + b\n')
    model = tool_model(tmp_path / "model")
    arguments = ["-m", model, "--tools", tmp_path / "tools.py", "--param", f"regex={json.dumps(CALL)}"]
    with Chat(runs, tmp_path, *arguments) as chat:
        chat.say("How much is 2 and 3?", '⚙ add({"a": 2, "b": 3})', "Run it? y: yes")
        chat.send("y", "→ 5", "Run it? y: yes")
        chat.send("n", "→ The user does not allow this call. ⚙ add", "Run it?")
        chat.send("a", "→ 5 ⚙ add", gone="Run it?")
        chat.say("/tools", "add", "runs Adds.")
        chat.send("\x03")
