"""Checks answers one after the other; what may take long runs in processes of its own."""

from __future__ import annotations

import json
import threading

from cbatch.isolate.child import Limits
from cbatch.isolate.process import MAX_ERROR_CHARACTERS, run_process
from cbatch.isolate.sandbox import Sandbox
from cbatch.isolate.worker import WorkerDied, WorkerFailed
from cbatch.validation import child
from cbatch.validation.validation import Check, Validation


class Checker:
    """Belongs to one thread, except `close`.

    Patterns and schemas can take for ever, and the interpreter could do nothing else meanwhile, so they run in a
    process that is kept for the next answer.
    """

    def __init__(self, validation: Validation, cancelled: threading.Event) -> None:
        """`cancelled`: ends commands when it is set."""
        self._validation, self._cancelled = validation, cancelled
        self._in_child = [check for check in validation.checks if check.kind in child.CHECKS]
        checks = [(check.kind, check.value) for check in self._in_child]
        limits = Limits(wall_seconds=validation.timeout_s)
        self.sandbox = Sandbox("cbatch.validation.child:Checks", checks, limits=limits)

    def error_of(self, text: str) -> str | None:
        """Why an answer is not good, in a sentence without a full stop; None if it is."""
        for check in self._validation.checks:
            if check.kind == "command":
                error = self._run(json.loads(check.value), text)
            elif check.function is not None:
                error = _call(check, text)
            else:
                error = self._ask(self._in_child.index(check), text)
            if error is not None:
                return " ".join(error.split())[:MAX_ERROR_CHARACTERS].rstrip(". ")
        return None

    def close(self) -> None:
        """Ends the process, and with it a check that runs. May be called on any thread."""
        self.sandbox.close()

    def _run(self, words: list[str], text: str) -> str | None:
        try:
            result = run_process(words, text.encode("utf-8", "replace"), self._validation.timeout_s, self._cancelled)
        except OSError as error:
            return f"the check {words[0]} cannot be run: {error.strerror}"
        if result.exit_code is None:
            return self._too_long
        return None if result.exit_code == 0 else result.last_words

    def _ask(self, number: int, text: str) -> str | None:
        try:
            error: str | None = self.sandbox.call("error_of", number, text)
        except WorkerDied as died:
            error = self._too_long if died.is_late else f"the check ended without a result (exit code {died.code})"
        except (WorkerFailed, OSError) as failed:
            error = f"the check ended without a result ({failed})"
        return error

    @property
    def _too_long(self) -> str:
        return f"its check took more than {self._validation.timeout_s:g} s"


def _call(check: Check, text: str) -> str | None:
    assert check.function is not None
    try:
        found = check.function(text)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if found is False:
        return f"{check.value.rpartition('.')[2]} refuses it"
    return found if isinstance(found, str) else None
