"""Decisions of the scheduler for one step, and results of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cbatch.base.outputs import Sample, TokenLogprobs
from cbatch.schedule.sequence import TokenSequence
from cbatch.schedule.state_slots import ChunkState


class ScheduledChunk(NamedTuple):
    """Tokens `start .. stop-1` of one request, computed in one step.

    is_last:  whether the request's last token is among them, so that its next one is sampled
    blocks:   the request's own list of blocks; if `request.blocks` is another list, it has lost them since
    to_score: positions whose logits score what follows in the prompt or may follow it, if that is asked for
    draft:    tokens that the request may get after its last known one: the last ones of the chunk, whose places in the
              cache hold them, and which count as computed only once they are accepted (see `drafts`)
    state:    of a model with recurrent layers
    caught_up: known tokens that are computed with the last one (see `TokenSequence.num_to_catch_up`)
    to_pool:  positions whose hidden states are summed for an embedding
    source:   a block that is copied to the chunk's first one before the step, for the tokens there before `start`
    """

    sequence: TokenSequence
    start: int
    stop: int
    is_last: bool
    blocks: list[int]
    to_score: range = range(0)
    state: ChunkState | None = None
    draft: tuple[int, ...] = ()
    caught_up: int = 0
    to_pool: range = range(0)
    source: int | None = None

    @classmethod
    def of(cls, sequence: TokenSequence, most: int, state: ChunkState | None = None) -> ScheduledChunk:
        """The next tokens of a request, at most `most`."""
        start, wanted = sequence.num_computed, sequence.num_tokens
        stop = min(wanted, start + most)
        to_score = range(0)
        if sequence.scores_prompt:
            to_score = range(max(start, sequence.next_to_score), min(stop, sequence.score_stop))
        to_pool = range(0)
        if sequence.pooled:
            to_pool = range(max(start, sequence.next_to_pool), min(stop, sequence.pooled.stop))
        return cls(sequence, start, stop, stop == wanted, sequence.blocks, to_score, state, to_pool=to_pool)

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def scored_tokens(self) -> list[tuple[int, int]]:
        """The positions of `to_score`, each with a token that its logits score; the prompt's last may have several."""
        sequence, last = self.sequence, self.sequence.num_prompt - 1
        scored = [(at, sequence.token_ids[at + 1]) for at in self.to_score if at < last]
        return scored + [(last, token) for token in sequence.candidates if last in self.to_score]

    @property
    def is_sampled(self) -> bool:
        """Whether its request gets a token from the step; one that is embedded gets none."""
        return self.is_last and not self.sequence.pooled

    @property
    def is_decode(self) -> bool:
        """Whether it ends with a request's last known token and begins after its prompt, or with the last of that."""
        return self.is_last and self.start > 0 and self.start >= self.sequence.num_prompt - 1


@dataclass(slots=True)
class SchedulerOutput:
    """The chunks of one step, at most one for each request.

    admitted: requests that took over blocks, which the step itself may compute, or a copy; most were admitted to it
    """

    chunks: list[ScheduledChunk] = field(default_factory=list)
    admitted: list[TokenSequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_decoding(self) -> int:
        """Number of decoding requests: one token that is not the first of a prompt, perhaps with others around it."""
        return sum(
            chunk.is_last and chunk.num_tokens == 1 + chunk.caught_up + len(chunk.draft) and chunk.start > 0
            for chunk in self.chunks
        )

    @property
    def to_sample(self) -> list[ScheduledChunk]:
        """Chunks whose requests get a token from this step, in order."""
        return [chunk for chunk in self.chunks if chunk.is_sampled]

    @property
    def to_score(self) -> list[ScheduledChunk]:
        """Chunks with prompt tokens whose log-probabilities are asked for, in order."""
        return [chunk for chunk in self.chunks if chunk.to_score]

    @property
    def to_pool(self) -> list[ScheduledChunk]:
        """Chunks with tokens whose hidden states are summed, in order."""
        return [chunk for chunk in self.chunks if chunk.to_pool]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step.

    samples: for each chunk of `to_sample` one, and one more after each token of its draft
    scores:  for each chunk of `to_score`
    sums:    for each chunk of `to_pool` [hidden size]
    """

    samples: Sequence[Sample]
    scores: Sequence[Sequence[TokenLogprobs]] = ()
    sums: Sequence[Any] = ()
