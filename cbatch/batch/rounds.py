"""The next request after an answer that is not the end of its row: results of tools, and further tries."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from cbatch.base.errors import RequestError, as_error
from cbatch.base.outputs import ToolCall
from cbatch.base.params import derive_seed
from cbatch.base.request import Request
from cbatch.batch.lines import RowOptions
from cbatch.batch.row import Row
from cbatch.requests.completion import Choice, Completion
from cbatch.requests.input_processor import InputProcessor
from cbatch.runtime.processors import read_processors
from cbatch.tools.tool import NUM_CALLS
from cbatch.validation.validation import Checker, Validation

MOST_CHECKS = 4
"""Answers that are checked at the same time, in a batch without tools; at most one on each core."""

CORRECTION = "That answer is not valid: {error}. Give the whole answer again, without this error."

Dialog = Generator[Request, Completion, Completion]
"""Yields the requests of a row, one after the other, takes the answers to them, and returns the row's result."""


class Rounds:
    """Runs what models call, and validates answers, on threads of its own; one for each batch.

    The thread that reads results calls `take` and `close`. After `close`, rows stay unfinished.
    """

    def __init__(
        self, options: RowOptions, inputs: InputProcessor, ask: Callable[[Row, Request | Completion], None]
    ) -> None:
        """`ask`: goes on with a row: takes its next request, or its result"""
        self._inputs, self._ask = inputs, ask
        self._tools = {tool.name: tool for tool in options.tools}
        self._validation = options.validation
        num_threads, name = NUM_CALLS, "cbatch-tool"
        if not self._tools:
            num_threads, name = min(read_processors().num_threads, MOST_CHECKS), "cbatch-validate"
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._is_closed = threading.Event()
        self._dialogs: dict[int, Dialog] = {}
        """By the position of the row."""
        self._of_thread = threading.local()
        self._checkers: list[Checker] = []

    def take(self, row: Row, completion: Completion) -> bool:
        """Takes an answer that may not be the end of its row, and returns True; others are left as the row's result."""
        may_go_on = _calls_tools(row.request, completion) or (self._validation is not None and not completion.error)
        if row.position not in self._dialogs:
            if not may_go_on:
                return False
            dialog = self._dialogs[row.position] = self._dialog(row.request)
            next(dialog)
        if not self._is_closed.is_set():
            self._threads.submit(self._go_on, row, completion)
        return True

    def close(self) -> None:
        """Ends what runs."""
        self._is_closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for checker in list(self._checkers):
            checker.close()

    def _go_on(self, row: Row, completion: Completion) -> None:
        try:
            following: Request | Completion = self._dialogs[row.position].send(completion)
        except StopIteration as end:
            following = end.value
        except BaseException as raised:  # a row that breaks something still ends
            if not isinstance(raised, RequestError):
                reason = f"its tools cannot be run, or its answer cannot be checked: {as_error(raised)!r}"
                raised = row.request.invalid(reason, "internal_error")
            following = Completion(row.request, error=raised, timing=completion.timing)
        if isinstance(following, Completion):
            del self._dialogs[row.position]
        if not self._is_closed.is_set():
            self._ask(row, following)

    def _dialog(self, request: Request) -> Dialog:
        """Asks until an answer is good, if answers are validated, or the row may not try again."""
        completion = yield from self._conversation(request)
        if (validation := self._validation) is None:
            return completion
        own, number = request.first or request, request.tries + 1  # tries of earlier runs count
        errors: list[str] = []
        corrections: list[dict[str, Any]] = []
        while completion.error is None and completion.finish_reason != "tool_calls":
            wrong, error = self._first_error(completion)
            if error is None:
                completion.validation = {"valid": True, "tries": number, "errors": errors}
                break
            errors.append(error)
            if validation.tells_error and own.messages is not None and own.template.begins_new_message:
                corrections += map(dict, completion.tool_messages)
                told = CORRECTION.format(error=error)
                corrections += [{"role": "assistant", "content": wrong.text}, {"role": "user", "content": told}]
            if (following := self._next_try(validation, own, number, corrections)) is None:
                reason = f"no valid answer in {number} tries; {error}"
                if number == 1:
                    completion.is_last_try = validation.max_tries > 1 and own.params.greedy and not corrections
                    same = "; at temperature 0, another try gives the same" if completion.is_last_try else ""
                    reason = f"the answer is not valid: {error}{same}"
                completion.error = request.invalid(reason, "invalid_answer")
                completion.validation = {"valid": False, "tries": number, "errors": errors, "text": wrong.text}
                break
            number += 1
            completion = yield from self._conversation(following)
        return completion

    def _next_try(
        self, validation: Validation, own: Request, number: int, corrections: list[dict[str, Any]]
    ) -> Request | None:
        """The request of the next try; None if there is none, or it could give nothing else than the one before."""
        if number - own.tries >= validation.max_tries or (own.params.greedy and not corrections):
            return None
        try:
            following = self._inputs.encode(nth_try(own, number + 1, corrections))
            self._inputs.limits.max_new_tokens(len(following.prompt_ids))
        except RequestError:  # such as a conversation that has become too long: the last answer stands
            return None
        return following

    def _first_error(self, completion: Completion) -> tuple[Choice, str | None]:
        """The first output that is not good, and why; None if all are good."""
        checker: Checker | None = getattr(self._of_thread, "checker", None)
        if checker is None:
            assert self._validation is not None
            checker = self._of_thread.checker = Checker(self._validation, self._is_closed)
            self._checkers.append(checker)
        for choice in completion.choices:
            if (error := checker.error_of(choice.text)) is not None:
                is_cut = choice.finish_reason == "length" and not choice.closed
                return choice, f"{error}; it was cut off at max_tokens" if is_cut else error
        return completion.choices[0], None

    def _conversation(self, asked: Request) -> Dialog:
        """Runs what the model calls, and asks it again with the results, until it answers or has had its rounds."""
        completion = yield asked
        messages: list[dict[str, Any]] = []
        for number in range(1, asked.tool_rounds + 1):
            if not _calls_tools(asked, completion):
                break
            calls = [call.to_dict() for call in completion.tool_calls]
            messages.append({"role": "assistant", "content": completion.text, "tool_calls": calls})
            messages += map(self._result, completion.tool_calls)
            completion = yield self._inputs.encode(
                asked.following(
                    messages=[*(asked.messages or ()), *messages],
                    tools=() if number == asked.tool_rounds else asked.tools,
                    choice=None,
                    seed=derive_seed(asked.seed, "round", number),
                )
            )
        if messages:
            completion.tool_messages = messages
        return completion

    def _result(self, call: ToolCall) -> dict[str, Any]:
        tool = self._tools.get(call.name)
        text = f"There is no tool {call.name}." if tool is None else tool.run(call.arguments, self._is_closed)
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}


def _calls_tools(request: Request, completion: Completion) -> bool:
    return completion.finish_reason == "tool_calls" and len(completion.choices) == 1 and request.tool_rounds > 0


def nth_try(request: Request, number: int, messages: list[dict[str, Any]]) -> Request:
    """A try of a row: its randomness is a function of the row's seed and the number of the try.

    messages: added to the conversation
    """
    seed = request.seed if number == 1 else derive_seed(request.seed, "try", number)
    changes = {"messages": [*(request.messages or ()), *messages]} if messages else {}
    return request.following(params=replace(request.params, seed=None), seed=seed, **changes)
