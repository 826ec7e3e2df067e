"""What an engine did, step by step: which slot computed what, and what of it was for nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from cbatch.engine import SamplingParams

if TYPE_CHECKING:
    from cbatch.engine import Engine

TokenKind = Literal["prefill", "decode", "padding", "idle"]
"""Of tokens: of a prompt; generated and wanted; dummies that fill a prompt up; generated after a row's end."""


@dataclass(frozen=True, slots=True)
class RecordedChunk:
    """What one slot computed in one step for one row of the work; `start` is the place of its first token."""

    slot: int
    row: int
    kind: TokenKind
    start: int
    tokens: int


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step of the engine. Times in seconds since the run began; model_s is the model's part of it."""

    start: float
    end: float
    model_s: float
    chunks: tuple[RecordedChunk, ...]
    blocks_used: int

    def tokens(self, *kinds: TokenKind) -> int:
        return sum(chunk.tokens for chunk in self.chunks if chunk.kind in kinds)

    def slots(self, *kinds: TokenKind) -> int:
        """How many slots did one of these kinds of work."""
        return len({chunk.slot for chunk in self.chunks if chunk.kind in kinds})


@dataclass(frozen=True, slots=True)
class ExampleStep:
    """One step that shows much of what a step can hold, with the KV cache's blocks that each of its parts reads.

    step:   its number in the trace
    tables: ids of blocks, one table for each part of the step, as long as the tokens up to the part's end need
    """

    step: int
    block_size: int
    tables: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class RecordedRequest:
    """One row of the work: its tokens, and when the first and the last that it wanted came."""

    wanted: int
    tokens: list[int] = field(default_factory=list)
    first: float | None = None
    last: float | None = None

    @property
    def is_done(self) -> bool:
        return len(self.tokens) >= self.wanted


@dataclass(slots=True)
class RunRecord:
    """A whole run of one strategy."""

    slots: int
    rows: list[RecordedRequest]
    steps: list[RecordedStep] = field(default_factory=list)
    elapsed_s: float = 0.0
    preemptions: int = 0
    num_blocks: int = 1
    peak_bytes: int | None = None
    example: ExampleStep | None = None


def example_score(pieces: Sequence[tuple[int, int]]) -> tuple[bool, bool, int, int]:
    """How much a step shows, given start and tokens of its parts; the larger, the better for a picture.

    First that prompts and single tokens are mixed, then that a prompt goes on where an earlier step left it, then
    that it has about seven parts, which can be told apart, and few tokens.
    """
    prompts = [start for start, tokens in pieces if tokens > 1]
    is_mixed = 0 < len(prompts) < len(pieces)
    return is_mixed, is_mixed and any(prompts), -abs(len(pieces) - 7), -sum(tokens for _, tokens in pieces)


@dataclass(slots=True)
class _Submission:
    """A request in flight: of which row, in which slot, and whether its tokens are only there to fill up."""

    row: int
    slot: int
    is_padding: bool


class RunRecorder:
    """Runs requests on an engine and writes down what each step was made of."""

    def __init__(
        self, engine: Engine, lengths: list[int], slots: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`lengths`: tokens that each row of the work wants. `clock`: seconds."""
        self.engine = engine
        self.record = RunRecord(
            slots, [RecordedRequest(wanted) for wanted in lengths], num_blocks=engine.block_pool.num_blocks
        )
        self._clock = clock
        self._submissions: dict[int, _Submission] = {}
        self._used_slots: set[int] = set()
        self._began = clock()
        self._model_s = 0.0
        self._blocks_used = 0
        self._best_score: tuple[bool, bool, int, int] | None = None
        self._forward = engine.runner.forward
        engine.runner.forward = self._timed_forward  # type: ignore[method-assign]

    def add(self, row: int, prompt: list[int], tokens: int, slot: int | None = None) -> None:
        """Queues a request for `tokens` tokens of a row; in the next free slot when it enters, unless one is given."""
        self._submit(_Submission(row, -1 if slot is None else slot, is_padding=False), prompt, tokens)

    def add_padding(self, row: int, slot: int, tokens: int) -> None:
        """Queues dummy tokens beside a row's prompt; nothing attends to them but they themselves."""
        if tokens > 0:
            self._submit(_Submission(row, slot, is_padding=True), [1] * tokens, 1)

    def _submit(self, submission: _Submission, prompt: list[int], tokens: int) -> None:
        request_id = self.engine.add(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
        self._submissions[request_id] = submission

    def run(self, *, until: Callable[[], bool] = lambda: False) -> None:
        """Steps until nothing is left to do, or earlier."""
        while self._submissions and not until():
            self._step()

    def finish(self) -> RunRecord:
        """The trace, when all is done."""
        record = self.record
        record.elapsed_s = self._clock() - self._began
        record.preemptions = self.engine.scheduler.num_preemptions
        del self.engine.runner.forward  # the method of the class is there again, and no cycle keeps the engine
        return record

    def _timed_forward(self, batch: Any) -> Any:
        self._keep_example()
        self._blocks_used = self.engine.block_pool.num_used
        self._sync()
        start = self._clock()
        try:
            return self._forward(batch)
        finally:
            self._sync()
            self._model_s += self._clock() - start

    def _keep_example(self) -> None:
        """Keeps the blocks of the step that shows most so far; after it, rows that end give theirs back."""
        chunks = self.engine.last_scheduled.chunks
        found = example_score([(chunk.start, chunk.num_tokens) for chunk in chunks])
        if self._best_score is None or found > self._best_score:
            pool = self.engine.block_pool
            tables = tuple(tuple(chunk.request.blocks[: pool.blocks_for(chunk.stop)]) for chunk in chunks)
            self._best_score = found
            self.record.example = ExampleStep(len(self.record.steps), pool.block_size, tables)

    def _sync(self) -> None:
        """Waits for the device, so that a clock on the host measures its work."""
        self.engine.synchronize()

    def _step(self) -> None:
        start, self._model_s = self._clock(), 0.0
        events = self.engine.step()
        now = self._clock()
        chunks = tuple(
            self._part(chunk.request.id, chunk.start, chunk.stop) for chunk in self.engine.last_scheduled.chunks
        )
        began = self._began
        self.record.steps.append(RecordedStep(start - began, now - began, self._model_s, chunks, self._blocks_used))
        for event in events:
            if event.error is not None:
                raise event.error
            assert event.request_id is not None
            submission = self._submissions[event.request_id]
            row = self.record.rows[submission.row]
            if not submission.is_padding and event.token_id is not None:
                row.tokens.append(event.token_id)
                row.first = now - began if row.first is None else row.first
                if len(row.tokens) == row.wanted:
                    row.last = now - began
            if event.finish_reason is not None:
                del self._submissions[event.request_id]
                if not submission.is_padding:
                    self._used_slots.discard(submission.slot)

    def _part(self, request_id: int, start: int, stop: int) -> RecordedChunk:
        submission = self._submissions[request_id]
        if submission.slot < 0:
            submission.slot = min(set(range(len(self._used_slots) + 1)) - self._used_slots)
        if not submission.is_padding:
            self._used_slots.add(submission.slot)
        row = self.record.rows[submission.row]
        kind: TokenKind = "decode" if row.tokens and stop - start == 1 else "prefill"
        if submission.is_padding:
            kind = "padding"
        elif row.is_done:
            kind = "idle"
        return RecordedChunk(submission.slot, submission.row, kind, start, stop - start)
