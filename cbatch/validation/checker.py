"""Checks answers one after the other; what may take long runs in processes of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from contextlib import suppress

from cbatch.tools.process import MAX_ERROR_CHARACTERS, run_process
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
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

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
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def _run(self, words: list[str], text: str) -> str | None:
        try:
            result = run_process(words, text.encode("utf-8", "replace"), self._validation.timeout_s, self._cancelled)
        except OSError as error:
            return f"the check {words[0]} cannot be run: {error.strerror}"
        if result.exit_code is None:
            return self._too_long
        return None if result.exit_code == 0 else result.last_words

    def _ask(self, number: int, text: str) -> str | None:
        process = self._process or self._start()
        answer = ""
        with suppress(BrokenPipeError):
            assert process.stdin is not None and process.stdout is not None
            print(json.dumps([number, text]), file=process.stdin, flush=True)
            answer = process.stdout.readline()
        if answer:
            error: str | None = json.loads(answer)
            return error
        with suppress(BrokenPipeError), process, self._lock:
            process.kill()
            self._process = None
        if process.returncode == -signal.SIGALRM:
            return self._too_long
        return f"the check ended without a result (exit code {process.returncode})"

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, child.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the run
        )
        given = [self._validation.timeout_s, [[check.kind, check.value] for check in self._in_child]]
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            print(json.dumps(given), file=process.stdin, flush=True)
        with self._lock:
            self._process = process
            if self._cancelled.is_set():
                process.kill()
        return process

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
