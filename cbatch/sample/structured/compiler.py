"""Compiles constraints on outputs: JSON, JSON schemas, patterns, choices, grammars and calls of tools.

The library is llguidance: an Earley parser over derivatives of regexes that works on the bytes of tokens. It builds its
automata as the output needs them, so compiling is quick. It counts its work against limits, releases the GIL, and
refuses keywords of JSON Schema that it does not know, which other libraries ignore silently.

Three things bound what a pattern can cost. A child process tries it first (see `sandbox`). The library's own limits end
a step. A step that takes too long all the same costs its request and a thread, but not the engine (see `masks`).
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

from cbatch.base.errors import RequestError, invalid_row
from cbatch.base.params import Constraint
from cbatch.extras import missing_package
from cbatch.isolate.sandbox import Sandbox
from cbatch.isolate.worker import WorkerFailed
from cbatch.sample.structured.call_rules import ToolCallGrammar
from cbatch.sample.structured.grammar import CompiledGrammar
from cbatch.sample.structured.lark import check_source, constraint_error, to_lark
from cbatch.sample.structured.sandbox import LIMITS, SINGLE_BYTES, TOO_COMPLEX, TRIAL_LIMITS, Vocabulary
from cbatch.text.tokenizer import ChatTokenizer

CACHE_SIZE = 128
SOURCE_PER_TOKEN, LEAST_GROWTH = 8, 16
"""Characters of a schema for one token of its shortest JSON, and what any form may grow by."""

TRIAL = "cbatch.sample.structured.sandbox:GrammarTrial"


class ConstraintCompiler:
    """Compiles constraints for one model. Thread-safe. The library is imported for the first one."""

    def __init__(self, tokenizer: ChatTokenizer, vocab_size: int) -> None:
        """`vocab_size`: width of the model's logits, which may differ from the tokenizer's vocabulary."""
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._compiling = threading.Lock()
        self._known: WeakValueDictionary[Constraint, CompiledGrammar | RequestError] = WeakValueDictionary()
        self._recent = lru_cache(CACHE_SIZE)(self._known.__getitem__)  # keeps them; raises KeyError for unknown ones
        self._sandbox = Sandbox(TRIAL, limits=TRIAL_LIMITS)
        self._library: Any = None

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """The grammar of a constraint. Returns at once for a recent one, and for one that is still in use.

        Raises RequestError (`invalid_row`) if the constraint is invalid or too complex, if the library does not support
        it or the tokenizer, or if the library is not installed.
        """
        try:
            known = self._recent(constraint)
        except KeyError:
            with self._compiling:  # of several threads with the same constraint, one compiles it
                found = self._known.get(constraint)
                self._known[constraint] = known = self._compile(constraint) if found is None else found
            self._recent(constraint)
        if isinstance(known, RequestError):
            raise RequestError(known.code, str(known))
        return known

    def close(self) -> None:
        """Ends the child process that tries constraints. Nothing can be compiled any more."""
        self._sandbox.close()

    def _compile(self, constraint: Constraint) -> CompiledGrammar | RequestError:
        if self._library is None:
            self._load()
        try:
            grammar = self._checked_grammar(constraint)
        except RequestError as error:  # a new one: a raised error is kept with the frames of its callers
            return RequestError(error.code, str(error))
        except OSError as error:
            raise RequestError("internal_error", f"Structured output cannot be checked: {error}.") from error
        limits = self._library.LLParserLimits(**LIMITS)
        matcher = self._library.LLMatcher(self._vocabulary, grammar, limits=limits, log_level=0)
        if matcher.is_error():
            return constraint_error(constraint, matcher.get_error())
        byte_matcher = self._library.LLMatcher(self._bytes, grammar, limits=limits, log_level=0)
        return CompiledGrammar(
            matcher,
            None if constraint.kind == "tool_call" or byte_matcher.is_error() else byte_matcher,
            self.vocab_size,
            self._tokens,
            self._model_tokenizer,
            len(constraint.source) // SOURCE_PER_TOKEN + LEAST_GROWTH,
        )

    def _checked_grammar(self, constraint: Constraint) -> str:
        if constraint.kind != "tool_call":
            grammar = to_lark(constraint)
            self._check(constraint, grammar)
            return grammar
        check_source(constraint)
        calls = ToolCallGrammar(constraint)  # the child process knows no special tokens
        for name, grammar in calls.argument_grammars():
            self._check(constraint, grammar, f"The JSON schema of the tool {name!r}")
        self._check(constraint, calls.to_lark())
        ids = self._tokenizer.backend.token_to_id
        # A grammar matches special tokens only by their ids; the library takes `<name>` for special, too.
        known = ToolCallGrammar(constraint, lambda tag: token if (token := ids(tag)) in self._special else None)
        return known.to_lark()

    def _check(self, constraint: Constraint, grammar: str, part: str = "") -> None:
        try:
            wrong = self._sandbox.call("check", grammar)
        except WorkerFailed:
            wrong = TOO_COMPLEX
        if wrong:
            raise constraint_error(constraint, wrong, part)

    def _load(self) -> None:
        try:
            import llguidance
        except ImportError:
            raise invalid_row(missing_package("llguidance")) from None
        try:
            known = llguidance.LLTokenizer(self._tokenizer.backend.to_str())
        except ValueError as error:
            raise invalid_row(f"Structured output does not know this model's kind of tokenizer: {error}") from error
        self._special = [token for token in range(known.vocab_size) if known.is_special_token(token)]
        tokens = [known.decode_bytes([token]) for token in range(known.vocab_size)]
        tokens += [b""] * (self.vocab_size - len(tokens))
        self._tokens = tokens
        self._vocabulary = llguidance.LLTokenizer(Vocabulary(tokens, self._special))
        self._bytes = llguidance.LLTokenizer(Vocabulary(SINGLE_BYTES))
        self._model_tokenizer = known
        self._library = llguidance
