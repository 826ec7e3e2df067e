"""Tries a grammar in a child process, so that one that takes forever or crashes the library does no harm.

The library limits most of its work itself. What is left is quadratic work before its limits apply, and recursion that
overflows the stack: a long chain of rules or references is enough. The child has less time, memory and stack than its
parent, so what passes there is safe here.

The child runs this file as a script, without the rest of the package.
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "verbose_errors": False}
"""The options of the library's LLParserLimits that differ from its defaults. A lexer state takes 1 to 2 kB."""

CPU_LIMIT = 2.0
"""Seconds of processor time for one grammar, so that a busy machine changes nothing. Real schemas take milliseconds."""

WALL_LIMIT = 60.0
"""Seconds of wall time, for a child that hangs without computing."""

MEMORY_LIMIT = 1 << 30
STACK = 1 << 20
"""Bytes. The parent's threads have several times as much."""

STEPS = 32
"""Length in tokens of the random output that is tried."""

TOO_COMPLEX = "It is too complex."
NO_MATCH = "No text can match it."

READY = "ready\n"


class Vocabulary:
    """A vocabulary in the library's form: the bytes of each token by id, empty for unused ids.

    The last id is an end token of our own, which no model has. It is allowed when the text may end.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int] = ()) -> None:
        self.tokens = [*tokens, b"<|end|>"]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [*special, self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of a text. The library asks for them only to force text, which is switched off."""
        return []


def is_dead_end(matcher: Any) -> bool:
    """Whether a matcher failed because no text can follow, and not because of a limit."""
    return str(matcher.get_error()).startswith("NoExtension")


class GrammarSandbox:
    """The child process that tries grammars. Thread-safe. The first grammar starts it; it stays for the next ones."""

    def __init__(self, library_folder: str, cpu_limit: float = CPU_LIMIT) -> None:
        """`library_folder`: the folder from which the library can be imported."""
        self._command = [sys.executable, "-I", "-S", __file__, library_folder, str(cpu_limit)]
        self._child: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def check(self, grammar: str) -> str | None:
        """What is wrong with a grammar of the library; None if nothing is.

        Raises OSError if the child cannot run at all.
        """
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                self._child = self._start()
            answer = _read_line(self._child, request=json.dumps(grammar) + "\n")
            if not answer.endswith("\n"):  # the child did not survive the grammar
                _kill(self._child)
                return TOO_COMPLEX
            return json.loads(answer) or None

    def close(self) -> None:
        with self._lock:
            if self._child is not None:
                _kill(self._child)

    def _start(self) -> subprocess.Popen[str]:
        # In a session of its own, so that Ctrl-C reaches only the parent, which shuts down in an orderly way.
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        child = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=null, text=True, start_new_session=True)
        weakref.finalize(self, _kill, child)
        if _read_line(child) != READY:
            _kill(child)
            raise OSError("the process that tries grammars did not start")
        return child


def _read_line(child: subprocess.Popen[str], request: str = "") -> str:
    """The child's next line, or what came of it if the child has ended."""
    assert child.stdin is not None and child.stdout is not None
    timer = threading.Timer(WALL_LIMIT, child.kill)
    timer.start()
    try:
        child.stdin.write(request)
        child.stdin.flush()
        return child.stdout.readline()
    except BrokenPipeError:
        return ""
    finally:
        timer.cancel()


def _kill(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(BrokenPipeError), child:  # the pipe may hold data that was not written yet
        child.kill()


def _serve(library_folder: str, cpu_limit: float) -> None:
    """Runs in the child: reads one grammar a line as a JSON string, and answers with one JSON string a line."""
    import resource

    sys.path.append(library_folder)
    import llguidance

    tokenizer = llguidance.LLTokenizer(Vocabulary([bytes([byte]) for byte in range(256)]))
    limits = llguidance.LLParserLimits(**LIMITS)
    make_matcher = partial(llguidance.LLMatcher, tokenizer, limits=limits, log_level=0)
    with contextlib.suppress(OSError, ValueError):  # without these limits, time and stack are bounded nevertheless
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK)
    thread = ThreadPoolExecutor(1)
    print(READY, end="", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, cpu_limit)  # its signal ends the process in any case
        found = thread.submit(_check, make_matcher, json.loads(line))
        answer = TOO_COMPLEX if found.exception() else found.result()
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


def _check(make_matcher: Callable[[str], Any], grammar: str) -> str:
    """What is wrong with a grammar; empty if nothing is."""
    matcher = make_matcher(grammar)
    if matcher.is_error():
        return matcher.get_error() or TOO_COMPLEX
    choose = random.Random(0)
    for step in range(STEPS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return NO_MATCH if step == 0 and is_dead_end(matcher) else TOO_COMPLEX
        allowed = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
        if not allowed:
            break
        if not matcher.consume_token(choose.choice(allowed)):
            return TOO_COMPLEX
    return ""


if __name__ == "__main__":
    _serve(sys.argv[1], float(sys.argv[2]))
