"""Runs what a model calls in a batch, and asks it again with the results, until it answers or has had its rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cbatch.base.outputs import ToolCall
from cbatch.base.params import derive_seed
from cbatch.base.request import Request
from cbatch.batch.rounds.round_loop import Ask, RoundLoop
from cbatch.requests.completion import Completion, Usage
from cbatch.requests.input_processor import InputProcessor
from cbatch.tools.tool import Tool

NUM_THREADS = 8
"""Calls that run at the same time."""


@dataclass(slots=True)
class _Conversation:
    """A row whose model calls tools.

    request:  what was asked first
    messages: the calls and results so far, in OpenAI's form
    usage, reused: of the rounds that are over; see `Completion`
    """

    request: Request
    messages: list[dict[str, Any]] = field(default_factory=list)
    num_rounds: int = 0
    usage: Usage = field(default_factory=Usage)
    reused: Usage = field(default_factory=Usage)


class ToolLoop(RoundLoop):
    """Takes answers that call tools."""

    _problem = "its tools cannot be run"

    def __init__(self, tools: Sequence[Tool], max_rounds: int, inputs: InputProcessor, ask: Ask) -> None:
        """max_rounds: rounds of calls of one row, after which its model gets no tools"""
        super().__init__(inputs, ask, "cbatch-tool", NUM_THREADS)
        self._tools = {tool.name: tool for tool in tools}
        self._max_rounds = max_rounds
        self._conversations: dict[int, _Conversation] = {}

    def take(self, position: int, request: Request, completion: Completion) -> bool:
        talk = self._conversations.get(position)
        goes_on = completion.finish_reason == "tool_calls" and len(completion.choices) == 1
        if goes_on and request.tool_rounds > 0 and (talk is None or talk.num_rounds < self._max_rounds):
            if talk is None:
                self._conversations[position] = _Conversation(request)
            self._start(position, request, completion)
            return True
        if talk is not None:
            completion.usage, completion.reused = talk.usage + completion.usage, talk.reused + completion.reused
            completion.tool_messages = talk.messages
            del self._conversations[position]
        return False

    def _next(self, position: int, request: Request, completion: Completion) -> Request:
        """The row's next request, with the results of all calls."""
        talk = self._conversations[position]
        said = {
            "role": "assistant",
            "content": completion.text,
            "tool_calls": [call.to_dict() for call in completion.tool_calls],
        }
        talk.messages = [*talk.messages, said, *(self._result(call) for call in completion.tool_calls)]
        talk.num_rounds += 1
        talk.usage, talk.reused = talk.usage + completion.usage, talk.reused + completion.reused
        asked, is_last = talk.request, talk.num_rounds == self._max_rounds
        return self._inputs.encode(
            asked.following(
                messages=[*(asked.messages or ()), *talk.messages],
                tools=() if is_last else asked.tools,
                choice=None,
                seed=derive_seed(asked.seed, "round", talk.num_rounds),
            )
        )

    def _result(self, call: ToolCall) -> dict[str, Any]:
        """The message with the result of a call."""
        tool = self._tools.get(call.name)
        text = f"There is no tool {call.name}." if tool is None else tool.run(call.arguments, self._is_closed)
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
