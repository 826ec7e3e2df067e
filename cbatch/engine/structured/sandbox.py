"""Tries a grammar in a child process, so that one that takes for ever, or breaks the library, harms nobody.

The library bounds most of its work by limits of its own. What is left is quadratic work before they count, and
recursion that ends a process where the stack does: a long chain of rules or references is enough. The child has
less time, memory and stack than its parent has, so what passes there is safe here.

This file is also what the child runs, with nothing of this package around it.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import IO, Any

LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "verbose_errors": False}
"""Options of the library's LLParserLimits that are not its defaults. A lexer state takes 1 to 2 kB."""

CPU_LIMIT = 2.0
"""Seconds of processor time for one trial: real schemas take milliseconds, and a busy machine changes nothing."""

WALL_LIMIT = 60.0
"""Seconds on the clock, for a child that hangs without computing."""

MEMORY_LIMIT = 1 << 30
STACK = 1 << 20
"""Bytes. Threads of the parent have a multiple of this stack."""

STEPS = 32
"""Tokens of the random output that is tried."""

TOO_COMPLEX = "It is too complex."
NO_MATCH = "No text can match it."

READY = b"ready\n"


class Vocabulary:
    """A vocabulary as the library takes it: tokens as bytes by id, empty for ids that are none.

    The last id is an end token of our own, which no model has: it is allowed where the text may end.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int] = ()) -> None:
        self.tokens = [*tokens, b"<|end|>"]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [*special, self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of a text. The library asks for them only where it forces text, which we switch off."""
        return []


def is_dead_end(matcher: Any) -> bool:
    """Whether a matcher of the library failed because no text can follow, not at a limit."""
    return str(matcher.get_error()).startswith("NoExtension")


class GrammarSandbox:
    """The child and what is said to it; thread-safe. It starts with the first grammar and stays for the next ones."""

    def __init__(self, library_folder: str, cpu_limit: float = CPU_LIMIT) -> None:
        """`library_folder`: where the library can be imported from."""
        self._command = [sys.executable, "-I", "-S", __file__, library_folder, str(cpu_limit)]
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def check(self, grammar: str) -> str | None:
        """What is wrong with a grammar in the library's language; None where nothing is.

        Raises OSError where the child cannot run at all.
        """
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                self._child = self._start()
            answer = _ask(self._child, grammar)
            if answer is None:
                self._child = None
                return TOO_COMPLEX
            return answer or None

    def close(self) -> None:
        with self._lock:
            if self._child is not None:
                _end(self._child)
            self._child = None

    def _start(self) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C is for the parent, which may want to end in good order.
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        child = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=null, start_new_session=True)
        weakref.finalize(self, _end, child)
        if _read_line(child) != READY:
            _end(child)
            raise OSError("the process that tries grammars did not start")
        return child


def _ask(child: subprocess.Popen[bytes], grammar: str) -> str | None:
    """The child's answer, empty for a good grammar; None where the child did not survive it."""
    assert child.stdin is not None
    try:
        child.stdin.write(json.dumps(grammar).encode() + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        line = b""
    else:
        line = _read_line(child)
    if not line.endswith(b"\n"):
        _end(child)
        return None
    return str(json.loads(line))


def _read_line(child: subprocess.Popen[bytes]) -> bytes:
    assert child.stdout is not None
    timer = threading.Timer(WALL_LIMIT, child.kill)
    timer.start()
    try:
        return child.stdout.readline()
    finally:
        timer.cancel()


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # of what was still to be written
                pipe.close()


def _serve(requests: IO[bytes], answers: IO[bytes], library_folder: str, cpu_limit: float) -> None:
    """The child: one JSON string a line in, one out."""
    import resource

    sys.path.append(library_folder)
    import llguidance

    tokenizer = llguidance.LLTokenizer(Vocabulary([bytes([byte]) for byte in range(256)]))
    limits = llguidance.LLParserLimits(**LIMITS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (OSError, ValueError):
        pass  # a system without these limits; time and stack are bounded all the same
    threading.stack_size(STACK)
    answers.write(READY)
    answers.flush()
    for line in requests:
        found: list[str] = []
        signal.setitimer(signal.ITIMER_PROF, cpu_limit)  # its signal ends the process, whatever it is doing
        thread = threading.Thread(target=_try, args=(llguidance, tokenizer, limits, json.loads(line), found))
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(found[0] if found else TOO_COMPLEX).encode() + b"\n")
        answers.flush()


def _try(llguidance: Any, tokenizer: Any, limits: Any, grammar: str, found: list[str]) -> None:
    matcher = llguidance.LLMatcher(tokenizer, grammar, limits=limits, log_level=0)
    if matcher.is_error():
        found.append(matcher.get_error() or TOO_COMPLEX)
        return
    choose = random.Random(0)
    for step in range(STEPS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            found.append(NO_MATCH if step == 0 and is_dead_end(matcher) else TOO_COMPLEX)
            return
        allowed = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
        if not allowed:
            break
        if not matcher.consume_token(choose.choice(allowed)):
            found.append(TOO_COMPLEX)
            return
    found.append("")


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer, sys.argv[1], float(sys.argv[2]))
