"""The step: schedule, launch the model, sample, update the requests.

On a GPU steps overlap. The model starts on a step before the host knows the tokens of the previous one: their ids are
gathered on the device, where they were sampled. While the device computes, the host updates the requests with the
previous step's tokens and ends those that are finished; only then is this step sampled. So penalties, constraints and
log-probabilities see all tokens before, and only the sampler waits for them. If a step has none of these, a CUDA graph
may have sampled it already. Without overlap the requests are updated at once; nothing else is different.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from cbatch.base.outputs import TokenEvent
from cbatch.engine.model_runner import ModelRunner
from cbatch.engine.stats import StepRecord
from cbatch.model.images import Images
from cbatch.runtime.batch import BlockTables, Logits, RaggedBatch
from cbatch.runtime.cpu import single_threaded
from cbatch.runtime.device import pins_memory
from cbatch.runtime.spans import span
from cbatch.runtime.transfer import computing_on, synchronize
from cbatch.sample.output import OnScores, PendingSample, grammar_places, sampling_params
from cbatch.sample.sampler import Sampler
from cbatch.sample.structured.masks import MaskFiller
from cbatch.schedule.output import SchedulerOutput
from cbatch.schedule.scheduler import Scheduler
from cbatch.schedule.sequence import TokenSequence
from cbatch.schedule.step_time import StepTimeController

OnStep = Callable[[StepRecord], None]

clock = time.perf_counter
"""Read around the model for `on_step`; tests put their own in its place."""


class StepLoop:
    """Runs the steps of a scheduler on a model runner.

    on_step: called once for each step, after the model has run; None (the default) costs nothing. While it is set, the
             engine waits for the device before and after each run of the model, to measure its time. A step raises what
             the callable raises
    on_scores: called with the logits of scored prompts, in the order of the prompts' tokens (see `OnScores`)
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        sampler: Sampler,
        step_time: StepTimeController,
        *,
        overlap: bool,
    ) -> None:
        """overlap: launch a step before the tokens of the previous one are known"""
        self.scheduler = scheduler
        self.runner = runner
        self._overlap = overlap
        self._num_steps = 0
        """Steps whose tokens are known."""
        self.on_step: OnStep | None = None
        self.on_scores: OnScores | None = None
        self._num_scheduled = 0
        """Tokens of the latest step."""
        self._in_flight: PendingSample | None = None
        self._events: list[TokenEvent] = []
        """Events that were not returned yet: of known tokens, or because a later part of the step raised."""
        self._block_tables = BlockTables()
        self._masks = MaskFiller(pin=pins_memory(runner.model.device))
        self._sampler = sampler
        self._step_time = step_time
        self._images: Images | None = None

    @property
    def has_work(self) -> bool:
        """Whether `step` would advance a request or return events."""
        return self.scheduler.has_work or bool(self._events)

    def _run_step(self) -> None:
        """Runs one step, and adds an event for each new token.

        Raises what the model or the device raises. The step is rolled back then, and may be tried again.
        """
        if self._images is not None:
            self._prepare_images(self._images)
        with span("schedule"):
            scheduled = self.scheduler.schedule()
        if scheduled.chunks:
            self._num_scheduled = scheduled.num_tokens
        elif self._images is not None and self._in_flight is None:
            self._images.wait()
        with self._on_device():
            try:
                launched = self._launch(scheduled) if scheduled.chunks else None
                if self._in_flight is not None:  # the previous step
                    self._complete()
                    self._masks.begin(grammar_places(scheduled))
                self._in_flight = self._sample(scheduled, *launched) if launched is not None else None
            except BaseException:
                self._masks.result()
                self.scheduler.rollback(scheduled)
                raise
            if not self._overlap:
                self._complete()

    def _prepare_images(self, images: Images) -> None:
        """Computes rows of images for the next step. Requests whose images cannot be had end with an error."""
        scheduler, model = self.scheduler, self.runner.model
        # On a CPU, the tower is torch's, which has all threads.
        with span("images"), nullcontext() if model.has_own_threads else self._on_device():
            failed = images.begin_step(scheduler.running, scheduler.waiting, scheduler.max_batch_tokens)
        for sequence, error in failed:
            scheduler.cancel(sequence)
            self._events.append(sequence.fail(sequence.request.located(error)))

    def _drop(self, sequence: TokenSequence) -> None:
        """Removes a request; no event of it is returned any more."""
        if not sequence.has_ended:  # it may have ended in a step whose events were not returned yet
            self.scheduler.cancel(sequence)
        gone = sequence.first_id, sequence.sample_index
        self._events = [event for event in self._events if (event.request_id, event.sample_index) != gone]

    def _launch(self, scheduled: SchedulerOutput) -> tuple[RaggedBatch, Logits]:
        """Starts the model and, on other threads, the token masks of constrained outputs."""
        runner, known_on_device = self.runner, None
        if self._in_flight is None:
            self._masks.begin(grammar_places(scheduled))
        else:
            known_on_device = self._in_flight.in_flight_tokens
        images = None if self._images is None else self._images.rows(scheduled.chunks)
        with span("build"):
            batch = RaggedBatch.build(
                scheduled,
                runner.kv_cache.block_size,
                runner.model.device,
                self._block_tables,
                known_on_device,
                partial(sampling_params, scheduled),
                runner.state_pool,
                images,
            )
        with span("forward"):
            logits = runner.forward(batch) if self.on_step is None else self._observe(self.on_step, scheduled, batch)
        return batch, logits

    def _observe(self, on_step: OnStep, scheduled: SchedulerOutput, batch: RaggedBatch) -> Logits:
        """Runs the model while the device does nothing else, and reports the step."""
        device, used_blocks = self.runner.model.device, self.scheduler.pool.num_used
        synchronize(device)
        start = clock()
        logits = self.runner.forward(batch)
        synchronize(device)
        on_step(StepRecord(scheduled, used_blocks, start, clock()))
        return logits

    def _complete(self) -> None:
        """Waits for the tokens of the step in flight, if there is one, and updates the requests with them."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return
        try:
            with span("fetch"):
                result = step.get()
        except BaseException:
            self.scheduler.rollback(step.scheduled)
            raise
        self.scheduler.prefill_limit = self._step_time.step_completed(step.scheduled)
        self.scheduler.drafts.observe_step(step.scheduled, self._step_time.last_seconds)
        with span("update"):
            self._events += self.scheduler.update_from_output(step.scheduled, result)
        self._num_steps += 1

    def _sample(self, scheduled: SchedulerOutput, batch: RaggedBatch, logits: Logits) -> PendingSample | None:
        """Starts to sample from the logits; None if all requests of the step have ended meanwhile."""
        masks = self._masks.result()
        if all(chunk.sequence.has_ended for chunk in scheduled.chunks):
            return None
        with span("sample"):
            return PendingSample(scheduled, logits, self._sampler, batch.scoring, masks, self.on_scores)

    def _on_device(self) -> AbstractContextManager[object]:
        model = self.runner.model
        return single_threaded() if model.has_own_threads else computing_on(model.device)
