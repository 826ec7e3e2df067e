"""The position of one output in its grammar, and the tokens that may come next.

Text that a grammar forces is written as the tokenizer would write it: its tokens stand in a queue, and until that is
empty only the next one of it may come. So it costs no steps: the scheduler appends the queue (`TokenSequence.forced`).

A form ends before its budget does. Once the budget gets short, a way to the end is known after each token. A token from
which no way fits into what is left of the budget is replaced by the first one of the way that was known before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch.base.errors import RequestError, invalid_row
from cbatch.sample.structured.closing import MAX_BYTES, short_end
from cbatch.sample.structured.sandbox import is_dead_end
from cbatch.sample.structured.token_bitmask import bitmask_of, full_bitmask

FAILED = "The output's constraint could not be kept: "
TOO_COMPLEX = "it is too complex at this place."

NO_BUDGET = 1 << 31

CACHE_SIZE = 1024
"""Texts of a form whose tokens are known. Those that it forces come again in each output."""

SPARE_BYTES = 256
"""Bytes that a way to the end may have beside twice the shortest output; longer ones are not looked for."""


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """A compiled constraint, made by `ConstraintCompiler.compile`. Any number of requests may share it.

    matcher:      over the tokens of the model
    byte_matcher: the same over single bytes; None if the form has special tokens in it
    token_bytes:  of each token
    tokenizer:    the model's, in the library's form, which makes tokens of text that the grammar forces
    growth:       about how many tokens a way to the end can grow by if one token comes
    """

    matcher: Any
    byte_matcher: Any
    vocab_size: int
    token_bytes: Sequence[bytes]
    tokenizer: Any
    growth: int

    @cached_property
    def shortest(self) -> tuple[int, ...] | None:
        """Tokens of a short output; None if none was found."""
        found = self.closing(self.byte_matcher, MAX_BYTES) if self.byte_matcher is not None else None
        is_right = found is not None and self.matcher.validate_tokens(list(found)) == len(found)
        return found if is_right else None

    @cached_property
    def most_bytes(self) -> int:
        """Of a way to the end that is looked for."""
        return min(2 * sum(len(self.token_bytes[token]) for token in self.shortest or ()) + SPARE_BYTES, MAX_BYTES)

    def closing(self, byte_matcher: Any, most: int) -> tuple[int, ...] | None:
        """Tokens of a short way to the end, of at most so many bytes; None if none was found."""
        end = short_end(byte_matcher, most)
        return None if end is None else tuple(self.tokens_of(end, True))

    @cached_property
    def tokens_of(self) -> Callable[[bytes, bool], list[int]]:
        """Gives the tokens of a text; of the beginning of one, those that more text cannot change. None is special."""
        return lru_cache(CACHE_SIZE)(self._tokens_of)

    def _tokens_of(self, text: bytes, is_whole: bool) -> list[int]:
        tokens = self.tokenizer.tokenize_bytes(text) if is_whole else self.tokenizer.tokenize_partial(text)[0]
        if any(map(self.tokenizer.is_special_token, tokens)):  # its text is spelt out
            tokens = self.tokenizer.greedy_tokenize(text.decode("utf-8", "ignore"))[: None if is_whole else -1]
        return list(tokens)


class GrammarState:
    """The position of one request's output in its grammar. Used by one thread at a time.

    `error` is a sentence after something has failed. A failed state stays failed.
    """

    needs_mask, is_over, successor = True, False, None

    def __init__(
        self,
        grammar: CompiledGrammar,
        stop_ids: Collection[int],
        budget: int = NO_BUDGET,
        *,
        closes: bool = False,
        forces: bool = True,
    ) -> None:
        """
        stop_ids:    tokens that end the output; allowed when it may end
        budget:      most tokens of the output
        closes:      end the form before the budget ends
        forces:      write text that the form forces as the tokenizer does; otherwise the model may cut it as it likes
        """
        self.vocab_size = grammar.vocab_size
        self.error: str | None = None
        self._stop_ids = frozenset(stop_ids)
        stops = bitmask_of(self._stop_ids, self.vocab_size)
        self._stop_places = stops.nonzero()[0]
        self._stop_bits = stops[self._stop_places]
        self._grammar = grammar
        self._matcher = grammar.matcher.deep_copy()  # shares no mutable state: others do not use up its limits
        self._is_ended = self.is_cut = False
        self._queue: deque[int] = deque()
        self._forces = forces
        self._closes = closes and grammar.shortest is not None and len(grammar.shortest) <= budget
        self._left = budget
        self._closing = grammar.shortest if self._closes else None
        """A way to the end from here; None if none is known."""
        self._check_at = self._next_check(budget)
        """The rest of the budget at which the next way is looked for."""
        self._bytes: Any = None
        self._to_feed = bytearray()
        """A matcher over bytes, made when it is first needed, and what it has not been given yet."""
        self._find_forced()

    @property
    def shortest(self) -> int:
        """Tokens of a short output; 0 if the form is not closed before the budget ends."""
        return len(self._grammar.shortest or ()) if self._closes else 0

    @property
    def is_complete(self) -> bool:
        """Whether the text so far is a complete match, so that an end token may come."""
        return self.error is None and bool(self._matcher.is_accepting())

    @property
    def is_finished(self) -> bool:
        """Whether nothing can follow: an end token came, or the text is a complete match that no longer one extends."""
        return self._is_ended or (self.is_complete and bool(self._matcher.is_stopped()))

    @property
    def forced(self) -> Sequence[int]:
        """Tokens with which the output goes on, whatever the model would say."""
        return self._queue

    @property
    def awaits_token(self) -> bool:
        """Whether no step may be computed for a token that is not known: another may take its place, or follow it."""
        return len(self._queue) > 1 or (self._closes and self._left - 1 <= self._check_at)

    @property
    def alternative(self) -> int | None:
        """The token that comes if no end is in reach behind the next one; None if none can take its place."""
        return self._closing[0] if self.awaits_token and self._closing and not self._queue else None

    def accept(self, token_id: int, left: int = NO_BUDGET) -> int | None:
        """Advances by one token of the output. Returns the one that it gets: perhaps another, or None if it ends here.

        left: tokens that may still follow it

        Raises RequestError (`invalid_row`) for a token that the grammar does not allow here.
        """
        is_forced = bool(self._queue)
        if self.error is None and not is_forced and token_id in self._stop_ids and self.is_complete:
            self._is_ended = True
            return token_id
        is_due = is_forced and token_id != self._queue[0]
        if self.error is None and (self._is_ended or is_due or not self._matcher.consume_token(token_id)):
            is_limit = str(self._matcher.stop_reason()).endswith("TooComplex")
            self.error = FAILED + (TOO_COMPLEX if is_limit else f"token {token_id} is not allowed where it came.")
        if self.error is not None:
            raise invalid_row(self.error)
        if is_forced:
            self._queue.popleft()
        taken = self._within_budget(token_id, left, is_forced=is_forced) if self._closes else token_id
        if not self._queue and not self._is_ended:
            self._find_forced()
        return taken

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, one after the other, may come next. End tokens do not count as allowed."""
        if self.error is not None or self._is_ended:
            return 0
        end = next((place for place, token in enumerate(token_ids) if token in self._stop_ids), len(token_ids))
        pairs = enumerate(zip(token_ids, self._queue, strict=False))
        end = next((place for place, (token, forced) in pairs if token != forced), end)
        return int(self._matcher.validate_tokens(list(token_ids[:end])))

    def fill_ahead(self, bitmasks: NDArray[np.int32], draft: Sequence[int]) -> list[str | None]:
        """Fills the first of 1 + D bitmasks as `fill` does, and the others for the places after each token of a draft.

        Only the first can change the state. A place that cannot be reached, or fails, has a sentence.
        """
        errors = [self.error or self.fill(bitmasks[0])]
        if draft:
            ahead = copy(self)
            ahead._matcher, ahead._queue, ahead._closes = self._matcher.deep_copy(), deque(self._queue), False
        for bitmask, token in zip(bitmasks[1:], draft, strict=True):
            try:
                ahead.accept(token)
                errors.append(errors[-1] or ahead.fill(bitmask))
            except RequestError as error:
                errors.append(str(error))
        return errors

    def fill(self, bitmask: NDArray[np.int32]) -> str | None:
        """Writes the tokens that may come next, as a bitmask (see `token_bitmask`). Returns a sentence if that fails.

        Stop ids may come exactly when the text is complete, other special tokens only if the grammar names them. If the
        output is finished and there are no stop ids, nothing may come.
        """
        if self._queue:
            bitmask[:] = bitmask_of([self._queue[0]], self.vocab_size)
            return None
        found = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        if self._matcher.is_error():
            return FAILED + ("no text can follow here." if is_dead_end(self._matcher) else TOO_COMPLEX)
        bitmask[:] = full_bitmask(self.vocab_size)
        bitmask &= found[: len(bitmask)]  # the library has an end token of its own past the vocabulary
        bitmask[self._stop_places] &= ~self._stop_bits
        is_complete = self.is_complete
        self._is_ended |= is_complete and not bitmask.any()
        if self._is_ended:
            bitmask[:] = 0
        if is_complete:
            bitmask[self._stop_places] |= self._stop_bits
        return None if is_complete or bitmask.any() else f"{FAILED}no token of the model can come next."

    def _find_forced(self) -> None:
        """Queues the tokens of the text that is forced next. What depends on the text after it is left out."""
        # A copy, because the library can compute no mask after forced bytes that stand for a special token.
        text = self._matcher.deep_copy().compute_ff_bytes() if self._forces and self.error is None else b""
        if not text:
            return
        tokens = self._grammar.tokens_of(text, True)
        if not self._leads_to_end(tokens, stops=True):
            tokens = self._grammar.tokens_of(text, False)
        self._queue += tokens[: self._matcher.validate_tokens(tokens)]

    def _within_budget(self, token_id: int, left: int, *, is_forced: bool) -> int | None:
        """Sees to it that the form can end with `left` tokens after this one, which has just been taken."""
        before, self._closing, self._left = self._closing, None, left
        if before and before[0] == token_id:
            self._closing = before[1:]  # the same way
        self._to_feed += self._grammar.token_bytes[token_id]
        if left > self._check_at:
            return token_id
        if self._closing is None:
            self._closing = self._find_closing(before or (), left)
        if before is not None and not is_forced and len(before) <= left + 1 and self._is_too_late(before, left):
            self._take_back(token_id)
            self.is_cut = True
            if not before:
                self._is_ended = True
                return None
            token_id, self._closing = before[0], before[1:]
            self._matcher.consume_token(token_id)
            self._to_feed += self._grammar.token_bytes[token_id]
        self._check_at = self._next_check(left)
        if self._closing is not None and len(self._closing) == left and not self._queue:
            self._queue += self._closing
            self.is_cut |= bool(self._closing)
        return token_id

    def _is_too_late(self, before: tuple[int, ...], left: int) -> bool:
        """Whether no way that fits is known, nor enough time to find one after the next token."""
        if self._closing is None:
            return len(before) + self._grammar.growth >= left
        return len(self._closing) > left

    def _next_check(self, left: int) -> int:
        """The rest of the budget at which the next way is to be known: sooner, the less room there is."""
        slack = left - len(self._closing) if self._closing is not None else 0
        if slack < 0:  # the form does not end in time, unless the tokens to come are much longer than these
            return left // 2 - 1
        return left - 1 - max(slack - self._grammar.growth, 0) // 4

    def _take_back(self, token_id: int) -> None:
        """Goes back to before the latest token."""
        self._matcher.rollback(1)
        count = len(self._grammar.token_bytes[token_id])
        if self._to_feed:
            del self._to_feed[-count:]
        else:
            self._bytes.rollback(count)

    def _find_closing(self, before: tuple[int, ...], left: int) -> tuple[int, ...] | None:
        """A way to the end: the one from before, if it still leads there and is short enough, or another one."""
        if self.is_complete:
            return ()
        known = next((way for way in (before[1:], before) if way and self._leads_to_end(way)), None)
        if known is not None and len(known) < left:
            return known
        if self._bytes is None:
            self._bytes = self._grammar.byte_matcher.deep_copy()
        if self._bytes.try_consume_tokens(list(self._to_feed)) < len(self._to_feed):
            self._closes = False  # it is too complex for the matcher over bytes
            return None
        self._to_feed.clear()
        found = self._grammar.closing(self._bytes, self._grammar.most_bytes)
        is_better = found is not None and (known is None or len(found) < len(known)) and self._leads_to_end(found)
        return found if is_better else known

    def _leads_to_end(self, tokens: Sequence[int], *, stops: bool = False) -> bool:
        """Whether the text is complete after these tokens, and nothing can follow if it `stops`."""
        if self._matcher.validate_tokens(list(tokens)) < len(tokens):
            return False
        self._matcher.consume_tokens(list(tokens))
        is_end = self._matcher.is_accepting() and (not stops or self._matcher.is_stopped())
        self._matcher.rollback(len(tokens))
        return bool(is_end)
