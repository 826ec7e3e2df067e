"""How near the CPU's matrix products come to what the processor can do.

    python -m scripts.benchmarks products

Each product is repeated over matrices that do not fit into the caches together. With one row it is held by memory: its
share is that of the bandwidth at which all threads read a large array. With many rows it is held by arithmetic: its
share is that of the rate at which all threads execute the instruction that multiplies, on registers alone: for bfloat16
that of float32 where there is no other. All are measured by turns. CBATCH_CPU names a smaller instruction set.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from cbatch.cli.bench.roofline import DeviceRates
from cbatch.kernels.cpu.activation import ActivationParams
from cbatch.kernels.cpu.emit import FLOATS, INT64, LITERAL, SHORTS, WORDS, Value, Variable, emitted, for_range
from cbatch.kernels.cpu.instruction_sets import CHOSEN
from cbatch.kernels.cpu.jit import entry
from cbatch.kernels.cpu.matmul.formats import CPU_FORMATS, is_quantized, left_bytes_of, matrix_bytes
from cbatch.kernels.cpu.matmul.instructions import BFLOATS, add_bfloat16, add_integers, add_squares
from cbatch.kernels.cpu.matmul.linear import WRITE, PackedMatrix, matmul, new_linear_workspace
from cbatch.kernels.cpu.matmul.microkernel import LANES, prefetch
from cbatch.kernels.cpu.thread_pool import ThreadPool, shared_thread_pool
from cbatch.kernels.cpu.work_queue import Worker, claimed
from cbatch.kernels.formats import BFLOAT16, FORMATS, INT4_ZEROS
from cbatch.runtime.cpu import empty, num_threads
from scripts.benchmarks.harness import Report, at_least_one, by_turns

SHAPES = {"135M Llama": (576, 1536), "Qwen3-0.6B": (1024, 3072), "Llama 3B": (3072, 8192)}
"""Depth and columns of a matrix of the feed-forward part."""

ROWS = (1, 8, 32, 128, 512)

_ARENA_BYTES = 2**28
_TRIES = 8
"""The best of so many measurements is what a processor can do."""

_SECONDS = 0.05
"""About how long one measurement takes."""

_STREAMS, _WORDS_OF_LINE, _LINES_AT_ONCE, _WORDS_AHEAD = 4, 8, 2, 512
"""Places that are read at once, and how far ahead lines are prefetched: some processors read a third faster then."""

_BYTE = 0x3F
"""All bytes of weights: an ordinary number in every format, for some processors take long for the smallest ones."""

_PIECE = 2**17
"""Words of a task that reads."""

_INSTRUCTIONS = {
    "float32": LANES,
    "bf16": LANES * (4 if CHOSEN.bfloat16_squares else 2 if CHOSEN.bfloat16 else 1),
    "int8": LANES * (8 if CHOSEN.quads_squares else 4),
    "int16": LANES * (2 if CHOSEN.pairs else 1),
}
"""Products of a vector that is multiplied."""

_SUMS, _LOOPS = CHOSEN.rows(panels=1), 200_000
"""Vectors that are added to, and how often, by a task that measures the rate of a product."""


@emitted(types.void, LITERAL, types.int64, types.int64)
def _emit_instructions(number: int, start: Value, loops: Value) -> None:
    """Multiplies in registers: numbers from an address, sums of which are written there."""
    name = tuple(_INSTRUCTIONS)[number]
    is_float = name == "float32" or (name == "bf16" and not CHOSEN.bfloat16)
    left_bytes = 1 if name == "int8" and (CHOSEN.quads or CHOSEN.shorts) else 2
    is_single = not is_float and name != "bf16" and left_bytes == 2 and not CHOSEN.pairs
    kind = FLOATS if is_float else BFLOATS if name == "bf16" else SHORTS if is_single else WORDS
    squares = {"bf16": CHOSEN.bfloat16_squares, "int8": CHOSEN.quads_squares}.get(name)
    one = start.read(ir.VectorType(INT64, 2) if squares else kind)
    is_real = is_float or name == "bf16"
    sums = [Variable((start + 128).read(FLOATS if is_real else WORDS)) for _ in range(_SUMS)]

    def multiply(total: Value, other: Value) -> Value:
        if is_float:
            return one.fma(other, total)
        if squares:
            return add_squares(total, one, other.bits(WORDS))
        return add_bfloat16(total, one, other) if is_real else add_integers(total, one, other, left_bytes)

    with for_range(loops) as loop:  # another vector each time: what does not change is computed once
        for number, each in enumerate(sums):
            each.value = multiply(each.value, (start + ((loop + number) & 3) * 64).read(kind))
    for index, each in enumerate(sums):
        (start + 64 * (3 + index)).write(each.value)


@entry
def _execute(worker: Worker, number: int, memory: Any, num_tasks: int, loops: int) -> None:
    for _ in claimed(worker, 0, num_tasks):
        if number == 0:
            _emit_instructions(0, memory[worker.thread].ctypes.data, loops)
        elif number == 1:
            _emit_instructions(1, memory[worker.thread].ctypes.data, loops)
        elif number == 2:
            _emit_instructions(2, memory[worker.thread].ctypes.data, loops)
        else:
            _emit_instructions(3, memory[worker.thread].ctypes.data, loops)


@entry
def _read(worker: Worker, words: Any, sums: Any) -> None:
    for task in claimed(worker, 0, len(words) // _PIECE):
        total = np.int64(0)
        for step in range(0, _PIECE // _STREAMS, _LINES_AT_ONCE * _WORDS_OF_LINE):
            for stream in range(_STREAMS):
                first = task * _PIECE + stream * (_PIECE // _STREAMS) + step
                for line in range(_LINES_AT_ONCE):
                    prefetch(words.ctypes.data + 8 * (first + _WORDS_AHEAD + line * _WORDS_OF_LINE))
                for word in range(first, first + _LINES_AT_ONCE * _WORDS_OF_LINE):
                    total += words[word]
        sums[worker.thread, 0] += total


@entry
def _multiply(worker: Worker, a: Any, matrix: Any, size: int, first: int, times: int, out: Any, workspace: Any) -> None:
    """So many products with the matrices that follow each other in memory, from that one on."""
    phase, matrices = 0, len(matrix.data) // size
    for index in range(first, first + times):
        each = PackedMatrix(matrix.data, index % matrices * size, matrix.format, matrix.scale, matrix.bias)
        phase = matmul(worker, phase, a, each, out, WRITE, ActivationParams(0, matrix.bias), workspace)


def _seconds(run: Callable[[], None]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


class Products:
    """Products with one shape of a matrix in one format."""

    def __init__(self, pool: ThreadPool, kind: int, depth: int, columns: int, rows: int, left_bytes: int) -> None:
        self.pool = pool
        self.depth = depth
        self.columns = columns
        self.size = matrix_bytes(kind, columns, depth)
        nothing = np.empty(0, np.float32)
        arena = empty(-(-_ARENA_BYTES // self.size) * self.size, np.uint8)
        arena[:] = _BYTE
        self.matrix = PackedMatrix(arena, 0, kind, nothing, nothing)
        self.workspace = new_linear_workspace(pool.size, [kind], depth, rows=rows, left_bytes=left_bytes)
        self.instruction = "bf16" if kind == BFLOAT16 else "float32"
        if is_quantized(kind):
            self.instruction = ("int8", "int16")[left_bytes_of(kind, left_bytes) - 1]
        self._next = 0

    def seconds_of(self, rows: int) -> Callable[[], float]:
        """Measures the seconds of a product."""
        generator = np.random.default_rng(0)
        bits = generator.standard_normal((rows, self.depth), dtype=np.float32).view(np.uint32)
        left, out = (bits >> 16).astype(np.uint16), empty((rows, self.columns), np.float32)

        def run(times: int) -> float:
            arguments = left, self.matrix, self.size, self._next, times, out, self.workspace
            self._next += times
            return _seconds(partial(self.pool.run, _multiply, *arguments)) / times

        run(1)
        times = max(1, round(_SECONDS / min(run(1) for _ in range(3))))
        return lambda: run(times)

    def bandwidth(self) -> float:
        """Bytes a second that all threads read."""
        words = self.matrix.data[: len(self.matrix.data) // (8 * _PIECE) * 8 * _PIECE].view(np.int64)
        sums = np.zeros((self.pool.size, 8), np.int64)
        return words.nbytes / _seconds(partial(self.pool.run, _read, words, sums))

    def matrix_rate(self) -> float:
        """Operations a second of the instruction, two for each product."""
        memory = np.full((self.pool.size, 64 * (_SUMS + 3)), _BYTE, np.uint8)
        tasks, number = 4 * self.pool.size, tuple(_INSTRUCTIONS).index(self.instruction)
        seconds = _seconds(partial(self.pool.run, _execute, number, memory, tasks, _LOOPS))
        return 2.0 * LANES * _INSTRUCTIONS[self.instruction] / LANES * _SUMS * _LOOPS * tasks / seconds

    def measure(self, sizes: Sequence[int], rounds: int) -> dict[int, dict[str, float]]:
        """For each number of rows medians: seconds, bytes a second, operations a second, and shares of what can be."""
        ways: dict[Any, Callable[[], float]] = {"bandwidth": self.bandwidth, "rate": self.matrix_rate}
        ways |= {rows: self.seconds_of(rows) for rows in sizes}
        found = {way: median(times) for way, times in by_turns(ways, rounds).items()}
        return {
            rows: {
                "seconds": found[rows],
                "bytes/s": self.size / found[rows],
                "share of bandwidth": self.size / found[rows] / found["bandwidth"],
                "flop/s": 2 * rows * self.depth * self.columns / found[rows],
                "share of matrix rate": 2 * rows * self.depth * self.columns / found[rows] / found["rate"],
            }
            for rows in sizes
        }


def device_rates(kinds: Iterable[int], left_bytes: int) -> DeviceRates:
    """The bandwidth, and the rate of the fastest instruction that products with matrices of these formats take.

    Products with one row read faster than `_read` on some processors; then their rate is the bandwidth.
    """
    pool = shared_thread_pool(num_threads())
    reading = Products(pool, BFLOAT16, *SHAPES["Llama 3B"], rows=1, left_bytes=left_bytes)
    seconds = reading.seconds_of(1)
    rates = [max(reading.bandwidth(), reading.size / seconds()) for _ in range(_TRIES)]
    each = [Products(pool, kind, LANES, LANES, 1, left_bytes) for kind in kinds]
    return DeviceRates(max(rates), max(products.matrix_rate() for products in each for _ in range(_TRIES)))


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), action="append", help="matrix (all)")
    add("--format", choices=CPU_FORMATS[BFLOAT16:], action="append", help="weights (bfloat16 and those of --quantize)")
    add("--rows", type=at_least_one, action="append", help=f"rows of a product ({', '.join(map(str, ROWS))})")
    add("--activations", choices=("int8", "bf16"), default="int8", help="with quantized weights (%(default)s)")
    add("--rounds", type=at_least_one, default=7, help="medians are printed (%(default)s)")


def run(options: argparse.Namespace, report: Report) -> int:
    sizes, left_bytes = options.rows or ROWS, 1 if options.activations == "int8" else 2
    pool = shared_thread_pool(num_threads())
    for shape in options.shape or SHAPES:
        depth, columns = SHAPES[shape]
        table = [["weights", "rows", "µs", "GB/s", "of the bandwidth", "TFLOP/s", "of the matrix rate"]]
        for name in options.format or FORMATS[BFLOAT16:INT4_ZEROS]:
            products = Products(pool, FORMATS.index(name), depth, columns, max(sizes), left_bytes)
            report.figures[f"{shape}, {name}"] = found = products.measure(sizes, options.rounds)
            for rows, figures in found.items():
                seconds, speed, of_bandwidth, rate, of_rate = figures.values()
                shares = f"{speed / 1e9:.1f}", f"{of_bandwidth:.0%}", f"{rate / 1e12:.2f}", f"{of_rate:.0%}"
                table.append([name, str(rows), f"{1e6 * seconds:.0f}", *shares])
        report.line(f"{shape}: depth {depth}, {columns} columns")
        report.table(table)
        report.line()
    return 0
