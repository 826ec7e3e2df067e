"""Output that keeps to a form: which tokens may come next, for JSON, schemas, patterns, choices and grammars.

The library is llguidance. It works on the tokens' bytes with an Earley parser over derivatives of regexes, builds
its automata as the output needs them, so that compiling is quick, counts its work against limits, lets other threads
run meanwhile, and refuses what it does not know of JSON Schema, where others leave it out in silence.

Three things bound what a pattern can cost. A child process tries it first (see `structured_trial`); the library's
limits end a step; and a step that takes too long all the same costs its request, and a thread, but not the engine.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from cbatch.engine.base.constraint import Constraint, Kind, invalid, to_lark
from cbatch.engine.base.errors import RequestError
from cbatch.engine.structured.grammar import FAILED, Grammar, Guide
from cbatch.engine.structured.sandbox import LIMITS, GrammarTrial, Vocabulary
from cbatch.engine.text.tokenizer import ChatTokenizer

__all__ = ["Constraint", "Constraints", "Grammar", "Guide", "Kind", "MaskFiller", "Masks", "fill"]

CACHE_SIZE = 128
STEP_LIMIT = 5.0
"""Seconds that one request's mask may take; real ones take milliseconds."""

MISSING = "Structured output needs the extra: pip install 'cbatch[structured]'."


class Constraints:
    """Compiles constraints for one model; thread-safe. The library is imported when the first one comes."""

    def __init__(self, tokenizer: ChatTokenizer, vocab_size: int) -> None:
        """`vocab_size`: width of the model's logits, which may differ from the tokenizer's vocabulary."""
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        self._cache: OrderedDict[Constraint, Grammar | str] = OrderedDict()
        self._in_use: WeakValueDictionary[Constraint, Grammar] = WeakValueDictionary()
        self._trial: GrammarTrial | None = None
        self._library: Any = None

    def compile(self, constraint: Constraint) -> Grammar:
        """The grammar of a constraint, at once where it is known: one of the last, or one that is still in use.

        Raises RequestError (`invalid_row`) for a constraint that is wrong, too complex, or asks for what the
        library does not know; for a tokenizer that it does not know; and where the library is not installed.
        """
        known = self._find(constraint)
        if known is None:
            with self._compiling:  # of several that want the same, one compiles
                known = self._find(constraint) or self._compile(constraint)
            self._keep(constraint, known)
        if isinstance(known, str):
            raise RequestError("invalid_row", known)
        return known

    def _find(self, constraint: Constraint) -> Grammar | str | None:
        with self._lock:
            if constraint in self._cache:
                self._cache.move_to_end(constraint)
                return self._cache[constraint]
            return self._in_use.get(constraint)

    def _keep(self, constraint: Constraint, known: Grammar | str) -> None:
        with self._lock:
            self._cache[constraint] = known
            if isinstance(known, Grammar):
                self._in_use[constraint] = known
            if len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)

    def close(self) -> None:
        """Ends the child process that tries constraints; another one comes where another one is needed."""
        if self._trial is not None:
            self._trial.close()

    def _compile(self, constraint: Constraint) -> Grammar | str:
        self._load()
        try:
            grammar = to_lark(constraint)
            assert self._trial is not None
            wrong = self._trial.check(grammar)
        except RequestError as error:
            return str(error)
        except OSError as error:
            raise RequestError("internal_error", f"Structured output cannot be checked: {error}.") from error
        if wrong:
            return str(invalid(constraint, wrong))
        limits = self._library.LLParserLimits(**LIMITS)
        matcher = self._library.LLMatcher(self._vocabulary, grammar, limits=limits, log_level=0)
        if matcher.is_error():
            return str(invalid(constraint, matcher.get_error()))
        return Grammar(matcher, self.vocab_size)

    def _load(self) -> None:
        """Imports the library and gives it the vocabulary, once."""
        if self._library is not None:
            return
        try:
            import llguidance
        except ImportError:
            raise RequestError("invalid_row", MISSING) from None
        try:
            known = llguidance.LLTokenizer(self._tokenizer.backend.to_str())
        except ValueError as error:
            raise RequestError(
                "invalid_row", f"Structured output does not know this model's kind of tokenizer: {error}"
            ) from error
        ids = range(known.vocab_size)
        special = [token for token in ids if known.is_special_token(token)]
        tokens = [known.decode_bytes([token]) for token in ids]
        tokens += [b""] * (self.vocab_size - len(tokens))
        self._vocabulary = llguidance.LLTokenizer(Vocabulary(tokens, special))
        self._trial = GrammarTrial(str(Path(llguidance.__file__).parent.parent))
        self._library = llguidance


class Masks(NamedTuple):
    """What may come next for G guides.

    allowed  [G, V] bool, on the CPU; all true in the row of a guide that failed
    errors   for each guide a sentence, or None; it is the guide's `error` from then on
    """

    allowed: Tensor
    errors: list[str | None]


class _Job:
    """The masks of one step, which several threads fill."""

    def __init__(self, guides: Sequence[Guide]) -> None:
        self.guides = guides
        self.allowed = np.ones((len(guides), guides[0].vocab_size if guides else 0), dtype=np.bool_)
        self.is_done = threading.Event()
        self._lock = threading.Lock()
        self._begun: dict[int, float] = {}
        self._waited = 0.0
        self._next = 0
        self._num_left = len(guides)
        if not guides:
            self.is_done.set()

    def run(self) -> bool:
        """Fills until nothing is left to take; False where one took so long that nobody waits for this thread."""
        while (index := self._take()) is not None:
            guide = self.guides[index]
            row = np.empty(self.allowed.shape[1], dtype=np.bool_)
            try:
                error = guide.error or guide.fill(row)
            except BaseException as raised:  # a panic of the library is no Exception
                error = f"{FAILED}{raised!r}"
            if not self._finish(index, row, error):
                return False
        return True

    def give_up(self, waited: float, limit: float) -> int:
        """Fails the guides that have been taking longer than `limit` seconds, and returns how many.

        waited: seconds that somebody has waited since the last call; no clock, which goes on for a stopped process
        """
        with self._lock:
            self._waited += waited
            late = [index for index, begun in self._begun.items() if self._waited - begun > limit]
            for index in late:
                self._close(index, f"{FAILED}the step took longer than {limit:g} s.")
        return len(late)

    def result(self) -> Masks:
        return Masks(torch.from_numpy(self.allowed), [guide.error for guide in self.guides])

    def _take(self) -> int | None:
        with self._lock:
            if self._next == len(self.guides):
                return None
            self._next += 1
            self._begun[self._next - 1] = self._waited
            return self._next - 1

    def _finish(self, index: int, row: np.ndarray, error: str | None) -> bool:
        with self._lock:
            if index not in self._begun:
                return False
            if error is None:
                self.allowed[index] = row
            self._close(index, error)
        return True

    def _close(self, index: int, error: str | None) -> None:
        del self._begun[index]
        self.guides[index].error = error
        self._num_left -= 1
        if self._num_left == 0:
            self.is_done.set()


def fill(guides: Sequence[Guide]) -> Masks:
    """The masks of some guides of one model, in this thread and without a limit of time."""
    job = _Job(guides)
    job.run()
    return job.result()


class MaskFiller:
    """Fills masks on threads of its own while the caller does something else, such as running the model."""

    def __init__(self, num_threads: int | None = None, limit: float = STEP_LIMIT) -> None:
        """num_threads: None is half of the processors, 8 at most.

        limit: seconds that one guide's mask may take
        """
        self._limit = limit
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._job: _Job | None = None
        self._num_threads = num_threads or max(1, min(8, (os.cpu_count() or 1) // 2))
        self._num_started = 0

    def begin(self, guides: Sequence[Guide]) -> None:
        """Starts filling; until `result` has returned, nobody else may use these guides."""
        if not guides:
            return
        job = _Job(guides)
        for _ in range(min(self._num_threads, len(guides))):
            self._put(job)
            self._job = job  # only now: nobody is to wait for what no thread will do

    def result(self) -> Masks | None:
        """The masks of the guides that `begin` was given, as soon as they are there; None where it was given none."""
        job, self._job = self._job, None
        if job is None:
            return None
        patience = min(self._limit, 0.1)
        while not job.is_done.wait(patience):
            for _ in range(job.give_up(patience, self._limit)):
                self._num_started -= 1
                self._put(job)
        return job.result()

    def close(self) -> None:
        """Ends the threads."""
        for _ in range(self._num_started):
            self._jobs.put(None)
        self._num_started = 0

    def _put(self, job: _Job) -> None:
        if self._num_started < self._num_threads:
            threading.Thread(target=_work, args=(self._jobs,), name="cbatch-masks", daemon=True).start()
            self._num_started += 1
        self._jobs.put(job)


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        if not job.run():
            return  # another thread has taken this one's place
