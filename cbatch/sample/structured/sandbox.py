"""Tries a grammar in a child process, so that one that takes forever or crashes the library does no harm.

The library limits most of its work itself. What is left is quadratic work before its limits apply, and recursion that
overflows the stack: a long chain of rules or references is enough. The child has less time, memory and stack than its
parent, so what passes there is safe here.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from cbatch.isolate.child import Limits
from cbatch.sample.structured.closing import bytes_in

LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "verbose_errors": False}
"""The options of the library's LLParserLimits that differ from its defaults. A lexer state takes 1 to 2 kB."""

TRIAL_LIMITS = Limits(memory=1 << 30, cpu_seconds=2.0)
"""For one grammar. Real schemas take milliseconds."""

STACK = 1 << 20
"""Bytes. The parent's threads have several times as much."""

STEPS = 32
"""Length in tokens of the random output that is tried."""

TOO_COMPLEX = "It is too complex."
NO_MATCH = "No text can match it."

SINGLE_BYTES = [bytes([byte]) for byte in range(256)]


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


class GrammarTrial:
    """The server in the child process, which tries grammars."""

    def __init__(self) -> None:
        import llguidance

        tokenizer = llguidance.LLTokenizer(Vocabulary(SINGLE_BYTES))
        limits = llguidance.LLParserLimits(**LIMITS)
        self._make_matcher = partial(llguidance.LLMatcher, tokenizer, limits=limits, log_level=0)
        threading.stack_size(STACK)
        self._thread = ThreadPoolExecutor(1)

    def check(self, grammar: str) -> str | None:
        """The fault of a grammar of the library; None if there is none."""
        found = self._thread.submit(self._check, grammar)
        return TOO_COMPLEX if found.exception() else found.result()

    def _check(self, grammar: str) -> str | None:
        matcher = self._make_matcher(grammar)
        if matcher.is_error():
            return matcher.get_error() or TOO_COMPLEX
        choose = random.Random(0)
        for step in range(STEPS):
            mask = matcher.compute_bitmask()
            if matcher.is_error():
                return NO_MATCH if step == 0 and is_dead_end(matcher) else TOO_COMPLEX
            allowed = bytes_in(mask)
            if not allowed:
                break
            if not matcher.consume_token(choose.choice(allowed)):
                return TOO_COMPLEX
        return None
