"""The state of a sequence: one output of a request as it is decoded, and the events it gives."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

from cbatch.base.errors import RequestError, as_error
from cbatch.base.outputs import FinishReason, Sample, TokenEvent, TokenLogprobs
from cbatch.base.params import LOOP, LOOP_REPEATS, LOOP_TOKENS, SamplingParams
from cbatch.base.request import Request
from cbatch.schedule.state_slots import Snapshot

ADAPTER_BITS = 20
"""Of the number of an adapter."""

NAN = RequestError("nan_logits", "The model's output for this request is not a number.")

LOOP_INTERVAL = 16
"""Tokens from one search for a loop to the next: it takes as long as the output is long."""


class StopStringDetokenizer(Protocol):
    """Makes the text of a request that has stop strings, to find them (see `IncrementalDetokenizer`)."""

    @property
    def stop_reason(self) -> str | None:
        """The stop string that was found, or None."""

    def push(self, token_id: int, *, may_stop: bool) -> str:
        """New text that is safe to show after this token."""

    def flush(self) -> str:
        """The text that was held back, at the end of the output."""


class OutputGuide(Protocol):
    """Says which tokens an output may have (`structured.grammar.GrammarState`, `structured.reasoning.ReasoningState`).

    needs_mask:  whether some tokens may not come next
    is_over:     whether `successor` guides the output from here on; None lets anything come
    is_complete: whether what has come is a complete form
    is_finished: whether nothing can follow it, either
    is_cut:      whether what was left of the budget has decided a token
    forced:      tokens that come next, whatever the model would say; mostly none
    awaits_token: whether no step may be scheduled before the token of the step in flight is known
    alternative: the token that may take the place of the next one; None if it stays
    """

    @property
    def needs_mask(self) -> bool: ...
    @property
    def is_over(self) -> bool: ...
    @property
    def successor(self) -> OutputGuide | None: ...
    @property
    def is_complete(self) -> bool: ...
    @property
    def is_finished(self) -> bool: ...
    @property
    def is_cut(self) -> bool: ...
    @property
    def forced(self) -> Sequence[int]: ...
    @property
    def awaits_token(self) -> bool: ...
    @property
    def alternative(self) -> int | None: ...

    def accept(self, token_id: int, left: int) -> int | None:
        """Takes in one token, which `left` more may follow.

        Returns the one that the output gets: perhaps another, or None if it ends without this one.
        """

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, one after the other, may come next."""


class TokenCounts:
    """The distinct tokens of a sequence, and how often each of them was generated.

    tokens, counts: arrays of 64-bit integers, equally long
    """

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        """`prompt`: tokens that count as generated zero times."""
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self.tokens = array("q", self._places)
        self.counts = array("q", bytes(8 * len(self._places)))

    def add(self, token_id: int) -> None:
        """Counts one generated token."""
        place = self._places.setdefault(token_id, len(self.tokens))
        if place == len(self.tokens):
            self.tokens.append(token_id)
            self.counts.append(0)
        self.counts[place] += 1


@dataclass(slots=True)
class RecurrentState:
    """The recurrent state of a running request.

    source:    what its slot is to hold before the next chunk (see `ChunkState`)
    planned:   numbers of tokens after which snapshots are still to be made, ascending
    snapshots: from which it began, and which it made
    latest:    the one of them that was made after the most generated tokens that are known
    undrafted: the state before the draft of the step in flight
    """

    slot: int
    source: int | None
    planned: list[int]
    snapshots: list[Snapshot]
    latest: Snapshot | None = None
    undrafted: Snapshot | None = None


@dataclass(eq=False, slots=True)
class TokenSequence:
    """Prompt and generated tokens in one list, how many of them are in the KV cache, and the blocks that hold them.

    Invariant: the keys and values of `token_ids[:num_computed]` are in `blocks`. `num_cached` tokens of its prompt were
    cached already, when it was first admitted or when it came to them.
    There is no prefill or decode state: a sequence needs `num_tokens - num_computed` more tokens computed, and when the
    last of them is, it gets a new token. Ids grow with arrival, so a smaller id is older. The outputs of a request
    (`n`) are sequences with ids in a row; their events bear the id of the first.
    A scheduled step counts as computed. The token that it will give has a placeholder among the `num_tokens` until the
    host knows it.

    sample_index:   number of the output among those of its request
    detokenizer:    finds stop strings; None if it has none
    guide:          says which tokens may come; None if all may
    counts:         tokens that penalties look at
    allowed_bitmask: `params.allowed_token_ids` as a set of tokens, made by the sampler when it first needs it
    changes_logits: whether its parameters change logits before a token is sampled; most do not
    num_output_placeholders: tokens that steps in flight will give it; `token_ids` holds those that are known
    num_drafted:    tokens of its draft in the step in flight, if that has one and the sequence has kept its blocks
    num_to_catch_up: known tokens of the output that are computed with its last one: it was forced to have them, or its
                    recurrent state had to go back to before them
    num_peer_preemptions: how often sequences of the same priority preempted it
    has_ended:      whether its last event was made or it was cancelled; tokens of steps in flight are dropped then
    scored_from:    the first token of the prompt whose log-probability is wanted, if those are asked for
    candidates:     tokens that may follow the prompt and are scored there
    pooled:         positions whose hidden states make its embedding, if it is embedded; nothing is generated then
    scored:         log-probabilities of the prompt's tokens from `scored_from` on, as far as they are known, and then
                    of the candidates
    pooled_sum:     [hidden size], the sum of the first `num_pooled` of these hidden states
    state:          its recurrent state while it runs, if the model has recurrent layers
    """

    id: int
    token_ids: list[int]
    request: Request
    sample_index: int = 0
    detokenizer: StopStringDetokenizer | None = None
    guide: OutputGuide | None = None
    counts: TokenCounts | None = None
    scored_from: int = 1
    candidates: Sequence[int] = ()
    pooled: range = range(0)
    allowed_bitmask: object = None
    changes_logits: bool = field(init=False)
    num_prompt: int = field(init=False)
    num_computed: int = 0
    num_output_placeholders: int = 0
    num_drafted: int = 0
    num_to_catch_up: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    num_peer_preemptions: int = 0
    has_ended: bool = False
    scored: list[TokenLogprobs] = field(default_factory=list)
    num_pooled: int = 0
    pooled_sum: Any = None
    blocks: list[int] = field(default_factory=list)
    state: RecurrentState | None = None

    def __post_init__(self) -> None:
        self.num_prompt = len(self.token_ids)
        self.changes_logits = bool(self.request.bad_words) or self.params.changes_logits

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def first_id(self) -> int:
        """The id of the prompt's first output, by which the caller knows all of them."""
        return self.id - self.sample_index

    @property
    def cache_kind(self) -> int:
        """The facts that decide its keys and values beside its tokens: requests of different kinds share no blocks."""
        return (self.request.position_offset << ADAPTER_BITS) + self.request.adapter_number

    @property
    def content(self) -> Sequence[int]:
        """The facts that decide the keys and values of each token: the tokens, or what images have in their place."""
        replaced = self.request.content_ids
        return [*replaced, *self.token_ids[len(replaced) :]] if replaced else self.token_ids

    @property
    def num_tokens(self) -> int:
        """Known tokens and placeholders."""
        return len(self.token_ids) + self.num_output_placeholders

    @property
    def num_pending(self) -> int:
        """Tokens that no step has been scheduled for; at least 1 between steps."""
        return len(self.token_ids) + self.num_output_placeholders - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def is_decoding(self) -> bool:
        """Whether its last token gives the next, perhaps with others to catch up; also true at the end of a prefill."""
        known = len(self.token_ids) + self.num_output_placeholders
        return self.num_computed > 0 and self.num_computed + 1 + self.num_to_catch_up == known

    @property
    def is_finishing(self) -> bool:
        """Whether a step in flight gives it its last token."""
        in_flight = self.num_output_placeholders
        return in_flight > 0 and self.num_generated + in_flight >= self.request.max_new_tokens

    @property
    def is_running(self) -> bool:
        """Whether it has a slot: running requests hold blocks, waiting ones hold none."""
        return bool(self.blocks)

    @property
    def min_tokens(self) -> int:
        """Tokens before which nothing ends the output; 0 for a constrained output, which ends when it is complete."""
        return 0 if self.request.grammar is not None else self.params.min_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether it gives log-probabilities of its prompt; of several outputs with the same prompt, the first does."""
        return self.params.prompt_logprobs is not None and (self.sample_index == 0 or bool(self.candidates))

    @property
    def has_unscored_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are asked for and not all known yet."""
        return self.scores_prompt and self.next_to_score < self.score_stop

    @property
    def next_to_score(self) -> int:
        """The position whose logits give the next log-probability of the prompt that is not known."""
        return self.scored_from - 1 + len(self.scored)

    @property
    def score_stop(self) -> int:
        """The first position whose logits score nothing: the end of the prompt, or its last token."""
        return self.num_prompt - (not self.candidates)

    @property
    def next_to_pool(self) -> int:
        """The first position whose hidden state is still to be added to the sum."""
        return self.pooled.start + self.num_pooled

    @property
    def num_sharable(self) -> int:
        """How many tokens at its beginning may be cached ones: of those behind them, the step gives something."""
        last = len(self.token_ids) - 1
        if self.pooled:
            return min(self.next_to_pool, last)
        return min(self.next_to_score, last) if self.has_unscored_prompt else last

    @property
    def num_shared(self) -> int:
        """How many tokens at its beginning can be those of other choices of its request, too; 0 if it is no choice."""
        return self.scored_from - 1 if self.request.tails else 0

    @property
    def forced_token(self) -> int | None:
        """A token that comes next whatever a step would say. Where log-probabilities are wanted, steps give it."""
        if self.guide is None or self.num_output_placeholders or self.params.logprobs is not None:
            return None
        return self.guide.forced[0] if self.guide.forced else None

    def may_take(self, sample: Sample) -> bool:
        """Whether a token that was sampled after a draft counts: its mask was made before the tokens of that came."""
        forced = self.guide.forced if self.guide is not None else ()
        return sample.error is None and (not forced or forced[0] == sample.token_id)

    def pool(self, positions: range, total: Any) -> None:
        """Adds the sum [hidden size] of the hidden states at these positions, which are the next ones."""
        self.pooled_sum = total if self.pooled_sum is None else self.pooled_sum + total
        self.num_pooled += len(positions)

    @property
    def pooling_result(self) -> Sample:
        """The result of its last step: no token, or an error if the sum is not a number."""
        return Sample(-1, error=None if math.isfinite(float(self.pooled_sum.sum())) else NAN)

    def followed_by(self, tokens: Sequence[int]) -> TokenSequence:
        """The request as the sampler would see it after these tokens of its output; itself if that changes nothing."""
        if not self.changes_logits or not tokens:
            return self
        later = copy(self)
        later.token_ids = [*self.token_ids, *tokens]
        if self.counts is not None:
            later.counts = deepcopy(self.counts)
            for token in tokens:
                later.counts.add(token)
        return later

    def accept(self, sample: Sample) -> TokenEvent:
        """Appends a sampled token and returns its event. Any error ends this request only."""
        try:
            return self._accept(sample)
        except RequestError as error:
            return self.fail(error)
        except BaseException as raised:
            return self.fail(RequestError("internal_error", f"The request failed: {as_error(raised)!r}"))

    def _accept(self, sample: Sample) -> TokenEvent:
        if sample.error is not None:
            return self.fail(sample.error)
        if self.request.max_new_tokens == 0 or (self.guide is not None and self.guide.is_finished):
            reason: FinishReason = "length" if self.request.max_new_tokens == 0 else "stop"
            return self._last(None, "", reason)
        may_stop = self.num_generated + 1 >= self.min_tokens
        is_end = may_stop and sample.token_id in self.request.stop_ids
        token_id = sample.token_id
        if self.guide is not None and not is_end:
            guide = self.guide
            guided = guide.accept(token_id, self.request.max_new_tokens - self.num_generated - 1)
            self.guide = guide.successor if guide.is_over else guide
            if guided is None:
                return self._last(None, "", "length")
            if guided != token_id:
                token_id, sample = guided, Sample(guided, sample.other)
        self.token_ids.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)
        if is_end:
            return self._last(sample, "", "stop")
        text = ""
        if self.detokenizer is not None:
            text = self.detokenizer.push(token_id, may_stop=may_stop)
            if self.detokenizer.stop_reason is not None:
                return self._event(sample, text, "stop", self.detokenizer.stop_reason)
        if self.guide is not None and self.guide.is_finished:
            return self._last(sample, text, "length" if self.guide.is_cut else "stop")
        if self.num_generated >= self.request.max_new_tokens:
            return self._last(sample, text, "length")
        if may_stop and self.params.loop_guard and self.num_generated % LOOP_INTERVAL == 0 and self._is_looping():
            return self._last(sample, text, "stop", LOOP)
        return self._event(sample, text)

    def _is_looping(self) -> bool:
        """Whether the output ends in repetitions of the same tokens, so many that it would hardly end by itself."""
        ids, longest = self.token_ids, self.num_generated // LOOP_REPEATS
        for period in range(1, longest + 1 if self.num_generated >= LOOP_TOKENS else 0):
            size = max(period * LOOP_REPEATS, LOOP_TOKENS)
            if ids[-1] == ids[-1 - period] and ids[-size:-period] == ids[period - size :]:
                return True
        return False

    def fail(self, error: RequestError) -> TokenEvent:
        """The event of a request that ends with an error."""
        return TokenEvent(self.first_id, None, finish_reason="error", error=error, sample_index=self.sample_index)

    def _last(
        self, sample: Sample | None, text: str, reason: FinishReason, stop_reason: str | None = None
    ) -> TokenEvent:
        text += self.detokenizer.flush() if self.detokenizer is not None else ""
        return self._event(sample, text, reason, stop_reason)

    def _event(
        self, sample: Sample | None, text: str, reason: FinishReason | None = None, stop_reason: str | None = None
    ) -> TokenEvent:
        return TokenEvent(
            self.first_id,
            sample.token_id if sample is not None else None,
            text,
            reason,
            stop_reason,
            cached_tokens=self.num_cached,
            sample_index=self.sample_index,
            logprobs=sample.logprobs if sample is not None else None,
            closed=reason == "length" and self.guide is not None and self.guide.is_complete,
            prompt_logprobs=self.scored if self.scores_prompt and self.num_generated == bool(sample) else None,
            pooled=self.pooled_sum / self.num_pooled if self.pooled else None,
        )
