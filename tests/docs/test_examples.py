"""The example of tool calls on a model that calls one: the demo model, on which all examples run, never does."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cbatch import Completion, Engine
from tests.support.chat_templates import QWEN3
from tests.support.model_folder import save_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "chat_tools.py"


def calling(*arguments: str) -> Completion:
    """A model's answer that calls the example's function, once with each of these arguments."""
    functions = [{"name": "temperature", "arguments": text} for text in arguments]
    calls = [{"id": f"call-{n}", "type": "function", "function": one} for n, one in enumerate(functions)]
    row = {"index": 0, "id": None, "text": "", "finish_reason": "tool_calls", "tool_calls": calls, "key": "k"}
    return Completion.from_row(row | {"usage": {"prompt_tokens": 1, "completion_tokens": 1}})


def test_calls_are_run_and_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards all rounds: calls, right and wrong, get results, which the model's own template takes; then no more."""
    folder = save_model(tmp_path, context=4096)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = QWEN3
    tokenizer.save_pretrained(folder)
    asked: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
    chat: Any = Engine.chat

    def chat_calling_first(engine: Engine, messages: Any, params: Any, **options: Any) -> Any:
        asked.append((list(messages), options))
        if len(asked) <= 3:
            return calling('{"city": "Paris"}', '{"town": "Oslo"}', "{")
        return chat(engine, messages, params.merged({"max_tokens": 3}), **options)

    monkeypatch.setattr(Engine, "chat", chat_calling_first)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(folder)])
    done: Completion = runpy.run_path(str(EXAMPLE), run_name="__main__")["done"]
    assert done.error is None and done.usage.completion_tokens == 3
    shown = capsys.readouterr().out
    assert 'temperature({"city": "Paris"}) gives 18 degrees' in shown and shown.count("The call failed: ") == 2 * 3
    messages, _ = asked[-1]
    assert [message["role"] for message in messages] == ["user", *["assistant", "tool", "tool", "tool"] * 3]
    assert [message.get("tool_call_id") for message in messages[1:5]] == [None, "call-0", "call-1", "call-2"]
    assert [options.get("tool_choice") for _, options in asked] == [None, None, None, "none"]
