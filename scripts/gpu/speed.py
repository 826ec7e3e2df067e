"""Measures attention and whole steps, and compares them with what the device can do at best."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from cbatch.attention.triton import TritonAttention
from cbatch.cli.bench.roofline import DeviceRates
from cbatch.engine.cuda_graphs import GraphSizes, StepGraphs, StepParts
from cbatch.kernels.triton.attention_decode import DecodeTuning
from cbatch.kernels.triton.attention_prefill import PrefillTuning
from cbatch.model.cuda import CudaModel
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.kv_cache import KVCache, LayerShape
from cbatch.runtime.state_pool import StatePool, StepStates
from cbatch.sample.sampler import Sampler
from scripts.benchmarks.shapes import Config

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Line:
    """One measurement; `share` is its share of the device's rate.

    kind, rows: what was measured for how many sequences or requests, for whoever reads the JSON
    """

    what: str
    figure: float
    unit: str
    share: float
    kind: str
    rows: int

    def __str__(self) -> str:
        return f"{self.what}: {self.figure:.4g} {self.unit}, {self.share:.0%} of the device's rate"


def seconds(work: Callable[[], Any], device: torch.device, repeats: int = 10, rounds: int = 3) -> float:
    """Seconds of one call of `work`: the median of some rounds, after one that does not count. A CPU does one."""
    if device.type == "cpu":
        repeats = rounds = 1
    times = []
    for _ in range(rounds + 1):
        wait(device)
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        wait(device)
        times.append((time.perf_counter() - start) / repeats)
    return sorted(times[1:])[rounds // 2]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_batch(
    starts: Sequence[int], stops: Sequence[int], num_blocks: int, block_size: int, vocabulary: int, device: torch.device
) -> RaggedBatch:
    """A step over tokens `starts` to `stops` of sequences whose blocks lie anywhere in the cache; each gets logits."""
    chance = random.Random(0)
    free = list(range(num_blocks))
    chance.shuffle(free)
    needed = [-(-stop // block_size) for stop in stops]
    tables = np.zeros((len(stops), max(needed)), np.int32)
    for row, count in enumerate(needed):
        tables[row, :count] = [free.pop() for _ in range(count)]
    positions = np.concatenate([np.arange(start, stop) for start, stop in zip(starts, stops, strict=True)])
    counts = np.array(stops) - np.array(starts)
    sequence = np.repeat(np.arange(len(stops)), counts)
    slots = tables[sequence, positions // block_size] * np.int64(block_size) + positions % block_size
    ids = np.array([chance.randrange(vocabulary) for _ in positions])
    return RaggedBatch(ids, positions, slots, counts.cumsum() - 1, tables, list(starts), list(stops), device)


class Cache:
    """The cache of one layer, filled with random numbers, and sequences in it."""

    def __init__(self, config: Config, starts: list[int], stops: list[int], device: torch.device) -> None:
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim, self.device = config["head_dim"], device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
        blocks = sum(-(-stop // BLOCK_SIZE) for stop in stops)
        shape = blocks, self.kv_heads, BLOCK_SIZE, self.dim
        self.keys, self.values = (torch.randn(shape, dtype=self.dtype, device=device) for _ in range(2))
        self.batch = make_batch(starts, stops, blocks, BLOCK_SIZE, 10, device)
        self.query = torch.randn(len(self.batch.input_ids), self.heads, self.dim, dtype=self.dtype, device=device)

    def seconds(self, attention: TritonAttention) -> float:
        metadata, scale = attention.prepare(self.batch, BLOCK_SIZE), self.dim**-0.5
        return seconds(lambda: attention.attend(self.query, self.keys, self.values, metadata, scale=scale), self.device)


def decode_lengths(sequences: int, device: torch.device) -> list[int]:
    low, high = (256, 8192) if device.type == "cuda" else (8, 64)
    chance = random.Random(3)
    return [round(math.exp(chance.uniform(math.log(low), math.log(high)))) for _ in range(sequences)]


def decode_cache(config: Config, sequences: int, device: torch.device) -> Cache:
    lengths = decode_lengths(sequences, device)
    return Cache(config, [length - 1 for length in lengths], lengths, device)


def decode_line(what: str, cache: Cache, attention: TritonAttention, rates: DeviceRates) -> Line:
    """Bytes of keys and values that a layer reads per second."""
    bytes_ = 2 * sum(cache.batch.stops) * cache.kv_heads * cache.dim * cache.dtype.itemsize
    rate = bytes_ / cache.seconds(attention)
    return Line(what, rate / 1e9, "GB/s", rate / rates.bytes_per_s, "decode attention", len(cache.batch.stops))


def prefill_line(
    what: str, config: Config, chunks: int, past: int, tokens: int, rates: DeviceRates, attention: TritonAttention
) -> Line:
    """Operations of a layer per second, counting the pairs of tokens that causal attention needs."""
    cache = Cache(config, [past] * chunks, [past + tokens] * chunks, attention.device)
    pairs = chunks * (tokens * past + tokens * (tokens + 1) // 2)
    rate = 4 * pairs * cache.heads * cache.dim / cache.seconds(attention)
    return Line(what, rate / 1e12, "TFLOP/s", rate / rates.flops_per_s, "prefill attention", chunks)


def attention_lines(shapes: dict[str, Config], rates: DeviceRates, device: torch.device) -> Iterator[Line]:
    attention, on_gpu = TritonAttention(device), device.type == "cuda"
    for name, config in shapes.items():
        for sequences in (256, 32, 1) if on_gpu else (3,):
            cache = decode_cache(config, sequences, device)
            yield decode_line(f"{name}, decode attention, {sequences} sequences", cache, attention, rates)
            del cache
        for chunks, past, tokens in ((4, 0, 2048), (4, 4096, 512), (1, 0, 8192)) if on_gpu else ((2, 8, 16),):
            what = f"{name}, prefill attention, {chunks} chunks of {tokens} behind {past}"
            yield prefill_line(what, config, chunks, past, tokens, rates, attention)


def sweep_lines(config: Config, rates: DeviceRates, device: torch.device) -> Iterator[Line]:
    """Measures other settings of the kernels, to find better ones. Each is compiled first."""
    cache = decode_cache(config, 256, device)
    on_gpu = device.type == "cuda"
    for tile, stages, warps in itertools.product((8192, 16384, 32768), (3, 5, 7), (2, 4, 8) if on_gpu else (4,)):
        what = f"decode, tiles of {tile} bytes, {stages} stages, {warps} warps"
        try:
            attention = TritonAttention(device, DecodeTuning(tile_bytes=tile, stages=stages, warps=warps))
            yield decode_line(what, cache, attention, rates)
        except Exception as error:  # some settings need more of the device than there is
            print(f"{what}: {type(error).__name__}")
    chunks, length = (4, 2048) if on_gpu else (2, 16)
    for rows, warps, tokens, stages in itertools.product((64, 128), (4, 8), (32, 64, 128), (2, 3, 5)):
        what = f"prefill, tiles of {rows} rows by {tokens} tokens, {stages} stages, {warps} warps"
        tuning = PrefillTuning(rows=rows, warps=warps, tokens=tokens, stages=stages)
        try:
            attention = TritonAttention(device, prefill=tuning)
            yield prefill_line(what, config, chunks, 0, length, rates, attention)
        except Exception as error:
            print(f"{what}: {type(error).__name__}")


def step_lines(name: str, decoder: CudaModel, rates: DeviceRates) -> Iterator[Line]:
    """Measures decode steps by their number of requests, as graphs and as single launches.

    They are compared with the time in which the device reads the weights and the context, and reads and writes the
    states of recurrent layers.
    """
    device, attention = decoder.device, TritonAttention(decoder.device)
    on_gpu = device.type == "cuda"
    context, sizes = (1024, (1, 4, 16, 64, 128, 256)) if on_gpu else (20, (2,))
    blocks = max(sizes) * -(-context // BLOCK_SIZE)
    shape: LayerShape = decoder.layers[0]
    shapes = [attention.block_shapes(layer, BLOCK_SIZE, decoder.dtype) for layer in decoder.layers]
    kv_cache = KVCache(shapes, blocks, BLOCK_SIZE, decoder.dtype, device)
    for tensor in kv_cache.flat or ():
        tensor.zero_()
    states = StatePool(decoder.states, max(sizes), device) if decoder.states else None
    if states is not None:
        states.zero(range(max(sizes)))
    parts = StepParts(decoder, attention, kv_cache, Sampler(device), states)
    graphs = StepGraphs(parts, GraphSizes(sizes, (), max(sizes)), None if on_gpu else lambda run: run)
    moved = context * len(decoder.layers) * shape.bytes_per_token(decoder.dtype)
    moved += 2 * states.slot_bytes if states is not None else 0
    for rows in sizes:
        batch = make_batch([context - 1] * rows, [context] * rows, blocks, BLOCK_SIZE, decoder.vocab_size, device)
        if states is not None:
            batch = replace(batch, states=StepStates(states, np.arange(rows), np.zeros(rows, int), np.full(rows, -1)))
        floor = (decoder.linear_cost.weight_bytes + rows * moved) / rates.bytes_per_s
        ways: dict[str, Callable[[], Any]] = {
            "a graph": partial(graphs.forward, batch),
            "launched": partial(decoder.forward, batch, kv_cache, attention),
        }
        for way, forward in ways.items():
            with torch.inference_mode():
                forward()  # kernels may have to be compiled
                elapsed = seconds(forward, device, 10 if on_gpu else 1)
            what = f"{name}, decode step of {rows} rows, {way}"
            yield Line(what, elapsed * 1e3, "ms", floor / elapsed, "decode step", rows)
