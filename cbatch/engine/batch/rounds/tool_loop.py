"""Runs what a model calls in a batch, and asks it again with the results, until it answers or has had its rounds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from cbatch.engine.base.errors import RequestError
from cbatch.engine.base.outputs import ToolCall
from cbatch.engine.base.params import derive_seed
from cbatch.engine.requests.completion import Completion, Usage
from cbatch.engine.requests.input_processor import InputProcessor
from cbatch.engine.requests.request import EncodedRequest, GenerationRequest
from cbatch.engine.tools.tool import Tool

NUM_THREADS = 8
"""Calls that run at the same time."""


@dataclass(slots=True)
class _Conversation:
    """A row whose model calls tools.

    request:  what was asked last
    messages: the calls and results so far, in OpenAI's form
    usage, reused: of the rounds that are over; see `Completion`
    """

    request: GenerationRequest
    messages: list[dict[str, Any]] = field(default_factory=list)
    num_rounds: int = 0
    usage: Usage = field(default_factory=Usage)
    reused: Usage = field(default_factory=Usage)


class ToolLoop:
    """One for each batch. `take` belongs to the thread that reads results; tools run on threads of their own."""

    def __init__(
        self,
        tools: Sequence[Tool],
        max_rounds: int,
        inputs: InputProcessor,
        ask: Callable[[int, EncodedRequest | Completion, float], None],
    ) -> None:
        """
        max_rounds: rounds of calls of one row, after which its model gets no tools
        ask:        gets the position of a row, its next request or, if there can be none, its result, and when the row
                    was taken
        """
        self._tools = {tool.name: tool for tool in tools}
        self._max_rounds, self._inputs, self._ask = max_rounds, inputs, ask
        self._conversations: dict[int, _Conversation] = {}
        self._threads = ThreadPoolExecutor(NUM_THREADS, "cbatch-tool")
        self._is_closed = threading.Event()

    def take(self, position: int, request: EncodedRequest, completion: Completion) -> bool:
        """Takes a result that calls tools, and returns True; what else a model gives is the end of its row."""
        talk = self._conversations.get(position)
        goes_on = completion.finish_reason == "tool_calls" and len(completion.choices) == 1
        if goes_on and request.source.tool_rounds > 0 and (talk is None or talk.num_rounds < self._max_rounds):
            if talk is None:
                talk = self._conversations[position] = _Conversation(request.asked)
            if not self._is_closed.is_set():  # else the row stays unfinished
                self._threads.submit(self._run, position, talk, completion)
            return True
        if talk is not None:
            completion.usage, completion.reused = talk.usage + completion.usage, talk.reused + completion.reused
            completion.tool_messages = talk.messages
            del self._conversations[position]
        return False

    def close(self) -> None:
        """Ends the tools that run."""
        self._is_closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, position: int, talk: _Conversation, completion: Completion) -> None:
        try:
            following: EncodedRequest | Completion = self._next(talk, completion)
        except RequestError as error:
            following = self._failed(talk, completion, error)
        except Exception as unforeseen:  # a row that breaks something still ends
            reason = talk.request.source.invalid(f"its tools cannot be run: {unforeseen!r}", "internal_error")
            following = self._failed(talk, completion, reason)
        if not self._is_closed.is_set():
            self._ask(position, following, completion.timing.taken_at)

    def _next(self, talk: _Conversation, completion: Completion) -> EncodedRequest:
        """The row's next request, with the results of all calls."""
        said = {
            "role": "assistant",
            "content": completion.text,
            "tool_calls": [call.to_dict() for call in completion.tool_calls],
        }
        talk.messages = [*talk.messages, said, *(self._result(call) for call in completion.tool_calls)]
        talk.num_rounds += 1
        talk.usage, talk.reused = talk.usage + completion.usage, talk.reused + completion.reused
        request, is_last = talk.request, talk.num_rounds == self._max_rounds
        return self._inputs.encode(
            replace(
                request,
                messages=[*(request.messages or ()), *talk.messages],
                tools=() if is_last else request.tools,
                choice=None,
                known_ids=None,
                seed=derive_seed(request.seed, "round", talk.num_rounds),
            )
        )

    def _failed(self, talk: _Conversation, completion: Completion, error: RequestError) -> Completion:
        request = talk.request
        return Completion(request.source, key=request.key, error=error, timing=completion.timing)

    def _result(self, call: ToolCall) -> dict[str, Any]:
        """The message with the result of a call."""
        tool = self._tools.get(call.name)
        text = f"There is no tool {call.name}." if tool is None else tool.run(call.arguments, self._is_closed)
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
