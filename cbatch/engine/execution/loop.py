"""The loop: plan a step, compute it, take in what came of it.

On a GPU it runs ahead. The model is started on a step before the host knows what the one before has given: its input
ids are gathered on the device, where the tokens were sampled. While the device computes, the host takes in the tokens
of the step before, ends what they end, and only then has this step sampled: so penalties, forms and log-probabilities
see every token that came before, and nothing waits for them but the sampler. Without running ahead a step is taken in
at once; nothing else is different.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from typing import NamedTuple

from cbatch.engine.base.outputs import TokenEvent
from cbatch.engine.execution.model_runner import Runner
from cbatch.engine.runtime.batch import BlockTables, Logits, RaggedBatch
from cbatch.engine.runtime.threads import one_thread
from cbatch.engine.runtime.transfer import current
from cbatch.engine.sampling.output import PendingSample, grammar_states
from cbatch.engine.scheduler.output import StepPlan
from cbatch.engine.scheduler.request import Request
from cbatch.engine.scheduler.scheduler import Scheduler
from cbatch.engine.scheduler.step_time import Pacer
from cbatch.engine.structured.masks import MaskFiller
from cbatch.engine.tracing.spans import span


class _Started(NamedTuple):
    """A step whose logits [R, V] the device is computing."""

    plan: StepPlan
    batch: RaggedBatch
    logits: Logits


class Loop:
    """Steps of one scheduler on one runner.

    num_steps:  how many have been taken in
    last_plan:  of the step that was begun last
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, pacer: Pacer, *, runs_ahead: bool) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.runs_ahead = runs_ahead
        self.num_steps = 0
        self.last_plan = StepPlan()
        self._flight: PendingSample | None = None
        self._events: list[TokenEvent] = []
        """Of what has been taken in, not yet returned: something raised after that."""
        self._tables = BlockTables()
        self._masks = MaskFiller()
        self._pacer = pacer

    @property
    def has_work(self) -> bool:
        """Whether a step would advance a request, or return events."""
        return self.scheduler.has_work or bool(self._events)

    def step(self) -> list[TokenEvent]:
        """Advances every scheduled request, and returns an event for each new token.

        Raises what the model or the device raises. What was planned is taken back then, and may be tried again.
        """
        with span("schedule"):
            plan = self.scheduler.schedule()
        if plan.slices:
            self.last_plan = plan
        with self._on_device():
            try:
                started = self._start(plan) if plan.slices else None
                if self._flight is not None:  # the step before
                    self._land()
                    self._masks.begin(grammar_states(plan))
                self._flight = self._sample(started) if started is not None else None
            except BaseException:
                self._masks.result()
                self.scheduler.abandon(plan)
                raise
            if not self.runs_ahead:
                self._land()
        return self._take_events()

    def finish(self) -> list[TokenEvent]:
        """Takes in the step in flight, unless that raises, and returns all events that are left."""
        with suppress(Exception), self._on_device():
            self._land()
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
        self._flight = None

    def _start(self, plan: StepPlan) -> _Started:
        """Starts the model, and on other threads those who find out what the forms of outputs leave."""
        runner, coming = self.runner, None
        if self._flight is None:
            self._masks.begin(grammar_states(plan))
        else:
            coming = self._flight.coming
        with span("build"):
            batch = RaggedBatch.build(plan, runner.kv_cache.block_size, runner.model.device, self._tables, coming)
        with span("forward"):
            return _Started(plan, batch, runner.forward(batch))

    def _land(self) -> None:
        """Waits for the tokens of the step in flight, if there is one, and commits them."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        try:
            with span("land"):
                result = flight.get()
        except BaseException:
            self.scheduler.abandon(flight.plan)
            raise
        self.scheduler.prompt_limit = self._pacer.land(flight.plan)
        with span("commit"):
            self._events += self.scheduler.commit(flight.plan, result)
        self.num_steps += 1

    def _sample(self, started: _Started) -> PendingSample | None:
        """Has tokens chosen from the logits; None where all have ended that the step was for."""
        plan, batch, logits = started
        masks = self._masks.result()
        if all(slice_.request.has_ended for slice_ in plan.slices):
            return None
        with span("sample"):
            return PendingSample(plan, logits, batch.scored, masks)

    def _on_device(self) -> AbstractContextManager[object]:
        model = self.runner.model
        return one_thread() if model.has_own_threads else current(model.device)
