"""How near attention on the CPU comes to what the processor can do.

    python -m scripts.benchmarks attention

A chunk of a prompt behind so many tokens is held by arithmetic: its share is that of the rate at which a product with
packed weights of the same depth, with as many rows, is computed; half of the last chunk's own tokens are masked, and do
not count. Decoding requests are held by memory: their share is that of the bandwidth at which all threads read a large
array. All are measured by turns, on one layer. CBATCH_CPU names a smaller instruction set.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from cbatch.kernels.cpu.attention import attend_layer
from cbatch.kernels.cpu.paged_kv import AttentionParams, new_attention_workspace, plan_attention
from cbatch.kernels.cpu.tensors import block_shapes, element_of, paged_kv_of
from cbatch.kernels.cpu.thread_pool import shared_thread_pool
from cbatch.kernels.formats import BFLOAT16
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.cpu import empty, num_threads
from cbatch.runtime.kv_cache import U8, LayerShape
from scripts.benchmarks.harness import Report, at_least_one, by_turns
from scripts.benchmarks.products import Products

BLOCK_SIZE = 64
CHUNK = 512
"""Tokens of a prompt in a step."""


class Heads(NamedTuple):
    query: int
    kv: int
    dim: int


SHAPES = {"135M Llama": Heads(9, 3, 64), "Qwen3-0.6B": Heads(16, 8, 128), "Llama 3B": Heads(24, 8, 128)}

_ARENA_BYTES = 2**28
"""Of the caches of all layers, which follow each other: they do not fit into the processor's caches."""

_SECONDS = 0.05
"""About how long one measurement takes."""

_PRODUCT_ROWS = 96
"""As many as attention multiplies with a part of the keys before the next."""


class Attention:
    """The attention of some chunks, each `tokens` long behind `before` others, over random keys and values."""

    def __init__(self, heads: Heads, sequences: int, before: int, tokens: int, kv_dtype: torch.dtype) -> None:
        self.pool = shared_thread_pool(num_threads())
        blocks = -(-(before + tokens) // BLOCK_SIZE)
        starts, stops = [before] * sequences, [before + tokens] * sequences
        tables = np.arange(sequences * blocks, dtype=np.int32).reshape(sequences, blocks)
        places = np.arange(before, before + tokens)
        slots = (tables[:, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE).reshape(-1).astype(np.int64)
        every = np.arange(len(slots))
        batch = RaggedBatch(every, every, slots, every, tables, starts, stops, torch.device("cpu"))
        seen = sum(range(before + 1, before + tokens + 1)) * sequences
        self.flops = 4 * seen * heads.query * heads.dim
        shapes = block_shapes(LayerShape(heads.kv, heads.dim, heads.dim), BLOCK_SIZE, kv_dtype)
        sizes = [int(np.prod(shape)) * kv_dtype.itemsize * tables.size for shape in shapes]
        self.bytes = sum(sizes) * (before + tokens) // (blocks * BLOCK_SIZE)
        element = element_of(torch.bfloat16)
        plan = plan_attention(batch, BLOCK_SIZE, heads.query, heads.query // heads.kv, heads.dim)
        generator = np.random.default_rng(0)
        query = generator.integers(0x3F00, 0x3F80, (len(slots), heads.query * heads.dim)).astype(np.uint16)
        workspace = new_attention_workspace(self.pool.size, heads.query // heads.kv, heads.dim, heads.dim, element)
        params = AttentionParams(heads.dim**-0.5, 0, 0, 0.0, np.empty(0, np.float32))
        count = -(-_ARENA_BYTES // self.bytes)
        arenas = [torch.from_numpy(empty(count * size, np.uint8)).fill_(0x3C).view(kv_dtype) for size in sizes]
        self._layers = []
        for layer in range(count):
            keys, values = (
                arena.view(count, tables.size, *shape)[layer] for arena, shape in zip(arenas, shapes, strict=True)
            )
            kv = paged_kv_of(keys, values, element)
            self._layers.append((kv, plan, params, query, np.empty_like(query), workspace))
        self._next = 0

    def seconds_of(self) -> Callable[[], float]:
        """Measures the seconds of a layer."""

        def run(times: int) -> float:
            begun = time.perf_counter()
            for _ in range(times):
                self.pool.run(attend_layer, *self._layers[self._next % len(self._layers)])
                self._next += 1
            return (time.perf_counter() - begun) / times

        run(1)
        times = max(1, round(_SECONDS / min(run(1) for _ in range(3))))
        return lambda: run(times)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), action="append", help="heads (all)")
    add("--rounds", type=at_least_one, default=7, help="medians are printed (%(default)s)")


def run(options: argparse.Namespace, report: Report) -> int:
    for shape in options.shape or SHAPES:
        heads = SHAPES[shape]
        product = Products(shared_thread_pool(num_threads()), BFLOAT16, heads.dim, 8192, _PRODUCT_ROWS, 1)
        works = {
            f"{sequences} × {tokens} behind {before}, KV {name}": Attention(heads, sequences, before, tokens, dtype)
            for sequences, before, tokens in ((1, 5632, CHUNK), (1, 15872, CHUNK), (1, 8000, 1), (16, 8000, 1))
            for name, dtype in (("bfloat16", torch.bfloat16), ("u8", U8))
        }
        ways: dict[str, Callable[[], float]] = {name: work.seconds_of() for name, work in works.items()}
        ways |= {
            "bandwidth": product.bandwidth,
            "rate": product.matrix_rate,
            "product": product.seconds_of(_PRODUCT_ROWS),
        }
        found = {way: median(times) for way, times in by_turns(ways, options.rounds).items()}
        rate = 2 * _PRODUCT_ROWS * product.depth * product.columns / found["product"]
        report.line(f"{shape}: {heads.query} heads of {heads.dim}, {heads.kv} of the cache")
        report.line(f"a product of depth {heads.dim} reaches {rate / found['rate']:.0%} of the matrix rate")
        table = [["chunks", "µs", "TFLOP/s", "of such a product", "of the matrix rate", "GB/s", "of the bandwidth"]]
        for name, work in works.items():
            seconds = found[name]
            flops, speed = work.flops / seconds, work.bytes / seconds
            table.append([
                name, f"{1e6 * seconds:.0f}", f"{flops / 1e12:.2f}", f"{flops / rate:.0%}",
                f"{flops / found['rate']:.0%}", f"{speed / 1e9:.1f}", f"{speed / found['bandwidth']:.0%}",
            ])  # fmt: skip
            report.figures[f"{shape}, {name}"] = {
                "seconds": seconds, "flop/s": flops, "share of a product": flops / rate, "bytes/s": speed,
                "share of bandwidth": speed / found["bandwidth"],
            }  # fmt: skip
        report.table(table)
        report.line()
    return 0
