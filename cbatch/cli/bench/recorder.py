"""What an engine did, step by step: which slot computed what, and what of it was for nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from cbatch.engine import SamplingParams

if TYPE_CHECKING:
    from cbatch.engine import Engine

Kind = Literal["prefill", "decode", "padding", "idle"]
"""Of tokens: of a prompt; generated and wanted; dummies that fill a prompt up; generated after a row's end."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one slot computed in one step for one row of the work; `start` is the place of its first token."""

    slot: int
    row: int
    kind: Kind
    start: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine. Times in seconds since the run began; model_s is the model's part of it."""

    start: float
    end: float
    model_s: float
    parts: tuple[Part, ...]
    blocks_used: int

    def tokens(self, *kinds: Kind) -> int:
        return sum(part.tokens for part in self.parts if part.kind in kinds)

    def slots(self, *kinds: Kind) -> int:
        """How many slots did one of these kinds of work."""
        return len({part.slot for part in self.parts if part.kind in kinds})


@dataclass(frozen=True, slots=True)
class Example:
    """One step that shows much of what a step can hold, with the KV cache's blocks that each of its parts reads.

    step:   its number in the trace
    tables: ids of blocks, one table for each part of the step, as long as the tokens up to the part's end need
    """

    step: int
    block_size: int
    tables: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class RowTrace:
    """One row of the work: its tokens, and when the first and the last that it wanted came."""

    wanted: int
    tokens: list[int] = field(default_factory=list)
    first: float | None = None
    last: float | None = None

    @property
    def is_done(self) -> bool:
        return len(self.tokens) >= self.wanted


@dataclass(slots=True)
class Trace:
    """A whole run of one strategy."""

    slots: int
    rows: list[RowTrace]
    steps: list[Step] = field(default_factory=list)
    elapsed_s: float = 0.0
    preemptions: int = 0
    num_blocks: int = 1
    peak_bytes: int | None = None
    example: Example | None = None


def variety(pieces: Sequence[tuple[int, int]]) -> tuple[bool, bool, int, int]:
    """How much a step shows, given start and tokens of its parts; the larger, the better for a picture.

    First that prompts and single tokens are mixed, then that a prompt goes on where an earlier step left it, then
    that it has about seven parts, which can be told apart, and few tokens.
    """
    prompts = [start for start, tokens in pieces if tokens > 1]
    is_mixed = 0 < len(prompts) < len(pieces)
    return is_mixed, is_mixed and any(prompts), -abs(len(pieces) - 7), -sum(tokens for _, tokens in pieces)


@dataclass(slots=True)
class _Job:
    """A request in flight: of which row, in which slot, and whether its tokens are only there to fill up."""

    row: int
    slot: int
    is_padding: bool


class Recorder:
    """Runs requests on an engine and writes down what each step was made of."""

    def __init__(
        self, engine: Engine, lengths: list[int], slots: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`lengths`: tokens that each row of the work wants. `clock`: seconds."""
        self.engine = engine
        self.trace = Trace(slots, [RowTrace(wanted) for wanted in lengths], num_blocks=engine.blocks.num_blocks)
        self._clock = clock
        self._jobs: dict[int, _Job] = {}
        self._taken: set[int] = set()
        self._began = clock()
        self._model_s = 0.0
        self._blocks_used = 0
        self._variety: tuple[bool, bool, int, int] | None = None
        self._forward = engine.runner.forward
        engine.runner.forward = self._timed_forward  # type: ignore[method-assign]

    def add(self, row: int, prompt: list[int], tokens: int, slot: int | None = None) -> None:
        """Queues a request for `tokens` tokens of a row; in the next free slot when it enters, unless one is given."""
        self._submit(_Job(row, -1 if slot is None else slot, is_padding=False), prompt, tokens)

    def add_padding(self, row: int, slot: int, tokens: int) -> None:
        """Queues dummy tokens beside a row's prompt; nothing attends to them but they themselves."""
        if tokens > 0:
            self._submit(_Job(row, slot, is_padding=True), [1] * tokens, 1)

    def _submit(self, job: _Job, prompt: list[int], tokens: int) -> None:
        request_id = self.engine.add(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
        self._jobs[request_id] = job

    def run(self, *, until: Callable[[], bool] = lambda: False) -> None:
        """Steps until nothing is left to do, or earlier."""
        while self._jobs and not until():
            self._step()

    def finish(self) -> Trace:
        """The trace, when all is done."""
        trace = self.trace
        trace.elapsed_s = self._clock() - self._began
        trace.preemptions = self.engine.scheduler.num_preemptions
        del self.engine.runner.forward  # the method of the class is there again, and no cycle keeps the engine
        return trace

    def _timed_forward(self, batch: Any) -> Any:
        self._look_for_example()
        self._blocks_used = self.engine.blocks.num_used
        self._sync()
        start = self._clock()
        try:
            return self._forward(batch)
        finally:
            self._sync()
            self._model_s += self._clock() - start

    def _look_for_example(self) -> None:
        """Keeps the blocks of the step that shows most so far; after it, rows that end give theirs back."""
        slices = self.engine.last_plan.slices
        found = variety([(slice_.start, slice_.num_tokens) for slice_ in slices])
        if self._variety is None or found > self._variety:
            pool = self.engine.blocks
            tables = tuple(tuple(slice_.request.blocks[: pool.blocks_for(slice_.stop)]) for slice_ in slices)
            self._variety = found
            self.trace.example = Example(len(self.trace.steps), pool.block_size, tables)

    def _sync(self) -> None:
        """Waits for the device, so that a clock on the host measures its work."""
        self.engine.synchronize()

    def _step(self) -> None:
        start, self._model_s = self._clock(), 0.0
        events = self.engine.step()
        now = self._clock()
        parts = tuple(
            self._part(slice_.request.id, slice_.start, slice_.stop) for slice_ in self.engine.last_plan.slices
        )
        began = self._began
        self.trace.steps.append(Step(start - began, now - began, self._model_s, parts, self._blocks_used))
        for event in events:
            if event.error is not None:
                raise event.error
            assert event.request_id is not None
            job = self._jobs[event.request_id]
            row = self.trace.rows[job.row]
            if not job.is_padding and event.token_id is not None:
                row.tokens.append(event.token_id)
                row.first = now - began if row.first is None else row.first
                if len(row.tokens) == row.wanted:
                    row.last = now - began
            if event.finish_reason is not None:
                del self._jobs[event.request_id]
                if not job.is_padding:
                    self._taken.discard(job.slot)

    def _part(self, request_id: int, start: int, stop: int) -> Part:
        job = self._jobs[request_id]
        if job.slot < 0:
            job.slot = min(set(range(len(self._taken) + 1)) - self._taken)
        if not job.is_padding:
            self._taken.add(job.slot)
        row = self.trace.rows[job.row]
        kind: Kind = "decode" if row.tokens and stop - start == 1 else "prefill"
        if job.is_padding:
            kind = "padding"
        elif row.is_done:
            kind = "idle"
        return Part(job.slot, job.row, kind, start, stop - start)
