"""How large KV cache and state pool are: together as large as requested, if the largest step still fits beside them.

On a GPU the largest steps are computed before the cache is made, over a single block, and the memory they take is
measured. (vLLM's profiling run does so with prompts and the sampler. Here decode steps are computed as well: attention
keeps intermediate results that grow with the context, and CUDA graphs keep memory of their own.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from cbatch.attention.base import AttentionBackend
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.base.units import format_bytes, parse_memory
from cbatch.engine.cuda_graphs import GRAPH_BYTES, WORKSPACE_BYTES, GraphSizes, StepGraphs
from cbatch.engine.model_runner import Execution, ModelRunner, stored_states
from cbatch.model.base import Model
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.device import is_accelerator, is_cuda
from cbatch.runtime.memory import DeviceMemory, device_memory, is_out_of_memory, kernel_too_large
from cbatch.runtime.process_group import ProcessGroup
from cbatch.runtime.transfer import computing_on
from cbatch.sample.output import PendingSample
from cbatch.sample.processors import counts_for
from cbatch.sample.structured.masks import TokenMasks
from cbatch.sample.structured.token_bitmask import full_bitmask
from cbatch.schedule.limits import StepLimits
from cbatch.schedule.output import ScheduledChunk, SchedulerOutput
from cbatch.schedule.sequence import TokenSequence
from cbatch.schedule.state_slots import ChunkState

if TYPE_CHECKING:
    from cbatch.model.cuda import CudaModel

RESERVED_BYTES = 256 * 2**20
"""Bytes that stay free beside a step's peak, for fragmentation."""

SNAPSHOTS_PER_SEQ = 3
"""Slots for snapshots beside the slot of each sequence: the end of its prompt, its latest token, what it shares."""

_INDEX_BLOCKS = 65536
"""Blocks of a model without keys and values, if full sequences do not need more: they take no memory on the device."""

_MAKES_STEPS_SMALLER = "a smaller --max-batch-tokens makes it smaller, and so does a smaller --max-seqs."

_ALL_FEATURES = SamplingParams(
    temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, presence_penalty=1.0, logit_bias=((0, 1.0),),
    allowed_token_ids=(0,), logprobs=20,
)  # fmt: skip
"""The parameters that take most memory when a token is sampled."""

_ANY_TOKEN: Any = SimpleNamespace(is_finished=False, needs_mask=True, alternative=None)
"""The state of a constraint that allows every token."""


_LARGE_GPU_BYTES = 40e9
"""A GPU with so much memory has 512 sequences and 8,192 tokens a step, if the weights take at most half of it."""


def default_step_size(device: torch.device, weight_bytes: int) -> tuple[int, int]:
    """The most sequences and tokens of a step where a config says nothing."""
    if not is_accelerator(device):
        return 32, 512
    memory = torch.cuda.get_device_properties(device).total_memory if is_cuda(device) else 0
    return (512, 8192) if memory >= max(_LARGE_GPU_BYTES, 2 * weight_bytes) else (256, 2048)


class CacheSize(NamedTuple):
    """Blocks of the KV cache, and slots of the state pool."""

    num_blocks: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class CacheSizeRequest:
    """The requested size of the KV cache and of the state pool.

    memory:        `4GiB`, `512MiB`, or `90%` of free memory
    num_blocks:    exact number of blocks, which overrides memory
    block_bytes:   bytes of one block on the device
    blocks_wanted: blocks for `max_seqs` sequences of full length; more would never be used
    share:         the device's part of all memory, if others have layers too: an amount is for all of them
    slot_bytes:    bytes of one slot of recurrent states on the device; 0 for a model without such states
    slots_wanted:  slots for `max_seqs` sequences and their snapshots
    num_slots:     exact number of slots, instead of as many as fit
    """

    memory: str
    num_blocks: int | None
    block_bytes: int
    blocks_wanted: int
    share: float = 1.0
    slot_bytes: int = 0
    slots_wanted: int = 0
    num_slots: int | None = None

    def bytes_of(self, free: int) -> int:
        """Bytes of the requested cache. Raises ConfigError if `memory` cannot be parsed."""
        if self.num_blocks is not None:
            return self.num_blocks * self.block_bytes + (self.num_slots or self.slots_wanted) * self.slot_bytes
        asked = parse_memory(self.memory, free)
        return asked if self.is_share else int(asked * self.share)

    def divide(self, num_bytes: int) -> CacheSize:
        """Blocks and slots that fit in so many bytes; neither is more than wanted, and either may be 0.

        Slots get at most half of it, unless there is nothing but states.
        """
        for_slots = num_bytes // 2 if self.block_bytes else num_bytes
        if self.num_blocks is not None:
            for_slots = num_bytes - self.num_blocks * self.block_bytes
        slots = min(self.slots_wanted, for_slots // self.slot_bytes) if self.slot_bytes else 0
        if self.slot_bytes and self.num_slots is not None:
            slots = self.num_slots
        if self.num_blocks is not None or not self.block_bytes:
            return CacheSize(self.num_blocks or self.blocks_wanted, slots)
        return CacheSize(min((num_bytes - slots * self.slot_bytes) // self.block_bytes, self.blocks_wanted), slots)

    @property
    def is_share(self) -> bool:
        """Whether a percentage of free memory is requested, which may turn out smaller, rather than an amount."""
        return self.num_blocks is None and "%" in self.memory


class MeasuredCache(NamedTuple):
    """The size of a cache, bytes that steps take beside it, and the memory of the device that allows least."""

    size: CacheSize
    step_bytes: int
    memory: DeviceMemory


def context_of(config: EngineConfig, model: Model) -> int:
    """Tokens of the longest sequence. Raises ConfigError if the config asks for more than the model has."""
    asked, longest = config.max_model_len, model.max_model_len
    if asked is not None and asked > longest:
        raise ConfigError(f"max_model_len is {asked:,}; it can be at most the model's own, {longest:,}.")
    return asked or longest


def measure_cache(
    config: EngineConfig, execution: Execution, limits: StepLimits, num_processes: int = 1
) -> MeasuredCache:
    """A KV cache as large as the config requests, or as the scarcest device allows.

    num_processes: that compute every step together, and have a part of the cache each

    Raises ConfigError if the cache, or a step beside it, does not fit.
    """
    model, attention = execution.model, execution.attention
    size = config.block_size
    block_bytes, slot_bytes = bytes_per_device(model, attention, size, _state_dtype(config))
    wanted = -(-context_of(config, model) // size)
    blocks_wanted = limits.max_seqs * wanted
    if not model.layers:
        blocks_wanted = max(wanted, min(blocks_wanted, _INDEX_BLOCKS))
    slots_wanted = limits.max_seqs * (1 + (SNAPSHOTS_PER_SEQ if config.prefix_cache else 0)) if model.states else 0
    total, found = sum(block_bytes.values()) + sum(slot_bytes.values()), []
    for device in block_bytes.keys() | slot_bytes.keys():
        one, block, slot = device_memory(device), block_bytes.get(device, 0), slot_bytes.get(device, 0)
        asked, share = config.kv_cache_memory or one.share, (block + slot) / total / num_processes
        if "%" in asked and not is_accelerator(device):  # of the same memory
            asked = f"{float(asked.strip(' %')) / num_processes}%"
        cache_size = CacheSizeRequest(
            asked, config.kv_blocks, block, blocks_wanted, share, slot, slots_wanted, config.state_slots
        )
        found.append((*choose_cache_size(cache_size, execution, size, limits, one), one))
    num_blocks = min(cache_size.num_blocks for cache_size, _, _ in found)
    num_slots = min((cache_size.num_slots for cache_size, _, _ in found if cache_size.num_slots), default=0)
    _, step_bytes, memory = min(found, key=lambda one: one[0])
    return MeasuredCache(CacheSize(num_blocks, num_slots), step_bytes, memory)


def make_runner(
    config: EngineConfig, execution: Execution, limits: StepLimits, measured: MeasuredCache,
    group: ProcessGroup | None = None,
) -> ModelRunner:  # fmt: skip
    """A model runner with such a cache.  group: the processes that compute every step together with this one

    Raises ConfigError if there is no memory for the cache any more.
    """
    model, attention, ((num_blocks, num_slots), step_bytes, memory) = execution.model, execution.attention, measured
    if group is not None:
        model = cast("CudaModel", model).in_group(group)
    state_dtype = _state_dtype(config)
    try:
        runner = ModelRunner(model, attention, num_blocks, config.block_size, num_slots, state_dtype)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    else:
        runner.capture_graphs(execution.sampler, limits, lambda: memory.free() >= step_bytes + GRAPH_BYTES, group)
        return runner
    # After the except block, since its traceback held the part of the cache that was made.
    block_bytes, slot_bytes = bytes_per_device(model, attention, config.block_size, state_dtype)
    cache_bytes = num_blocks * sum(block_bytes.values()) + num_slots * sum(slot_bytes.values())
    raise ConfigError(
        f"A KV cache of {format_bytes(cache_bytes)} could not be made on {memory.name}, where "
        f"{format_bytes(memory.free())} are free; give it less (--kv-cache-memory)."
    )


def _state_dtype(config: EngineConfig) -> torch.dtype | None:
    return None if config.state_dtype == "auto" else getattr(torch, config.state_dtype)


def bytes_per_device(
    model: Model, attention: AttentionBackend, block_size: int, state_dtype: torch.dtype | None
) -> tuple[dict[torch.device, int], dict[torch.device, int]]:
    """Bytes of a block, and of a slot of states, on each device that has any."""
    blocks, slots = dict.fromkeys(model.layer_devices, 0), dict.fromkeys(model.state_devices, 0)
    for layer, device in zip(model.layers, model.layer_devices, strict=True):
        blocks[device] += block_size * layer.bytes_per_token(attention.kv_dtype or model.dtype)
    for state, device in zip(stored_states(model, state_dtype), model.state_devices, strict=True):
        slots[device] += state.num_bytes
    return blocks, slots


def choose_cache_size(
    cache_size: CacheSizeRequest, execution: Execution, block_size: int, limits: StepLimits, memory: DeviceMemory
) -> tuple[CacheSize, int]:
    """Size of the cache, and bytes that steps take beside it; call it after loading the weights.

    Raises ConfigError as `make_runner` does.
    """
    free = memory.free()
    asked = cache_size.bytes_of(free)
    if asked > free:
        raise ConfigError(
            f"A KV cache of {format_bytes(asked)} was asked for, and {format_bytes(free)} are free on {memory.name}."
        )
    available, step_bytes = free, 0
    if memory.measure_peak is not None:
        cache_tokens = free // max(cache_size.block_bytes // block_size, 1)
        cache_tokens = min(cache_tokens, cache_size.blocks_wanted * block_size)
        peak, kept = MemoryProfiler(execution, block_size, limits, cache_tokens).measure(memory)
        step_bytes = peak + RESERVED_BYTES
        room = memory.free() - step_bytes  # kernels loaded meanwhile have taken memory
        # Steps can do without graphs.
        kept = max(min(kept, room // 2 if cache_size.is_share else room - asked), 0)
        available = room - kept
        takes = (
            f"{limits} takes {format_bytes(step_bytes + kept)} of the {format_bytes(free)} that are free "
            f"on {memory.name}"
        )
        if available < cache_size.block_bytes + cache_size.slot_bytes:
            raise ConfigError(f"{takes} after the weights, which leaves no room for a KV cache; {_MAKES_STEPS_SMALLER}")
        if asked > available and not cache_size.is_share:
            raise ConfigError(
                f"A KV cache of {format_bytes(asked)} was asked for. {takes}, so {format_bytes(max(available, 0))} are "
                "left for the cache; a smaller --max-batch-tokens leaves more."
            )
    found, slot_bytes = cache_size.divide(min(asked, available)), cache_size.slot_bytes
    if found.num_blocks < 1 or (slot_bytes and found.num_slots < 1):
        parts = [f"one block of {format_bytes(cache_size.block_bytes)}"] if cache_size.block_bytes else []
        parts += [f"the states of one sequence, {format_bytes(slot_bytes)}"] if slot_bytes else []
        raise ConfigError(f"--kv-cache-memory {cache_size.memory} does not hold {' and '.join(parts)}.")
    return found, step_bytes


class MemoryProfiler:
    """Computes the largest steps of a model to measure their memory, over a cache of one block for all sequences.

    A step's memory does not depend on what is in the cache. Log-probabilities of prompts and penalties of long texts
    are left out, since few steps have them; if such a step does not fit, `EngineThread` makes it smaller.
    """

    def __init__(self, execution: Execution, block_size: int, limits: StepLimits, cache_tokens: int) -> None:
        """cache_tokens: tokens that the largest possible cache holds"""
        self._model = model = execution.model
        self._sampler = execution.sampler
        self._limits = limits
        self._rows = min(limits.max_seqs, limits.max_batch_tokens)
        self._cache_tokens = cache_tokens
        self._longest = max(min(model.max_model_len, cache_tokens), 1)
        self._ids = [0] * self._longest
        self._runner = ModelRunner(model, execution.attention, 1, block_size, num_slots=1)
        for layer in (*self._runner.kv_cache.keys, *self._runner.kv_cache.values):
            layer.zero_()  # NaN would take another path through the sampler
        if self._runner.state_pool is not None:
            self._runner.state_pool.zero([0])

    def measure(self, memory: DeviceMemory) -> tuple[int, int]:
        """Most bytes that a step takes, and the bytes that CUDA graphs keep beside that.

        Raises ConfigError if a step does not fit even without a cache.
        """
        assert memory.measure_peak is not None
        try:
            with computing_on(self._model.device):
                steps = (*self.prompt_steps(), self.decode_step())
                peak = max(memory.measure_peak(partial(self._compute, step)) for step in steps)
                return peak, self._measure_graphs(memory.measure_peak)
        except Exception as error:
            too_large = kernel_too_large(error)
            if too_large is None and not is_out_of_memory(error):
                raise
        if too_large is not None:
            raise ConfigError(f"{self._limits} cannot run on {memory.name}: {too_large}.")
        raise ConfigError(
            f"{self._limits} takes more than the {format_bytes(memory.free())} that are free on {memory.name} after "
            f"the weights; {_MAKES_STEPS_SMALLER}"
        )

    def _measure_graphs(self, measure_peak: Callable[[Callable[[], object]], int]) -> int:
        """The memory of graphs: the largest one of each kind, which the others use again, and something for each."""
        runner, limits = self._runner, self._limits
        parts = runner.step_parts(self._sampler, limits)
        if parts is None:
            return 0
        sizes, num_blocks = GraphSizes.of(limits), -(-self._cache_tokens // runner.kv_cache.block_size)
        largest = [
            measure_peak(partial(StepGraphs, parts, alone, lambda run: run, num_blocks=num_blocks))
            for alone in sizes.largest
        ]
        return sum(largest) + WORKSPACE_BYTES + GRAPH_BYTES * len(sizes)

    def prompt_steps(self) -> list[SchedulerOutput]:
        """Two steps with as many tokens and outputs as allowed: most in few long prompts, and in chunks of one length.

        The many chunks have as much context as the cache could hold: attention keeps intermediate results for it.
        """
        rows, tokens = self._rows, self._limits.max_batch_tokens
        few = [1 + length for length in _lengths(rows, tokens - rows, self._longest - 1, least=0)]
        many = [min(tokens // rows + (row < tokens % rows), self._longest) for row in range(rows)]
        lengths = _lengths(rows, self._cache_tokens, self._longest, least=many[0])
        # If attention gathers the past of a chunk, the last chunk of a long prompt takes most memory.
        past = self._longest - few[0] if self._runner.attention.gathers_kv else 0
        return [
            self._scheduled([(past, past + few[0]), *((0, length) for length in few[1:])]),
            self._scheduled([(length - count, length) for count, length in zip(many, lengths, strict=True)]),
        ]

    def decode_step(self) -> SchedulerOutput:
        """A step that decodes one token of each sequence, with as much context as the cache could hold."""
        lengths = _lengths(self._rows, self._cache_tokens, self._longest, least=1)
        return self._scheduled([(length - 1, length) for length in lengths])

    def _scheduled(self, bounds: list[tuple[int, int]]) -> SchedulerOutput:
        """Chunks start .. stop-1; a token is sampled after each."""
        chunks = []
        for number, (start, stop) in enumerate(bounds):
            request = Request(params=_ALL_FEATURES, max_new_tokens=1, seed=number, adapter_number=1)
            sequence = TokenSequence(number, self._ids, request, guide=_ANY_TOKEN)
            sequence.counts = counts_for(_ALL_FEATURES, [])
            if sequence.counts is not None:
                sequence.counts.add(0)
            sequence.blocks = [0] * -(-stop // self._runner.kv_cache.block_size)
            state = None if self._runner.state_pool is None else ChunkState(0, [])
            chunks.append(ScheduledChunk(sequence, start, stop, True, sequence.blocks, state=state))
        return SchedulerOutput(chunks)

    def _compute(self, scheduled: SchedulerOutput) -> None:
        """A step as the engine computes it, with a constraint and all of `_ALL_FEATURES` for each request."""
        block_size, pool = self._runner.kv_cache.block_size, self._runner.state_pool
        batch = RaggedBatch.build(scheduled, block_size, self._model.device, state_pool=pool)
        logits, rows = self._runner.forward(batch), len(scheduled.to_sample)
        bitmask = torch.from_numpy(full_bitmask(self._model.vocab_size))
        masks = TokenMasks(bitmask.expand(rows, -1), [None] * rows)
        PendingSample(scheduled, logits, self._sampler, batch.scoring, masks).get()


def _lengths(count: int, total: int, longest: int, least: int) -> list[int]:
    """`count` numbers from `least` to `longest` that add up to `total` if possible, the largest ones first."""
    lengths = []
    for _ in range(count):
        lengths.append(max(min(longest, total), least))
        total -= lengths[-1]
    return lengths
