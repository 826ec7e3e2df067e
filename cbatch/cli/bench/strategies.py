"""Ways to batch the same work on the same engine, and variants without one of its techniques."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import psutil
import torch

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.cli.bench.recorder import RunRecord, RunRecorder
from cbatch.cli.bench.workload import Workload
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.loader import LoadedModel

OnProgress = Callable[[str], None]

Run = Callable[[RunRecorder, Workload, int], None]
"""Does the work on a recorder's engine, with this many slots."""


def run_static(recorder: RunRecorder, work: Workload, slots: int) -> None:
    """Padded batches: prompts are padded to the longest, and every request runs until the slowest has finished.

    Padding tokens are computed like others, in the same ragged steps; only their extra attention work is left out.
    Raises ConfigError if a batch cannot run as one.
    """
    for batch in work.batches(slots):
        width = max(len(work.prompts[index]) for index in batch)
        longest = max(work.output_lengths[index] for index in batch)
        limits, tokens = recorder.engine.limits, width + longest
        if tokens > limits.max_model_len:
            raise ConfigError(
                f"A static batch of prompts padded to {width} and outputs of {longest} tokens does not fit the context "
                f"of {limits.max_model_len}; leave static out of --strategies, or use a smaller --batch-size."
            )
        if len(batch) * (limits.blocks_for(tokens) + 1) > limits.num_blocks:
            raise ConfigError(
                f"The KV cache of {limits.cache_tokens:,} tokens does not hold a static batch of {len(batch)} requests "
                f"of {tokens} tokens; give it more (--kv-cache-memory), or use a smaller --batch-size."
            )
        for slot, index in enumerate(batch):
            recorder.add(index, work.prompts[index], longest, slot, padding=width - len(work.prompts[index]))
        recorder.run()


def run_continuous(recorder: RunRecorder, work: Workload, slots: int) -> None:
    """All requests at once: the scheduler admits them as others finish."""
    for index, prompt in enumerate(work.prompts):
        recorder.add(index, prompt, work.output_lengths[index])
    recorder.run()


def run_without_cache(recorder: RunRecorder, work: Workload, slots: int) -> None:
    """Continuous batching that computes the whole sequence again for every token."""
    for running, _ in _slots_in_turn(recorder, work, slots):
        for index, slot in running.items():
            recorder.add(index, work.prompts[index] + recorder.record.requests[index].tokens, 1, slot)
        recorder.run()


def run_without_ragged(recorder: RunRecorder, work: Workload, slots: int) -> None:
    """Continuous batching in rectangles: when prompts enter, all other slots are padded to their length."""
    for running, entering in _slots_in_turn(recorder, work, slots):
        width = max((len(work.prompts[index]) for index in entering), default=0)
        for index, slot in running.items():
            prompt = work.prompts[index] if index in entering else []
            padding = width - max(len(prompt), 1)  # beside its prompt, or beside one token of output
            recorder.add(index, prompt, work.output_lengths[index], slot, padding=padding)
        recorder.run(until=running)


def run_without_dynamic(recorder: RunRecorder, work: Workload, slots: int) -> None:
    """Ragged batches without padding or idle tokens, but the next batch waits until the whole batch has finished."""
    for batch in work.batches(slots):
        for slot, index in enumerate(batch):
            recorder.add(index, work.prompts[index], work.output_lengths[index], slot)
        recorder.run()


def _slots_in_turn(recorder: RunRecorder, work: Workload, slots: int) -> Iterator[tuple[dict[int, int], list[int]]]:
    """Gives free slots to waiting requests. Yields the slots of those that run, and which of them have just entered."""
    waiting, free, running = deque(range(len(work.prompts))), deque(range(slots)), dict[int, int]()
    while waiting or running:
        entering = [waiting.popleft() for _ in range(min(len(waiting), len(free)))]
        running |= {index: free.popleft() for index in entering}
        yield running, entering
        finished = [index for index in running if recorder.record.requests[index].is_done]
        free.extend(running.pop(index) for index in finished)


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to do the work, and what it needs of the engine.

    title:         in tables and pictures
    has_padding:   whether padding needs sequences of its own beside the requests
    whole_prompts: whether every prompt is computed in one step
    has_drafts:    whether requests get drafts, as the engine is configured
    """

    title: str
    run: Run
    has_padding: bool = False
    whole_prompts: bool = False
    has_drafts: bool = False


STRATEGIES = {
    "none": Strategy("one by one", lambda recorder, work, slots: run_without_dynamic(recorder, work, 1)),
    "static": Strategy("static batches", run_static, has_padding=True, whole_prompts=True),
    "continuous": Strategy("continuous", run_continuous),
    "drafts": Strategy("continuous, with drafts", run_continuous, has_drafts=True),
}
ABLATIONS = {
    "kv-cache": Strategy("without KV cache", run_without_cache),
    "chunked-prefill": Strategy("without chunked prefill", run_continuous, whole_prompts=True),
    "ragged": Strategy("without ragged batches", run_without_ragged, has_padding=True, whole_prompts=True),
    "dynamic": Strategy("without dynamic scheduling", run_without_dynamic),
}

INTERVAL = 0.002
"""Seconds between two samples of a process; shorter peaks are missed."""


@contextlib.contextmanager
def peak_memory(device: torch.device, *, releases: bool = True) -> Iterator[Counter[str]]:
    """The most `bytes` taken beyond those at the start, when the block ends: of the GPU, or of the process on a CPU.

    releases: return free memory of the process to the system first, so that taking it again is seen
    """
    found: Counter[str] = Counter(bytes=0)
    if device.type not in ("cpu", "mps"):  # an Apple GPU works in memory of the process
        module = torch.get_device_module(device)
        module.reset_peak_memory_stats(device)
        before = module.memory_allocated(device)
        yield found
        found["bytes"] = module.max_memory_allocated(device) - before
        return
    if releases:
        release_free_memory()
    process, stop = psutil.Process(), threading.Event()
    before = process.memory_info().rss

    def watch() -> None:
        while not stop.wait(INTERVAL):
            found["bytes"] = max(found["bytes"], process.memory_info().rss - before)

    thread = threading.Thread(target=watch, name="cbatch-memory", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


def release_free_memory() -> None:
    """Returns free memory to the system where the C library can."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


@dataclass(frozen=True, slots=True)
class Experiment:
    """The common ground of strategies: the model in memory, the engine's configuration, the work and the slots."""

    loaded: LoadedModel
    config: EngineConfig
    work: Workload
    slots: int

    @classmethod
    def of(cls, engine: Engine, work: Workload, slots: int) -> Experiment:
        """With a cache as large as the engine's for all runs, however many sequences they have."""
        blocks, states = engine.limits.num_blocks, engine.limits.state_slots or None
        config = replace(engine.config, kv_blocks=blocks, state_slots=states, kv_cache_memory=None)
        return cls(engine.loaded, config, work, slots)

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
            with peak_memory(engine.device) as memory:
                recorder = RunRecorder(engine, self.work.output_lengths, self.slots)
                strategy.run(recorder, self.work, self.slots)
                record = recorder.finish()
            record.peak_bytes = memory["bytes"]
        return record

    def warm_up(self, strategy: Strategy) -> None:
        replace(self, work=self.work.warmup).measure(strategy)


def turns(names: Iterable[str], rounds: int, on_progress: OnProgress) -> Iterator[tuple[int, str]]:
    """The order of turns: the number of each round, from 0, with all names, in a random order of its own."""
    names, rng = list(names), random.Random(0)
    for number in range(rounds):
        for name in rng.sample(names, len(names)):
            on_progress((f"round {number + 1} of {rounds}: " if rounds > 1 else "") + name)
            yield number, name
