"""A record of each step of a run: which slot worked on which request, and which tokens were wasted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from cbatch.base.params import SamplingParams
from cbatch.cli.bench.workload import Outputs
from cbatch.engine.stats import StepRecord
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.schedule.output import ScheduledChunk

clock = time.perf_counter
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
    def timed_chunks(self) -> list[tuple[RecordedChunk, float]]:
        """The chunks with their seconds. Those of one slot share the step's time by their tokens."""
        in_slot: Counter[int] = Counter()
        for chunk in self.chunks:
            in_slot[chunk.slot] += chunk.tokens
        return [(chunk, (self.end - self.start) * chunk.tokens / in_slot[chunk.slot]) for chunk in self.chunks]

    @property
    def useful_slots(self) -> int:
        """How many slots worked on a request that was not finished."""
        return len({chunk.slot for chunk in self.chunks if chunk.kind in ("prefill", "decode")})


def count_drafts(steps: Iterable[RecordedStep]) -> tuple[int, int]:
    """The tokens that were drafted in these steps, and those of them that were accepted."""
    chunks = [chunk for step in steps for chunk in step.chunks]
    return sum(chunk.drafted for chunk in chunks), sum(chunk.accepted for chunk in chunks)


@dataclass(slots=True)
class RecordedRequest:
    """A request of the workload: its tokens, and the times of the first and of the last token it wanted."""

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

    def tokens(self, *kinds: TokenKind) -> int:
        return sum(step.tokens(*kinds) for step in self.steps)

    @property
    def outputs(self) -> Outputs:
        """The tokens of each request, without those past its end."""
        return [request.tokens[: request.wanted] for request in self.requests]


@dataclass(slots=True)
class _Submission:
    """A request in flight. `slot` is None until it is scheduled, unless the strategy has chosen one."""

    index: int
    slot: int | None
    is_padding: bool


class RunRecorder:
    """Runs requests on an engine and records every step, through the engine's `on_step`."""

    def __init__(self, engine: SteppingEngine, output_lengths: list[int], slots: int) -> None:
        """`output_lengths`: tokens that each request of the workload wants."""
        self.engine = engine
        requests = [RecordedRequest(wanted) for wanted in output_lengths]
        self.record = RunRecord(slots, requests, num_blocks=engine.limits.num_blocks)
        self._submissions: dict[int, _Submission] = {}
        self._used_slots: set[int] = set()
        self._latest: StepRecord | None = None
        self._began = clock()
        engine.on_step = self._on_step

    def add(self, index: int, prompt: list[int], tokens: int, slot: int | None = None, *, padding: int = 0) -> None:
        """Queues a request for `tokens` output tokens. Without a slot, it gets the next free one when it is scheduled.

        index:   of the request in the workload
        padding: tokens of padding beside it, which attend only to each other; without a prompt they stand alone
        """
        for ids, wanted, is_padding in ((prompt, tokens, False), ([1] * padding, 1, True)):
            if ids:
                request_id = self.engine.add(ids, SamplingParams(max_tokens=wanted, ignore_eos=True))
                self._submissions[request_id] = _Submission(index, slot, is_padding)

    def run(self, *, until: Iterable[int] = ()) -> None:
        """Steps until all requests are finished, or one of some is, by their indices in the workload."""
        while self._submissions and not any(self.record.requests[index].is_done for index in until):
            self._step()

    def finish(self) -> RunRecord:
        self.engine.on_step = None  # breaks the reference cycle, so that the engine's memory is freed at once
        self.record.elapsed_s = clock() - self._began
        self.record.preemptions = self.engine.stats().num_preemptions
        return self.record

    def _on_step(self, step: StepRecord) -> None:
        self._latest = step

    def _step(self) -> None:
        start = clock() - self._began
        events = self.engine.step()
        end, step = clock() - self._began, self._latest
        assert step is not None
        got = Counter(event.request_id for event in events if event.token_id is not None)
        chunks = tuple(self._chunk(chunk, got[chunk.sequence.id]) for chunk in step.scheduled.chunks)
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
        kind: TokenKind = "padding" if submission.is_padding else "idle" if request.is_done else "prefill"
        if kind == "prefill" and request.tokens and chunk.num_tokens == 1 + chunk.caught_up + drafted:
            kind = "decode"
        accepted = max(got - 1, 0) if drafted else 0
        return RecordedChunk(submission.slot, submission.index, kind, chunk.start, chunk.num_tokens, drafted, accepted)
