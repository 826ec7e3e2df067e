"""Validates the answers of a batch, and asks again for those that are not good, as often as a row may try."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field, replace
from typing import Any

from cbatch.base.errors import RequestError
from cbatch.base.params import derive_seed
from cbatch.base.request import Request
from cbatch.batch.rounds.round_loop import Ask, RoundLoop
from cbatch.requests.completion import Choice, Completion, Usage
from cbatch.requests.input_processor import InputProcessor
from cbatch.validation.checker import Checker
from cbatch.validation.validation import Validation

NUM_THREADS = min(os.cpu_count() or 1, 4)
"""Answers that are checked at the same time."""

CORRECTION = "That answer is not valid: {error}. Give the whole answer again, without this error."


@dataclass(slots=True)
class _Tries:
    """The tries of a row so far.

    request:       the row's own, without tries
    number:        of the latest try; tries of earlier runs count
    messages:      answers and what was wrong with them, as messages, if the model is told
    usage, reused: of the tries that are over; see `Completion`
    """

    request: Request
    number: int
    errors: list[str] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    reused: Usage = field(default_factory=Usage)


class TryLoop(RoundLoop):
    """Takes answers to validate: all but errors and calls of tools."""

    _problem = "the answer cannot be checked"

    def __init__(self, validation: Validation, inputs: InputProcessor, ask: Ask) -> None:
        super().__init__(inputs, ask, "cbatch-validate", NUM_THREADS)
        self._validation = validation
        self._rows: dict[int, _Tries] = {}
        """The tries of rows that had more than one, by their position."""
        self._of_thread = threading.local()
        self._checkers: list[Checker] = []

    def take(self, position: int, request: Request, completion: Completion) -> bool:
        if completion.error is None and completion.finish_reason != "tool_calls":
            self._start(position, request, completion)
            return True
        if (tries := self._rows.pop(position, None)) is not None:
            completion.usage, completion.reused = tries.usage + completion.usage, tries.reused + completion.reused
        return False

    def close(self) -> None:
        super().close()
        for checker in list(self._checkers):
            checker.close()

    def _next(self, position: int, request: Request, completion: Completion) -> Request | Completion:
        """What follows on an answer: the row's next try, or its result."""
        wrong, error = self._first_error(completion)
        tries = self._rows.pop(position, None) or _Tries(request.first or request, request.tries + 1)
        tries.usage, tries.reused = tries.usage + completion.usage, tries.reused + completion.reused
        if error is not None:
            tries.errors.append(error)
            if (following := self._next_try(tries, wrong, completion)) is not None:
                self._rows[position] = tries
                return following
            completion.error = request.invalid(self._sentence(tries, error), "invalid_answer")
        completion.usage, completion.reused = tries.usage, tries.reused
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
            tries.messages += [dict(message) for message in completion.tool_messages]
            tries.messages += [{"role": "assistant", "content": wrong.text}, {"role": "user", "content": correction}]
        try:
            following = self._inputs.encode(nth_try(request, tries.number + 1, tries.messages))
            self._inputs.limits.max_new_tokens(len(following.prompt_ids))
        except RequestError:  # such as a conversation that has become too long: the last answer stands
            return None
        tries.number += 1
        return following

    def _sentence(self, tries: _Tries, error: str) -> str:
        if tries.number > 1:
            return f"no valid answer in {tries.number} tries; {error}"
        same = "; at temperature 0, another try gives the same" if self._validation.max_tries > 1 else ""
        return f"the answer is not valid: {error}{same if tries.request.params.greedy else ''}"

    def _first_error(self, completion: Completion) -> tuple[Choice, str | None]:
        """The first output that is not good, and why; or the first one."""
        checker = self._checker()
        for choice in completion.choices:
            if (error := checker.error_of(choice.text)) is not None:
                return choice, error
        return completion.choices[0], None

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
