"""Measures time on a device, and makes steps to measure."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from cbatch.runtime.batch import RaggedBatch


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
