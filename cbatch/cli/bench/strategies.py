"""Ways to batch the same work on the same engine, variants without one of its techniques, and what two of them save."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError, RequestError
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


LONG_PROMPT = 10_000
CHUNK_SHARES = (1 / 16, 1 / 4, 1)
"""Chunks of the long prompt whose memory is compared, as shares of its length; the last one is all of it."""

SHORTEST, REPEATS = 64, 5
"""The first context, in tokens, after which one more token is timed, and how many of them."""


def measure_techniques(
    experiment: Experiment, context: int, names: Sequence[str], on_progress: OnProgress
) -> dict[str, list[dict[str, Any]]]:
    """The memory that chunked prefill saves and the time that the KV cache saves, if they are among the names.

    The figures are those of `--json`. The prompt whose memory is measured has LONG_PROMPT tokens, or as many as the
    context holds. Raises ConfigError if it cannot be computed.
    """
    found = {}
    if "chunked-prefill" in names:
        on_progress("memory of a long prompt, in chunks and whole")
        length = min(LONG_PROMPT, context - 1)
        budgets = dict.fromkeys(max(round(share * length), 1) for share in CHUNK_SHARES)
        found["prompt_memory"] = [_prompt_memory(experiment, length, budget) for budget in budgets]
    if "kv-cache" in names:
        on_progress("time of one more token after longer and longer contexts, with and without the KV cache")
        found["token_costs"] = _token_costs(experiment, context)
    return found


def _engine(experiment: Experiment, context: int, budget: int, *, own_model: bool = False) -> SteppingEngine:
    """For one sequence of up to `context` tokens. The cache holds no more, to leave memory for large steps.

    own_model: load the model once more
    """
    config = replace(
        experiment.config,
        max_seqs=1,
        max_batch_tokens=budget,
        kv_blocks=-(-context // experiment.config.block_size),
        prefix_cache=False,
        run_ahead=False,
        speculate="off",  # a step is to give one token
    )
    return SteppingEngine(config, None if own_model else experiment.loaded)


def _run_prompt(engine: SteppingEngine, length: int, tokens: int) -> RunRecord:
    """Runs one prompt to this number of output tokens."""
    recorder = RunRecorder(engine, [tokens], 1)
    recorder.add(0, [1] * length, tokens)
    recorder.run()
    return recorder.finish()


def _prompt_memory(experiment: Experiment, length: int, budget: int) -> dict[str, Any]:
    """Peak memory of one long prompt in steps of `budget` tokens, without weights and KV cache.

    On a CPU, a model keeps the memory of its largest step for the next one, so that only a new model takes it again.
    """
    fast_model = experiment.loaded.fast_model
    own_model = fast_model is not None and fast_model.device.type == "cpu"

    with _engine(experiment, length + 1, budget, own_model=own_model) as engine:
        engine.zero_cache()
        release_free_memory()
        _run_prompt(engine, 1, 1)  # touches what any step does, such as weights that are mapped from a file
        with peak_memory(engine.device, releases=False) as memory:
            try:
                elapsed = _run_prompt(engine, length, 1).elapsed_s
            except RequestError as error:
                raise ConfigError(f"A prompt of {length:,} tokens could not be measured: {error}") from error
    return {"prompt_tokens": length, "tokens_a_step": budget, "peak_bytes": memory["bytes"], "elapsed_s": elapsed}


def _token_costs(experiment: Experiment, context: int) -> list[dict[str, Any]]:
    """Seconds that one more token takes after longer and longer contexts, with the KV cache and without."""
    costs, length = [], SHORTEST
    with _engine(experiment, context, context) as engine:
        while length + REPEATS + 1 <= context:
            first_s, *times = [step.end - step.start for step in _run_prompt(engine, length, REPEATS + 1).steps]
            middle = sorted(times)[REPEATS // 2]
            costs.append({"context_tokens": length, "without_cache_s": first_s, "with_cache_s": middle})
            length *= 2
    return costs
