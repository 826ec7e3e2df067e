"""Ways to get the same work done on the same engine: what batching wins, and what each part of it gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from cbatch.cli.bench.peak_memory import PeakMemory
from cbatch.cli.bench.recorder import RunRecord, RunRecorder
from cbatch.cli.bench.workload import Workload
from cbatch.engine import ConfigError

if TYPE_CHECKING:
    from cbatch.engine import Engine, EngineConfig, LoadedModel

Run = Callable[[RunRecorder, Workload, int], None]
"""Does the work on a recorder's engine, with so many slots."""


def run_one_by_one(recorder: RunRecorder, work: Workload, slots: int) -> None:
    """No batching: each row waits until the one before it has ended."""
    for row, prompt in enumerate(work.prompts):
        recorder.add(row, prompt, work.lengths[row])
        recorder.run()


def run_static(recorder: RunRecorder, work: Workload, slots: int) -> None:
    """Padded batches: prompts are filled up to the longest, and every row goes on until the slowest has ended.

    The dummies are tokens like others, computed in the same ragged steps; what they would add to attention they do not.
    """
    for batch in work.batches(slots):
        width = max(len(work.prompts[row]) for row in batch)
        longest = max(work.lengths[row] for row in batch)
        _check_batch(recorder.engine, len(batch), width, longest)
        for slot, row in enumerate(batch):
            recorder.add(row, work.prompts[row], longest, slot)
            recorder.add_padding(row, slot, width - len(work.prompts[row]))
        recorder.run()


def _check_batch(engine: Engine, rows: int, width: int, longest: int) -> None:
    """Raises ConfigError for a padded batch that would not run as one."""
    context, blocks = engine.model.max_model_len, engine.block_pool
    if width + longest > context:
        raise ConfigError(
            f"A static batch of prompts padded to {width} and outputs of {longest} tokens does not fit the context of "
            f"{context}; leave static out (--strategies), or take a smaller --batch-size."
        )
    if rows * (blocks.blocks_for(width + longest) + 1) > blocks.num_blocks:
        raise ConfigError(
            f"The KV cache of {blocks.capacity:,} tokens does not hold a static batch of {rows} rows of "
            f"{width + longest} tokens; give it more (--kv-cache-memory), or take a smaller --batch-size."
        )


def run_continuous(recorder: RunRecorder, work: Workload, slots: int) -> None:
    """All rows at once: the scheduler lets them in as others leave."""
    for row, prompt in enumerate(work.prompts):
        recorder.add(row, prompt, work.lengths[row])
    recorder.run()


def run_without_cache(recorder: RunRecorder, work: Workload, slots: int) -> None:
    """Continuous, but every token is computed from the whole text before it, as if nothing had been kept."""
    waiting = list(range(len(work.prompts)))
    running: dict[int, int] = {}
    free = list(range(slots))
    while waiting or running:
        while waiting and free:
            running[waiting.pop(0)] = free.pop(0)
        for row, slot in running.items():
            recorder.add(row, work.prompts[row] + recorder.record.rows[row].tokens, 1, slot)
        recorder.run()
        for row in [row for row in running if recorder.record.rows[row].is_done]:
            free.append(running.pop(row))


def run_without_ragged(recorder: RunRecorder, work: Workload, slots: int) -> None:
    """Continuous in a rectangle: where prompts enter, all other slots are filled up with dummies to their length."""
    waiting = list(range(len(work.prompts)))
    running: dict[int, int] = {}
    free = list(range(slots))
    while waiting or running:
        entering = []
        while waiting and free:
            running[waiting.pop(0)] = free.pop(0)
            entering.append(next(reversed(running)))
        width = max((len(work.prompts[row]) for row in entering), default=0)
        for row, slot in running.items():
            computes = len(work.prompts[row]) if row in entering else 1
            if row in entering:
                recorder.add(row, work.prompts[row], work.lengths[row], slot)
            recorder.add_padding(row, slot, width - computes)
        recorder.run(until=lambda: any(recorder.record.rows[row].is_done for row in running))
        for row in [row for row in running if recorder.record.rows[row].is_done]:
            free.append(running.pop(row))


def run_without_dynamic(recorder: RunRecorder, work: Workload, slots: int) -> None:
    """Ragged batches, nothing padded and nobody computed past his end, but who is next waits for all of them."""
    for batch in work.batches(slots):
        for slot, row in enumerate(batch):
            recorder.add(row, work.prompts[row], work.lengths[row], slot)
        recorder.run()


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to do the work, and what it needs of the engine.

    title:        for tables and pictures
    has_padding:  whether dummies need seats beside those of the rows
    whole_prompts: whether every prompt is computed in one step
    """

    title: str
    run: Run
    has_padding: bool = False
    whole_prompts: bool = False


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
}


@dataclass(frozen=True, slots=True)
class Experiment:
    """What all strategies have in common: the model in memory, the engine's settings, the work, and the slots."""

    loaded: LoadedModel
    config: EngineConfig
    work: Workload
    slots: int

    def measure(self, strategy: Strategy) -> RunRecord:
        """Does the work in one way on an engine of its own, which shares the model."""
        from cbatch.engine import Engine

        seats = self.slots * (2 if strategy.has_padding else 1)
        budget = self.config.max_batch_tokens
        if strategy.whole_prompts:
            budget = seats * self.work.longest_prompt
        # Each step is timed by itself, so none may begin before the one before has ended.
        config = replace(self.config, max_seqs=seats, max_batch_tokens=budget, prefix_cache=False, run_ahead=False)
        with Engine(config, self.loaded) as engine:
            with PeakMemory(engine.device) as memory:
                recorder = RunRecorder(engine, self.work.lengths, self.slots)
                strategy.run(recorder, self.work, self.slots)
                record = recorder.finish()
            record.peak_bytes = memory.peak_bytes
        return record


def measure_interleaved(
    experiment: Experiment, strategies: dict[str, Strategy], rounds: int, on_progress: Callable[[str], None]
) -> dict[str, list[RunRecord]]:
    """Every strategy `rounds` times, alternating in an order that changes, after a short run that warms up."""
    warm = Workload(experiment.work.prompts[:2], [min(length, 8) for length in experiment.work.lengths[:2]], "")
    for strategy in strategies.values():
        replace(experiment, work=warm).measure(strategy)
    records: dict[str, list[RunRecord]] = {name: [] for name in strategies}
    rng = random.Random(0)
    for number in range(rounds):
        names = list(strategies)
        rng.shuffle(names)
        for name in names:
            on_progress(f"round {number + 1} of {rounds}: {strategies[name].title}")
            records[name].append(experiment.measure(strategies[name]))
    return records


class Timed(Protocol):
    """A run that took so many seconds, of ours or of a peer."""

    @property
    def elapsed_s(self) -> float: ...


AnyRun = TypeVar("AnyRun", bound=Timed)


def median_run(runs: list[AnyRun]) -> AnyRun:
    """The one that took neither long nor short; of two in the middle the quicker."""
    return sorted(runs, key=lambda run: run.elapsed_s)[(len(runs) - 1) // 2]
