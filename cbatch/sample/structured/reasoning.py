"""The position of an output in its reasoning, which may have a budget, and after which a form may begin."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from cbatch.base.errors import RequestError
from cbatch.sample.structured.grammar import NO_BUDGET, GrammarState
from cbatch.sample.structured.token_bitmask import bitmask_of, full_bitmask
from cbatch.text.tokenizer import NUM_OPENING_TOKENS, ThinkingPlace

LEAST_ANSWER = 16
"""Tokens that reasoning leaves to a form, beside twice the shortest output of it."""


class ReasoningState:
    """Follows an output until its reasoning has ended; `successor` follows the rest. Used by one thread at a time.

    Its methods are those of `GrammarState`.
    """

    def __init__(
        self,
        vocab_size: int,
        stop_ids: Collection[int],
        place: Callable[[Sequence[int], bool], ThinkingPlace],
        *,
        opened: bool,
        closing: Sequence[int] = (),
        thinking_budget: int | None = None,
        budget: int = NO_BUDGET,
        successor: GrammarState | None = None,
    ) -> None:
        """
        stop_ids:        tokens that end the output; not allowed while a form is to come
        place:           where the output stands after these tokens (`ChatTokenizer.thinking_place`)
        opened:          whether the prompt leaves the model inside its reasoning
        closing:         tokens that end the reasoning early
        thinking_budget: most tokens of the reasoning, without these; None for no limit
        budget:          most tokens of the output
        successor:       the form that follows
        """
        self.vocab_size, self.successor = vocab_size, successor
        self.error: str | None = None
        self.is_over = self.is_complete = self.is_finished = self.is_cut = False
        self._stop_ids = frozenset(stop_ids) if successor is not None else frozenset[int]()
        self._allowed = full_bitmask(vocab_size) & ~bitmask_of(self._stop_ids, vocab_size)
        self._place, self._closing = place, closing
        self._most = NO_BUDGET if thinking_budget is None else thinking_budget
        shortest = successor.shortest if successor is not None else 0
        self._reserve = min(2 * shortest + LEAST_ANSWER, max(budget // 2, shortest)) + len(closing) if shortest else -1
        self._tokens: list[int] = []
        """The latest ones, as many as tell the place."""
        self._num_inside, self._is_inside = 0, opened
        self._queue: deque[int] = deque(closing if opened and thinking_budget == 0 else ())

    alternative = None

    @property
    def needs_mask(self) -> bool:
        """Whether some tokens may not come next."""
        return bool(self._queue or self._stop_ids)

    @property
    def forced(self) -> Sequence[int]:
        return self._queue

    @property
    def awaits_token(self) -> bool:
        return len(self._queue) > 1

    def accept(self, token_id: int, left: int = NO_BUDGET) -> int:
        self._tokens = [*self._tokens, token_id][-NUM_OPENING_TOKENS:]
        if self._queue:
            if token_id != self._queue.popleft():
                self.error = f"Token {token_id} came where the reasoning is to end."
                raise RequestError("internal_error", self.error)
            self.is_over = not self._queue
        elif (place := self._place(self._tokens, self._is_inside)) != "inside":
            self.is_over = place == "after"
        else:
            self._num_inside += self._is_inside
            self._is_inside = True
            if self._num_inside >= self._most or left <= self._reserve:
                self._queue += self._closing
        return token_id

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """The token with which the reasoning ends does not count as allowed before a form."""
        if self._queue:
            pairs = enumerate(zip(token_ids, self._queue, strict=False))
            return next((at for at, (token, forced) in pairs if token != forced), min(len(token_ids), len(self._queue)))
        if self.successor is None:
            return len(token_ids)
        for place, token in enumerate(token_ids):
            tokens = [*self._tokens, *token_ids[: place + 1]]
            if token in self._stop_ids or self._place(tokens, self._is_inside) == "after":
                return place
        return len(token_ids)

    def fill_ahead(self, bitmasks: NDArray[np.int32], draft: Sequence[int]) -> list[str | None]:
        for bitmask, forced in zip(bitmasks, [*self._queue, *[None] * len(bitmasks)], strict=False):
            bitmask[:] = self._allowed if forced is None else bitmask_of([forced], self.vocab_size)
        return [self.error] * len(bitmasks)
