"""The loop: plan a step, compute it, take in what came of it.

On a GPU it runs ahead. The model is started on a step before the host knows what the one before has given: its input
ids are gathered on the device, where the tokens were sampled. While the device computes, the host takes in the tokens
of the step before, ends what they end, and only then has this step sampled: so penalties, forms and log-probabilities
see every token that came before, and nothing waits for them but the sampler. Without running ahead a step is taken in
at once; nothing else is different.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple

from cbatch.engine.base.outputs import TokenEvent
from cbatch.engine.execution.model_runner import ModelRunner
from cbatch.engine.execution.stats import StepRecord
from cbatch.engine.runtime.batch import BlockTables, Logits, RaggedBatch
from cbatch.engine.runtime.threads import single_threaded
from cbatch.engine.runtime.transfer import synchronize, use_device
from cbatch.engine.sampling.output import PendingSample, grammar_states
from cbatch.engine.scheduler.output import SchedulerOutput
from cbatch.engine.scheduler.request import Request
from cbatch.engine.scheduler.scheduler import Scheduler
from cbatch.engine.scheduler.step_time import StepTimeController
from cbatch.engine.structured.masks import MaskFiller
from cbatch.engine.tracing.spans import span

clock = time.perf_counter
"""Read around the model for `on_step`; tests put their own in its place."""


class _LaunchedStep(NamedTuple):
    """A step whose logits [R, V] the device is computing."""

    scheduled: SchedulerOutput
    batch: RaggedBatch
    logits: Logits


class EngineCore:
    """Steps of one scheduler on one runner.

    num_steps:  how many have been taken in
    last_scheduled: the step that was begun last
    on_step:    see `Engine.on_step`
    """

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, step_time: StepTimeController, *, runs_ahead: bool
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.runs_ahead = runs_ahead
        self.on_step: Callable[[StepRecord], None] | None = None
        self.num_steps = 0
        self.last_scheduled = SchedulerOutput()
        self._in_flight: PendingSample | None = None
        self._events: list[TokenEvent] = []
        """Of what has been taken in, not yet returned: something raised after that."""
        self._block_tables = BlockTables()
        self._masks = MaskFiller()
        self._step_time = step_time

    @property
    def has_work(self) -> bool:
        """Whether a step would advance a request, or return events."""
        return self.scheduler.has_work or bool(self._events)

    def step(self) -> list[TokenEvent]:
        """Advances every scheduled request, and returns an event for each new token.

        Raises what the model or the device raises. What was planned is taken back then, and may be tried again.
        """
        with span("schedule"):
            scheduled = self.scheduler.schedule()
        if scheduled.chunks:
            self.last_scheduled = scheduled
        with self._on_device():
            try:
                launched = self._launch(scheduled) if scheduled.chunks else None
                if self._in_flight is not None:  # the step before
                    self._complete()
                    self._masks.begin(grammar_states(scheduled))
                self._in_flight = self._sample(launched) if launched is not None else None
            except BaseException:
                self._masks.result()
                self.scheduler.rollback(scheduled)
                raise
            if not self.runs_ahead:
                self._complete()
        return self._take_events()

    def finish(self) -> list[TokenEvent]:
        """Takes in the step in flight, unless that raises, and returns all events that are left."""
        with suppress(Exception), self._on_device():
            self._complete()
        return self._take_events()

    def _take_events(self) -> list[TokenEvent]:
        events, self._events = self._events, []
        return events

    def cancel(self, request: Request) -> None:
        """Takes a request out; no event of it is returned any more."""
        if not request.has_ended:  # it may have, in a step that was taken in before something was raised
            self.scheduler.cancel(request)
        self._events = [event for event in self._events if event.request_id != request.id]

    def close(self) -> None:
        """Ends the threads that forms of outputs took, and forgets the step in flight."""
        self._masks.close()
        self._in_flight = None

    def _launch(self, scheduled: SchedulerOutput) -> _LaunchedStep:
        """Starts the model, and on other threads those who find out what the forms of outputs leave."""
        runner, known_on_device = self.runner, None
        if self._in_flight is None:
            self._masks.begin(grammar_states(scheduled))
        else:
            known_on_device = self._in_flight.in_flight_tokens
        with span("build"):
            batch = RaggedBatch.build(
                scheduled, runner.kv_cache.block_size, runner.model.device, self._block_tables, known_on_device
            )
        with span("forward"):
            logits = runner.forward(batch) if self.on_step is None else self._observe(self.on_step, scheduled, batch)
        return _LaunchedStep(scheduled, batch, logits)

    def _observe(self, on_step: Callable[[StepRecord], None], scheduled: SchedulerOutput, batch: RaggedBatch) -> Logits:
        """Runs the model between two times at which the device is idle, and reports that."""
        device, used_blocks = self.runner.model.device, self.scheduler.pool.num_used
        synchronize(device)
        start = clock()
        logits = self.runner.forward(batch)
        synchronize(device)
        on_step(StepRecord(scheduled, used_blocks, start, clock()))
        return logits

    def _complete(self) -> None:
        """Waits for the tokens of the step in flight, if there is one, and commits them."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return
        try:
            with span("land"):
                result = step.get()
        except BaseException:
            self.scheduler.rollback(step.scheduled)
            raise
        self.scheduler.prefill_limit = self._step_time.step_completed(step.scheduled)
        with span("commit"):
            self._events += self.scheduler.update_from_output(step.scheduled, result)
        self.num_steps += 1

    def _sample(self, launched: _LaunchedStep) -> PendingSample | None:
        """Has tokens chosen from the logits; None where all have ended that the step was for."""
        scheduled, batch, logits = launched
        masks = self._masks.result()
        if all(chunk.request.has_ended for chunk in scheduled.chunks):
            return None
        with span("sample"):
            return PendingSample(scheduled, logits, batch.scored, masks)

    def _on_device(self) -> AbstractContextManager[object]:
        model = self.runner.model
        return single_threaded() if model.has_own_threads else use_device(model.device)
