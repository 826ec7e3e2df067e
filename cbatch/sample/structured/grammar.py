"""The position of one output in its grammar, and the tokens that may come next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch.base.errors import RequestError
from cbatch.sample.structured.sandbox import is_dead_end
from cbatch.sample.structured.token_bitmask import bitmask_of, full_bitmask

FAILED = "The output's constraint could not be kept: "
TOO_COMPLEX = "it is too complex at this place."


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """A compiled constraint, made by `ConstraintCompiler.compile`. Any number of requests may share it.

    tokenizer: the model's, in the library's form, which makes tokens of text that the grammar forces
    """

    matcher: Any
    vocab_size: int
    tokenizer: Any


class GrammarState:
    """The position of one request's output in its grammar. Used by one thread at a time.

    `error` is a sentence after something has failed. A failed state stays failed.
    """

    def __init__(
        self,
        grammar: CompiledGrammar,
        stop_ids: Collection[int],
        starts_after: Callable[[list[int]], bool] | None = None,
    ) -> None:
        """
        stop_ids:     tokens that end the output; allowed when it may end
        starts_after: for outputs that begin with something else, such as reasoning: whether the constrained part
                      starts after these tokens
        """
        self.vocab_size = grammar.vocab_size
        self.error: str | None = None
        self._stop_ids = frozenset(stop_ids)
        stops = bitmask_of(self._stop_ids, self.vocab_size)
        self._stop_places = stops.nonzero()[0]
        self._stop_bits = stops[self._stop_places]
        self._matcher = grammar.matcher.deep_copy()  # shares no mutable state: others do not use up its limits
        self._tokenizer = grammar.tokenizer
        self._starts_after = starts_after
        self._before: list[int] = []
        self._is_ended = False

    @property
    def is_complete(self) -> bool:
        """Whether the text so far is a complete match, so that an end token may come."""
        return self.error is None and self._starts_after is None and bool(self._matcher.is_accepting())

    @property
    def is_finished(self) -> bool:
        """Whether nothing can follow: an end token came, or the text is a complete match that no longer one extends."""
        return self._is_ended or (self.is_complete and bool(self._matcher.is_stopped()))

    def accept(self, token_id: int) -> None:
        """Advances by one token of the output.

        Raises RequestError (`invalid_row`) for a token that the grammar does not allow here.
        """
        if self._starts_after is not None:
            self._before.append(token_id)
            if self._starts_after(self._before):
                self._starts_after, self._before = None, []
            return
        if self.error is None and token_id in self._stop_ids and self.is_complete:
            self._is_ended = True
            return
        if self.error is None and (self._is_ended or not self._matcher.consume_token(token_id)):
            is_limit = str(self._matcher.stop_reason()).endswith("TooComplex")
            self.error = FAILED + (TOO_COMPLEX if is_limit else f"token {token_id} is not allowed where it came.")
        if self.error is not None:
            raise RequestError("invalid_row", self.error)

    def forced_tokens(self) -> list[int]:
        """Tokens of the text with which any output goes on from here, as the tokenizer would cut it; mostly none.

        The grammar may allow other tokens of the same text. What depends on the text after it is left out.
        """
        if self.error is not None or self._is_ended or self._starts_after is not None:
            return []
        text = self._matcher.compute_ff_bytes()
        return list(self._tokenizer.tokenize_partial(text)[0]) if text else []

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, one after the other, may come next. End tokens do not count as allowed.

        Before the constrained part any other token may come; where that part starts among them is not looked for.
        """
        if self.error is not None or self._is_ended:
            return 0
        end = next((place for place, token in enumerate(token_ids) if token in self._stop_ids), len(token_ids))
        return end if self._starts_after is not None else int(self._matcher.validate_tokens(list(token_ids[:end])))

    def fill_ahead(self, bitmasks: NDArray[np.int32], draft: Sequence[int]) -> list[str | None]:
        """Fills the first of 1 + D bitmasks as `fill` does, and the others for the places after each token of a draft.

        Only the first can change the state. A place that cannot be reached, or fails, has a sentence.
        """
        errors = [self.error or self.fill(bitmasks[0])]
        if draft:
            ahead = copy(self)
            ahead._matcher, ahead._before = self._matcher.deep_copy(), list(self._before)
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
        bitmask[:] = full_bitmask(self.vocab_size)
        if self._starts_after is not None:
            bitmask[self._stop_places] &= ~self._stop_bits
            return None
        found = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        if self._matcher.is_error():
            return FAILED + ("no text can follow here." if is_dead_end(self._matcher) else TOO_COMPLEX)
        bitmask &= found[: len(bitmask)]  # the library has an end token of its own past the vocabulary
        bitmask[self._stop_places] &= ~self._stop_bits
        is_complete = self.is_complete
        self._is_ended |= is_complete and not bitmask.any()
        if self._is_ended:
            bitmask[:] = 0
        if is_complete:
            bitmask[self._stop_places] |= self._stop_bits
        return None if is_complete or bitmask.any() else f"{FAILED}no token of the model can come next."
