"""A record of each step of a run: which slot worked on which request, and which tokens were wasted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, get_args

from cbatch.base.params import SamplingParams
from cbatch.cli.bench.workload import Outputs
from cbatch.engine.stats import StepRecord
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.schedule.output import ScheduledChunk

TokenKind = Literal["prefill", "decode", "padding", "idle"]
"""prefill: of a prompt; decode: wanted output; padding: fills up a prompt; idle: output past a request's end."""

TOKEN_KINDS: tuple[TokenKind, ...] = get_args(TokenKind)


@dataclass(frozen=True, slots=True)
class RecordedChunk:
    """The work of one slot in one step for one request.

    request:  index in the workload
    start:    position of the first token in its sequence
    drafted:  how many of the tokens were drafted
    accepted: how many of those were right, so that the request got them in this step
    """

    slot: int
    request: int
    kind: TokenKind
    start: int
    tokens: int
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step of the engine. Times in seconds since the start of the run; `model_s` is the part spent in the model."""

    start: float
    end: float
    model_s: float
    chunks: tuple[RecordedChunk, ...]
    blocks_used: int

    def tokens(self, *kinds: TokenKind) -> int:
        return sum(chunk.tokens for chunk in self.chunks if chunk.kind in kinds)

    @property
    def useful_slots(self) -> int:
        """How many slots worked on a request that was not finished."""
        return len({chunk.slot for chunk in self.chunks if chunk.kind in ("prefill", "decode")})

    @property
    def drafted(self) -> int:
        return sum(chunk.drafted for chunk in self.chunks)

    @property
    def accepted(self) -> int:
        return sum(chunk.accepted for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class ExampleStep:
    """The step to draw, with the KV cache blocks that each of its chunks reads.

    step:         index in the run
    block_tables: block ids for each chunk, as many as the tokens up to the chunk's end fill
    """

    step: int
    block_size: int
    block_tables: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class RecordedRequest:
    """One request of the workload: its tokens, and the times of the first and of the last token it wanted."""

    wanted: int
    tokens: list[int] = field(default_factory=list)
    first: float | None = None
    last: float | None = None

    @property
    def is_done(self) -> bool:
        return len(self.tokens) >= self.wanted


@dataclass(slots=True)
class RunRecord:
    """One run of one strategy."""

    slots: int
    requests: list[RecordedRequest]
    steps: list[RecordedStep] = field(default_factory=list)
    elapsed_s: float = 0.0
    preemptions: int = 0
    num_blocks: int = 1
    peak_bytes: int | None = None
    example: ExampleStep | None = None

    def tokens(self, *kinds: TokenKind) -> int:
        """Tokens of these kinds that were computed."""
        return sum(step.tokens(*kinds) for step in self.steps)

    @property
    def drafted(self) -> int:
        return sum(step.drafted for step in self.steps)

    @property
    def accepted(self) -> int:
        return sum(step.accepted for step in self.steps)

    @property
    def outputs(self) -> Outputs:
        """The tokens of each request, without those past its end."""
        return [request.tokens[: request.wanted] for request in self.requests]


MOST_BLOCKS = 60
"""Blocks whose numbers can be read in the picture of a step."""

Score = tuple[bool, bool, bool, bool, int, int]


def is_scattered(table: Sequence[int]) -> bool:
    """Whether the blocks of a sequence do not follow each other in memory."""
    return any(after != before + 1 for before, after in pairwise(table))


def example_score(chunks: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]]) -> Score:
    """How well a step serves as a picture; higher is better.

    chunks: start and length of each, without drafts
    tables: the blocks that each of them reads

    Best are steps that mix prompts and single tokens, then those in which the blocks of half the requests or more are
    scattered, then those whose blocks are few enough to be read, then those that continue a prompt which an earlier
    step began, then those with about seven chunks, and then those with few tokens.
    """
    prompts = [start for start, tokens in chunks if tokens > 1]
    is_mixed = 0 < len(prompts) < len(chunks)
    return (
        is_mixed,
        is_mixed and 2 * sum(map(is_scattered, tables)) >= len(tables),
        is_mixed and sum(map(len, tables)) <= MOST_BLOCKS,
        is_mixed and any(prompts),
        -abs(len(chunks) - 7),
        -sum(tokens for _, tokens in chunks),
    )


@dataclass(slots=True)
class _Submission:
    """A request in flight. `slot` is None until it is scheduled, unless the strategy has chosen one."""

    index: int
    slot: int | None
    is_padding: bool


class RunRecorder:
    """Runs requests on an engine and records every step, through the engine's `on_step`."""

    def __init__(
        self,
        engine: SteppingEngine,
        output_lengths: list[int],
        slots: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`output_lengths`: tokens that each request of the workload wants."""
        self.engine = engine
        requests = [RecordedRequest(wanted) for wanted in output_lengths]
        self.record = RunRecord(slots, requests, num_blocks=engine.limits.num_blocks)
        self._clock = clock
        self._submissions: dict[int, _Submission] = {}
        self._used_slots: set[int] = set()
        self._best_score: Score | None = None
        self._latest: StepRecord | None = None
        self._began = clock()
        engine.on_step = self._on_step

    def add(
        self, index: int, prompt: list[int], tokens: int, slot: int | None = None, *, is_padding: bool = False
    ) -> None:
        """Queues a request for `tokens` output tokens. Without a slot, it gets the next free one when it is scheduled.

        index: of the request in the workload
        """
        request_id = self.engine.add(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
        self._submissions[request_id] = _Submission(index, slot, is_padding)

    def add_padding(self, index: int, slot: int, tokens: int) -> None:
        """Queues padding tokens for a request. They attend only to each other."""
        if tokens > 0:
            self.add(index, [1] * tokens, 1, slot, is_padding=True)

    def run(self, *, until: Callable[[], bool] = lambda: False) -> None:
        """Steps until all requests are finished, or until the condition holds."""
        while self._submissions and not until():
            self._step()

    def finish(self) -> RunRecord:
        """Stops recording and returns the record."""
        self.engine.on_step = None  # breaks the reference cycle, so that the engine's memory is freed at once
        self.record.elapsed_s = self._clock() - self._began
        self.record.preemptions = self.engine.stats().num_preemptions
        return self.record

    def _on_step(self, step: StepRecord) -> None:
        """Keeps the step's blocks if it is the best picture so far: when it ends, finished requests free theirs."""
        self._latest = step
        chunks = step.scheduled.chunks
        limits = self.engine.limits
        tables = tuple(tuple(chunk.sequence.blocks[: limits.blocks_for(chunk.stop)]) for chunk in chunks)
        score = example_score([(chunk.start, chunk.num_tokens - len(chunk.draft)) for chunk in chunks], tables)
        if self._best_score is None or score > self._best_score:
            self._best_score = score
            self.record.example = ExampleStep(len(self.record.steps), limits.block_size, tables)

    def _step(self) -> None:
        start = self._clock() - self._began
        events = self.engine.step()
        end = self._clock() - self._began
        assert self._latest is not None
        got = Counter(event.request_id for event in events if event.token_id is not None)
        chunks = tuple(self._chunk(chunk, got[chunk.sequence.id]) for chunk in self._latest.scheduled.chunks)
        step = self._latest
        self.record.steps.append(RecordedStep(start, end, step.seconds, chunks, step.used_blocks))
        for event in events:
            if event.error is not None:
                raise event.error
            assert event.request_id is not None
            submission = self._submissions[event.request_id]
            request = self.record.requests[submission.index]
            if not submission.is_padding and event.token_id is not None:
                request.tokens.append(event.token_id)
                request.first = end if request.first is None else request.first
                if len(request.tokens) == request.wanted:
                    request.last = end
            if event.finish_reason is not None:
                del self._submissions[event.request_id]
                if not submission.is_padding and submission.slot is not None:
                    self._used_slots.discard(submission.slot)

    def _chunk(self, chunk: ScheduledChunk, got: int) -> RecordedChunk:
        """got: tokens that the request got of this step"""
        submission, drafted = self._submissions[chunk.sequence.id], len(chunk.draft)
        if submission.slot is None:
            submission.slot = min(set(range(len(self._used_slots) + 1)) - self._used_slots)
        if not submission.is_padding:
            self._used_slots.add(submission.slot)
        request = self.record.requests[submission.index]
        is_decode = bool(request.tokens) and chunk.num_tokens == 1 + chunk.replayed + drafted
        kind: TokenKind = "decode" if is_decode else "prefill"
        if submission.is_padding:
            kind = "padding"
        elif request.is_done:
            kind = "idle"
        accepted = max(got - 1, 0) if drafted else 0
        return RecordedChunk(submission.slot, submission.index, kind, chunk.start, chunk.num_tokens, drafted, accepted)
