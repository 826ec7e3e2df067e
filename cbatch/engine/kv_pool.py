"""The memory of the paged KV cache, and how much of the device it may take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cbatch.engine.cpu.memory import empty
from cbatch.engine.errors import ConfigError
from cbatch.engine.units import format_bytes, parse_memory


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores for each token: `heads` keys of `key_dim` and values of `value_dim`."""

    heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.heads * (self.key_dim + self.value_dim) * dtype.itemsize


Shape = tuple[int, ...]


class KVPool:
    """Keys and values of every layer, in blocks, as the attention backend lays them out.

    shapes         [layers] shapes of the keys and of the values of a block
    keys[layer]    [num_blocks, *shape], and values likewise
    stacks         both with all layers in one tensor [layers, num_blocks, *shape]; None where layers differ
    kept           what a model's kernels want to know of them, made once; None before that
    """

    def __init__(
        self,
        shapes: list[tuple[Shape, Shape]],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.stacks: tuple[Tensor, Tensor] | None = None
        self.kept: Any = None
        make = partial(_empty, dtype=dtype, device=device)
        if len(set(shapes)) == 1:
            keys, values = (make(len(shapes), num_blocks, *shape) for shape in shapes[0])
            self.stacks = keys, values
            self.keys, self.values = list(keys), list(values)
        else:
            self.keys = [make(num_blocks, *shape) for shape, _ in shapes]
            self.values = [make(num_blocks, *shape) for _, shape in shapes]


def _empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.empty(*shape, dtype=dtype, device=device)
    # numpy asks the system for large pages, so that scattered blocks are found without walking its tables.
    return torch.from_numpy(empty(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def choose_num_blocks(
    *,
    memory: str | None,
    num_blocks: int | None,
    bytes_per_block: int,
    blocks_wanted: int,
    device: torch.device,
) -> int:
    """How many blocks the cache gets, after the weights are loaded.

    memory:        `4GiB`, `512MiB`, or `90%` of what is free; None: 90% on a GPU, 25% on a CPU.
    num_blocks:    an exact number, which goes before memory.
    blocks_wanted: enough for every seat with a full context; more would never be used.

    Raises ConfigError where not even one block fits, or the text cannot be read.
    """
    free = free_memory(device)
    wanted = memory if memory is not None else ("90%" if device.type == "cuda" else "25%")
    granted = parse_memory(wanted, free) if num_blocks is None else num_blocks * bytes_per_block
    if granted > free:
        asked = format_bytes(granted)
        raise ConfigError(f"A KV cache of {asked} was asked for, and {format_bytes(free)} are free on {device}.")
    if num_blocks is not None:
        return num_blocks
    fitting = granted // bytes_per_block
    if fitting < 1:
        raise ConfigError(f"--kv-cache-memory {wanted} does not hold one block of {format_bytes(bytes_per_block)}.")
    return min(fitting, blocks_wanted)


def check_memory(text: str | None) -> None:
    """Raises ConfigError for an amount that cannot be read, so that nobody waits for a model to learn it."""
    if text is not None:
        parse_memory(text, free=0)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on the device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    return int(psutil.virtual_memory().available)
