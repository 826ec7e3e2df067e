"""The results of logits for each request of a step: a token, its log-probabilities, and those of the prompt.

A row goes through this, in the order of transformers:

1. `process_logits`: bias, then repetition penalty, presence and frequency penalties, then bad words and early ends.
2. `RowMasks`: allowed tokens, and those that the constraint allows.
3. `Sampler`: greedy rows take the largest logit. The others are divided by their temperature, pass LOGIT_FILTERS and
   then SHARE_FILTERS, and take the largest sum of logit and noise.

Log-probabilities are those of the logits before all of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.base.errors import RequestError, invalid_row
from cbatch.base.outputs import MIN_LOGPROB, Sample, TokenLogprobs
from cbatch.runtime.batch import InFlightTokens, Logits, SampledTokens, ScoringRows
from cbatch.runtime.transfer import HostCopy, to_device
from cbatch.sample.processors import process_logits
from cbatch.sample.row_masks import RowMasks
from cbatch.sample.sampler import Sampler, pack_sampling_params, rows_for_torch
from cbatch.sample.structured.masks import Place, TokenMasks
from cbatch.schedule.output import SchedulerOutput, StepResult
from cbatch.schedule.sequence import NAN, TokenSequence

OnScores = Callable[[Tensor, Tensor], None]
"""Gets logits [N, vocabulary] of scored places of prompts, valid during the call, and the tokens [N] that follow."""

MAX_ELEMENTS = 2**26
"""Most logits that are converted to float32 at once: 256 MiB."""

MAX_ELEMENTS_ON_CPU = 2**19
"""The same on a CPU, whose caches hold so many."""

NO_ALLOWED_TOKEN = invalid_row(
    "No token is left to choose from: each is forbidden by allowed_token_ids, bad_words, min_tokens, logit_bias or the "
    "constraint.",
)


class PendingSample:
    """A step whose tokens are being sampled, and are on their way to the host."""

    def __init__(
        self,
        scheduled: SchedulerOutput,
        logits: Logits,
        sampler: Sampler,
        scoring: ScoringRows | None = None,
        masks: TokenMasks | None = None,
        on_scores: OnScores | None = None,
    ) -> None:
        """Starts sampling a token for each request of a step that gets one, and after each of its draft, if it has any;
        and scoring prompts, and copying the sums of what is embedded.

        All earlier tokens of these requests must be known.

        logits:  of R rows in the order of the ragged batch
        scoring: which of the rows score prompts; None if none does
        masks:   the tokens that the step's `grammar_places` allow; None if there are none
        on_scores: see `StepLoop`
        """
        self.scheduled = scheduled
        self._sums = HostCopy(logits.sums) if logits.sums is not None else None
        self._scores: PendingLogprobs | None = None
        if scoring is not None:
            self._scores = _begin_scores(scheduled, logits.values, scoring.scored, on_scores)
            logits = Logits(_pick(logits.values, scoring.sampled))
        sequences, positions = _sampled_rows(scheduled)
        self._sequences = sequences
        self._constrained_rows = _constrained_rows(sequences)
        self._masks = masks
        self._sampled: SampledTokens[Any] | None = None
        self._copy: HostCopy | None = None
        self._logprobs: PendingLogprobs | None = None
        self._logprob_rows: list[int] = []
        """Rows whose tokens `_logprobs` has, then those whose alternatives it has."""
        if sequences:
            values, argmax, sampled, _ = logits
            row_masks = None
            if masks is not None or any(sequence.changes_logits for sequence in sequences):
                values = process_logits(values, sequences)
                row_masks = RowMasks.build(sequences, masks, self._constrained_rows, values)
                argmax = sampled = None
            self._sampled = sampled or sampler.sample(values, sequences, positions, argmax, row_masks)
            if isinstance(self._sampled.tokens, Tensor):
                self._copy = HostCopy(*self._sampled)
            rows = [row for row, sequence in enumerate(sequences) if sequence.params.logprobs is not None]
            if rows:
                self._begin_logprobs(logits.values, rows, torch.as_tensor(self._sampled.tokens))

    @property
    def in_flight_tokens(self) -> InFlightTokens:
        """The sampled tokens on the device, as inputs of the next step."""
        tokens = torch.as_tensor(self._sampled.tokens) if self._sampled else torch.empty(0, dtype=torch.int64)
        rows: dict[TokenSequence, int] = {}
        for row, sequence in enumerate(self._sequences):
            rows.setdefault(sequence, row)
        return InFlightTokens(tokens, rows)

    def get(self) -> StepResult:
        """Waits for the results of the step."""
        sampled = self._sampled if self._copy is None else SampledTokens(*self._copy.get())
        token_ids, largest = sampled.get() if sampled is not None else ([], [])
        found_scores = iter(self._scores.get() if self._scores is not None else ())
        scores = [[next(found_scores) for _ in chunk.scored_tokens] for chunk in self.scheduled.to_score]
        wrong = [
            None if math.isfinite(value) else _sampling_error(value, sequence)
            for value, sequence in zip(largest, self._sequences, strict=True)
        ]
        errors = self._masks.errors if self._masks is not None else ()
        for row, sentence in zip(self._constrained_rows, errors, strict=True):
            guide = self._sequences[row].guide
            if sentence is not None:
                wrong[row] = invalid_row(sentence)
            elif guide is not None and guide.is_finished:
                wrong[row] = None  # no token is allowed because the output is complete
        now = {chunk.sequence: found for chunk, found in zip(self.scheduled.to_score, scores, strict=True)}
        for row, sequence in enumerate(self._sequences):  # a prompt's score may be NaN in this chunk or an earlier one
            is_scored = sequence.scores_prompt and sequence.num_generated == 0
            if is_scored and any(math.isnan(one.logprob) for one in (*sequence.scored, *now.get(sequence, ()))):
                wrong[row] = NAN
        found = self._logprobs.get() if self._logprobs is not None else ()
        logprobs, others = dict[int, TokenLogprobs](), dict[int, TokenLogprobs]()
        for row, one in zip(self._logprob_rows, found, strict=True):
            (others if row in logprobs else logprobs)[row] = one
        samples = [
            Sample(token, logprobs.get(row), error, others.get(row))
            for row, (token, error) in enumerate(zip(token_ids, wrong, strict=True))
        ]
        sums: Any = self._sums.get()[0].numpy() if self._sums is not None else ()
        return StepResult(samples, scores, sums)

    def _begin_logprobs(self, logits: Tensor, rows: list[int], tokens: Tensor) -> None:
        """Of the tokens of these rows, and of their alternatives.  tokens: of all rows, on the device"""
        guides = {row: guide for row in rows if (guide := self._sequences[row].guide) is not None}
        others = {row: guide.alternative for row, guide in guides.items() if guide.alternative is not None}
        self._logprob_rows = [*rows, *others]
        chosen = _pick(tokens, np.array(rows))
        if others:
            chosen = torch.cat([chosen, *to_device([np.array(list(others.values()), np.int64)], logits.device)])
        counts = [self._sequences[row].params.logprobs or 0 for row in self._logprob_rows]
        self._logprobs = PendingLogprobs(logits, np.array(self._logprob_rows), chosen, counts)


def grammar_places(scheduled: SchedulerOutput) -> list[Place]:
    """Where the step's requests that get a token are in their grammars, in order."""
    chunks = scheduled.to_sample
    rows = _constrained_rows([chunk.sequence for chunk in chunks])
    return [Place(chunks[row].sequence.guide, chunks[row].draft) for row in rows]  # type: ignore[arg-type]


def sampling_params(scheduled: SchedulerOutput) -> NDArray[np.int32] | None:
    """Those of the step's requests that get a token, packed; None if more than the kernel is needed for one of them.

    The tokens before need not be known.
    """
    sequences = [chunk.sequence for chunk in scheduled.to_sample]
    if any(one.changes_logits for one in sequences) or _constrained_rows(sequences) or rows_for_torch(sequences):
        return None
    return pack_sampling_params(*_sampled_rows(scheduled))


def _sampled_rows(scheduled: SchedulerOutput) -> tuple[list[TokenSequence], list[int]]:
    """For each token that a step samples, the request as it is before that token, and the token's position."""
    sequences, positions = [], []
    for chunk in scheduled.to_sample:
        first = chunk.stop - len(chunk.draft)
        for count in range(len(chunk.draft) + 1):
            sequences.append(chunk.sequence.followed_by(chunk.draft[:count]))
            positions.append(first + count)
    return sequences, positions


def _constrained_rows(sequences: list[TokenSequence]) -> list[int]:
    return [
        row
        for row, sequence in enumerate(sequences)
        if sequence.guide is not None and sequence.guide.needs_mask and not sequence.has_ended
    ]


def _pick(rows: Tensor, places: NDArray[np.int64]) -> Tensor:
    return rows.index_select(0, to_device([places], rows.device)[0])


def _sampling_error(largest: float, sequence: TokenSequence) -> RequestError:
    params = sequence.params
    has_list = sequence.guide is not None or params.allowed_token_ids is not None
    forbids = has_list or params.logit_bias or sequence.request.bad_words or sequence.min_tokens > 0
    return NO_ALLOWED_TOKEN if largest == -math.inf and forbids else NAN


def _begin_scores(
    scheduled: SchedulerOutput, logits: Tensor, rows: NDArray[np.int64], on_scores: OnScores | None
) -> PendingLogprobs:
    token_ids, counts = [], []
    for chunk in scheduled.to_score:
        scored = chunk.scored_tokens
        token_ids += [token for _, token in scored]
        counts += [chunk.sequence.params.prompt_logprobs or 0] * len(scored)
    (tokens,) = to_device([np.array(token_ids, np.int64)], logits.device)
    if on_scores is not None:
        on_scores(_pick(logits, rows), tokens)
    return PendingLogprobs(logits, rows, tokens, counts)


class PendingLogprobs:
    """Log-probabilities that a device is computing: of each row's token and of the likeliest tokens."""

    def __init__(self, logits: Tensor, rows: NDArray[np.int64], token_ids: Tensor, counts: Sequence[int]) -> None:
        """
        logits:    [R, V]
        rows:      [N], numbers of the rows
        token_ids: [N] int64 on the same device
        counts:    [N], how many of the likeliest tokens each row wants
        """
        self._counts = counts
        elements = min(MAX_ELEMENTS, MAX_ELEMENTS_ON_CPU) if logits.is_cpu else MAX_ELEMENTS
        size = max(elements // logits.shape[-1], 1)
        most = min(max(counts, default=0), logits.shape[-1])
        parts = [
            _score(_pick(logits, rows[at : at + size]), token_ids[at : at + size], most)
            for at in range(0, len(counts), size)
        ]
        self._parts = [HostCopy(token_ids), *(HostCopy(*part) for part in parts)]

    def get(self) -> list[TokenLogprobs]:
        """Waits for one record for each row. They are NaN if the logits are."""
        token_ids, *parts = [part.get() for part in self._parts]
        columns = ([row for part in parts for row in part[place].tolist()] for place in range(4))
        rows = zip(token_ids[0].tolist(), *columns, self._counts, strict=True)
        return [
            TokenLogprobs(token, logprob, list(zip(ids[:count], values[:count], strict=True)), likeliest == token)
            for token, logprob, likeliest, ids, values, count in rows
        ]


def _score(logits: Tensor, token_ids: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of logits [N, V]: log-probability of each token [N], the likeliest one [N], and ids and log-probabilities of the
    likeliest [N, most].
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1).clamp_(min=MIN_LOGPROB)
    top = logprobs.topk(most, dim=-1)
    return logprobs.gather(1, token_ids[:, None]).squeeze(1), logits.argmax(dim=-1), top.indices, top.values
