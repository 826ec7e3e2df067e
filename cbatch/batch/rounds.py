"""The next request after an answer that is not the end of its row: results of tools, and further tries."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from cbatch.base.errors import RequestError, as_error
from cbatch.base.outputs import ToolCall
from cbatch.base.params import derive_seed
from cbatch.base.request import Request
from cbatch.batch.row import Row
from cbatch.requests.completion import Choice, Completion
from cbatch.requests.input_processor import InputProcessor
from cbatch.tools.tool import Tool
from cbatch.validation.validation import Checker, Validation

Ask = Callable[[Row, Request | Completion], None]
"""Goes on with a row: takes its next request, or its result."""

NUM_CALLS = 8
"""Calls of tools that run at the same time."""

NUM_CHECKS = min(os.cpu_count() or 1, 4)
"""Answers that are checked at the same time."""

CORRECTION = "That answer is not valid: {error}. Give the whole answer again, without this error."


class RoundLoop(ABC):
    """One for each batch. `take` belongs to the thread that reads results; `_next` runs on threads of their own.

    After `close`, rows stay unfinished.
    """

    _problem: str
    """The beginning of the error of a row if `_next` breaks."""

    def __init__(self, inputs: InputProcessor, ask: Ask, name: str, num_threads: int) -> None:
        """name: of the threads, of which so many work at the same time"""
        self._inputs, self._ask = inputs, ask
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._is_closed = threading.Event()

    @abstractmethod
    def take(self, row: Row, completion: Completion) -> bool:
        """Takes an answer that may not be the end of its row, and returns True; others are left as the row's result."""

    @abstractmethod
    def _next(self, row: Row, completion: Completion) -> Request | Completion:
        """The row's next request after an answer, or its result. A RequestError is a result, too."""

    def close(self) -> None:
        """Ends what runs."""
        self._is_closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, row: Row, completion: Completion) -> None:
        if not self._is_closed.is_set():
            self._threads.submit(self._run, row, completion)

    def _run(self, row: Row, completion: Completion) -> None:
        request = row.request
        try:
            following = self._next(row, completion)
        except BaseException as raised:  # a row that breaks something still ends
            if not isinstance(raised, RequestError):
                raised = request.invalid(f"{self._problem}: {as_error(raised)!r}", "internal_error")
            following = Completion(request, error=raised, timing=completion.timing)
        if not self._is_closed.is_set():
            self._ask(row, following)


@dataclass(slots=True)
class _Conversation:
    """A row whose model calls tools.

    request:  what was asked first
    messages: the calls and results so far, in OpenAI's form
    """

    request: Request
    messages: list[dict[str, Any]] = field(default_factory=list)
    num_rounds: int = 0


class ToolLoop(RoundLoop):
    """Runs what a model calls, and asks it again with the results, until it answers or has had its rounds."""

    _problem = "its tools cannot be run"

    def __init__(self, tools: Sequence[Tool], max_rounds: int, inputs: InputProcessor, ask: Ask) -> None:
        """max_rounds: rounds of calls of one row, after which its model gets no tools"""
        super().__init__(inputs, ask, "cbatch-tool", NUM_CALLS)
        self._tools = {tool.name: tool for tool in tools}
        self._max_rounds = max_rounds
        self._conversations: dict[int, _Conversation] = {}
        """By the position of the row."""

    def take(self, row: Row, completion: Completion) -> bool:
        talk = self._conversations.get(row.position)
        goes_on = completion.finish_reason == "tool_calls" and len(completion.choices) == 1
        if goes_on and row.request.tool_rounds > 0 and (talk is None or talk.num_rounds < self._max_rounds):
            if talk is None:
                self._conversations[row.position] = _Conversation(row.request)
            self._start(row, completion)
            return True
        if talk is not None:
            completion.tool_messages = talk.messages
            del self._conversations[row.position]
        return False

    def _next(self, row: Row, completion: Completion) -> Request:
        """The row's next request, with the results of all calls."""
        talk = self._conversations[row.position]
        said = {
            "role": "assistant",
            "content": completion.text,
            "tool_calls": [call.to_dict() for call in completion.tool_calls],
        }
        talk.messages = [*talk.messages, said, *(self._result(call) for call in completion.tool_calls)]
        talk.num_rounds += 1
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


@dataclass(slots=True)
class _Tries:
    """The tries of a row so far.

    request:  the row's own, without tries
    number:   of the latest try; tries of earlier runs count
    messages: answers and what was wrong with them, as messages, if the model is told
    """

    request: Request
    number: int
    errors: list[str] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)


class TryLoop(RoundLoop):
    """Validates answers, and asks again for those that are not good, as often as a row may try.

    Takes all answers but errors and calls of tools.
    """

    _problem = "the answer cannot be checked"

    def __init__(self, validation: Validation, inputs: InputProcessor, ask: Ask) -> None:
        super().__init__(inputs, ask, "cbatch-validate", NUM_CHECKS)
        self._validation = validation
        self._rows: dict[int, _Tries] = {}
        """The tries of rows that had more than one, by their position."""
        self._of_thread = threading.local()
        self._checkers: list[Checker] = []

    def take(self, row: Row, completion: Completion) -> bool:
        if completion.error is None and completion.finish_reason != "tool_calls":
            self._start(row, completion)
            return True
        self._rows.pop(row.position, None)
        return False

    def close(self) -> None:
        super().close()
        for checker in list(self._checkers):
            checker.close()

    def _next(self, row: Row, completion: Completion) -> Request | Completion:
        """The row's next try after an answer, or its result."""
        checker, request = self._checker(), row.request
        wrong, error = completion.choices[0], None
        for choice in completion.choices:
            if (error := checker.error_of(choice.text)) is not None:
                wrong = choice
                break
        tries = self._rows.pop(row.position, None) or _Tries(request.first or request, request.tries + 1)
        if error is not None:
            tries.errors.append(error)
            if (following := self._next_try(tries, wrong, completion)) is not None:
                self._rows[row.position] = tries
                return following
            may_try = self._validation.max_tries > 1 and tries.request.params.greedy
            same = "; at temperature 0, another try gives the same" if may_try else ""
            reason = f"no valid answer in {tries.number} tries; {error}"
            if tries.number == 1:
                reason = f"the answer is not valid: {error}{same}"
            completion.error = request.invalid(reason, "invalid_answer")
        completion.validation = {"valid": error is None, "tries": tries.number, "errors": tries.errors}
        if error is not None:
            completion.validation["text"] = wrong.text
        return completion

    def _next_try(self, tries: _Tries, wrong: Choice, completion: Completion) -> Request | None:
        """The request of the next try; None if there is none, or it could give nothing else than the one before."""
        request = tries.request
        if tries.number - request.tries >= self._validation.max_tries:
            return None
        is_told = self._validation.tells_error and request.messages is not None and request.template.begins_new_message
        if request.params.greedy and not is_told:
            return None
        if is_told:
            correction = CORRECTION.format(error=tries.errors[-1])
            tries.messages += map(dict, completion.tool_messages)
            tries.messages += [{"role": "assistant", "content": wrong.text}, {"role": "user", "content": correction}]
        try:
            following = self._inputs.encode(nth_try(request, tries.number + 1, tries.messages))
            self._inputs.limits.max_new_tokens(len(following.prompt_ids))
        except RequestError:  # such as a conversation that has become too long: the last answer stands
            return None
        tries.number += 1
        return following

    def _checker(self) -> Checker:
        """That of this thread."""
        checker: Checker | None = getattr(self._of_thread, "checker", None)
        if checker is None:
            checker = self._of_thread.checker = Checker(self._validation, self._is_closed)
            self._checkers.append(checker)
        return checker


def nth_try(request: Request, number: int, messages: list[dict[str, Any]]) -> Request:
    """A try of a row: its randomness is a function of the row's seed and the number of the try.

    messages: added to the conversation
    """
    seed = request.seed if number == 1 else derive_seed(request.seed, "try", number)
    changes = {"messages": [*(request.messages or ()), *messages]} if messages else {}
    return request.following(params=replace(request.params, seed=None), seed=seed, **changes)
