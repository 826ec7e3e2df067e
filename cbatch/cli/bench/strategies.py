"""Ways to batch the same work on the same engine, and variants without one of the engine's techniques."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.cli.bench.peak_memory import PeakMemory
from cbatch.cli.bench.recorder import RunRecord, RunRecorder
from cbatch.cli.bench.workload import Workload
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.loader import LoadedModel

Run = Callable[[RunRecorder, Workload, int], None]
"""Does the work on a recorder's engine, with this many slots."""


def run_one_by_one(recorder: RunRecorder, work: Workload, slots: int) -> None:
    """No batching: each request waits until the one before it has finished."""
    run_without_dynamic(recorder, work, slots=1)


def run_static(recorder: RunRecorder, work: Workload, slots: int) -> None:
    """Padded batches: prompts are padded to the longest, and every request runs until the slowest has finished.

    Padding tokens are computed like others, in the same ragged steps; only their extra attention work is left out.
    """
    for batch in work.batches(slots):
        width = max(len(work.prompts[index]) for index in batch)
        longest = max(work.output_lengths[index] for index in batch)
        _check_batch(recorder.engine, len(batch), width, longest)
        for slot, index in enumerate(batch):
            recorder.add(index, work.prompts[index], longest, slot)
            recorder.add_padding(index, slot, width - len(work.prompts[index]))
        recorder.run()


def _check_batch(engine: SteppingEngine, requests: int, width: int, longest: int) -> None:
    """Raises ConfigError if a padded batch cannot run as one."""
    limits = engine.limits
    context = limits.max_model_len
    if width + longest > context:
        raise ConfigError(
            f"A static batch of prompts padded to {width} and outputs of {longest} tokens does not fit the context of "
            f"{context}; leave static out of --strategies, or use a smaller --batch-size."
        )
    if requests * (limits.blocks_for(width + longest) + 1) > limits.num_blocks:
        raise ConfigError(
            f"The KV cache of {limits.cache_tokens:,} tokens does not hold a static batch of {requests} requests of "
            f"{width + longest} tokens; give it more (--kv-cache-memory), or use a smaller --batch-size."
        )


def run_continuous(recorder: RunRecorder, work: Workload, slots: int) -> None:
    """All requests at once: the scheduler admits them as others finish."""
    for index, prompt in enumerate(work.prompts):
        recorder.add(index, prompt, work.output_lengths[index])
    recorder.run()


def run_without_cache(recorder: RunRecorder, work: Workload, slots: int) -> None:
    """Continuous batching that computes the whole sequence again for every token."""
    queue = _SlotQueue(recorder, work, slots)
    while queue.fill() or queue.running:
        for index, slot in queue.running.items():
            recorder.add(index, work.prompts[index] + recorder.record.requests[index].tokens, 1, slot)
        recorder.run()
        queue.release_finished()


def run_without_ragged(recorder: RunRecorder, work: Workload, slots: int) -> None:
    """Continuous batching in rectangles: when prompts enter, all other slots are padded to their length."""
    queue = _SlotQueue(recorder, work, slots)
    while (entering := queue.fill()) or queue.running:
        width = max((len(work.prompts[index]) for index in entering), default=0)
        for index, slot in queue.running.items():
            computed = len(work.prompts[index]) if index in entering else 1
            if index in entering:
                recorder.add(index, work.prompts[index], work.output_lengths[index], slot)
            recorder.add_padding(index, slot, width - computed)
        recorder.run(until=queue.has_finished)
        queue.release_finished()


def run_without_dynamic(recorder: RunRecorder, work: Workload, slots: int) -> None:
    """Ragged batches without padding or idle tokens, but the next batch waits until the whole batch has finished."""
    for batch in work.batches(slots):
        for slot, index in enumerate(batch):
            recorder.add(index, work.prompts[index], work.output_lengths[index], slot)
        recorder.run()


class _SlotQueue:
    """Requests that wait for a slot, and those that have one. `running`: slots by the request's index."""

    def __init__(self, recorder: RunRecorder, work: Workload, slots: int) -> None:
        self._requests = recorder.record.requests
        self._waiting = list(range(len(work.prompts)))
        self._free = list(range(slots))
        self.running: dict[int, int] = {}

    def fill(self) -> list[int]:
        """Gives free slots to waiting requests, and returns the indices of those that got one."""
        entering = []
        while self._waiting and self._free:
            entering.append(self._waiting.pop(0))
            self.running[entering[-1]] = self._free.pop(0)
        return entering

    def has_finished(self) -> bool:
        """Whether any running request has all of its tokens."""
        return any(self._requests[index].is_done for index in self.running)

    def release_finished(self) -> None:
        for index in [index for index in self.running if self._requests[index].is_done]:
            self._free.append(self.running.pop(index))


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to do the work, and what it needs of the engine.

    title:         in tables and pictures
    has_padding:   whether padding needs sequences of its own beside the requests
    whole_prompts: whether every prompt is computed in one step
    has_drafts:    whether requests may get drafts, if the engine is configured so
    """

    title: str
    run: Run
    has_padding: bool = False
    whole_prompts: bool = False
    has_drafts: bool = True


STRATEGIES = {
    "none": Strategy("one by one", run_one_by_one),
    "static": Strategy("static batches", run_static, has_padding=True, whole_prompts=True),
    "continuous": Strategy("continuous", run_continuous),
}
ABLATIONS = {
    "kv-cache": Strategy("without KV cache", run_without_cache),
    "chunked-prefill": Strategy("without chunked prefill", run_continuous, whole_prompts=True),
    "ragged": Strategy("without ragged batches", run_without_ragged, has_padding=True, whole_prompts=True),
    "dynamic": Strategy("without dynamic scheduling", run_without_dynamic),
    "speculation": Strategy("without speculation", run_continuous, has_drafts=False),
}


@dataclass(frozen=True, slots=True)
class Experiment:
    """What all strategies have in common: the model in memory, the engine's configuration, the work and the slots."""

    loaded: LoadedModel
    config: EngineConfig
    work: Workload
    slots: int

    def measure(self, strategy: Strategy) -> RunRecord:
        """Runs one strategy on an engine of its own, which shares the model."""
        max_seqs = self.slots * (2 if strategy.has_padding else 1)
        budget = self.config.max_batch_tokens
        if strategy.whole_prompts:
            budget = max_seqs * max(map(len, self.work.prompts))
        # Steps are timed one by one, so none may start before the previous one has ended.
        config = replace(self.config, max_seqs=max_seqs, max_batch_tokens=budget, prefix_cache=False, run_ahead=False)
        if not strategy.has_drafts:
            config = replace(config, speculate="off")
        with SteppingEngine(config, self.loaded) as engine:
            with PeakMemory(engine.device) as memory:
                recorder = RunRecorder(engine, self.work.output_lengths, self.slots)
                strategy.run(recorder, self.work, self.slots)
                record = recorder.finish()
            record.peak_bytes = memory.peak_bytes
        return record


def measure_interleaved(
    experiment: Experiment, strategies: dict[str, Strategy], rounds: int, on_progress: Callable[[str], None]
) -> dict[str, list[RunRecord]]:
    """Runs every strategy `rounds` times, in a new random order each round, after a short warm-up of each."""
    for strategy in strategies.values():
        replace(experiment, work=experiment.work.warmup).measure(strategy)
    records: dict[str, list[RunRecord]] = {name: [] for name in strategies}
    rng = random.Random(0)
    for number in range(rounds):
        names = list(strategies)
        rng.shuffle(names)
        for name in names:
            on_progress(f"round {number + 1} of {rounds}: {strategies[name].title}")
            records[name].append(experiment.measure(strategies[name]))
    return records
