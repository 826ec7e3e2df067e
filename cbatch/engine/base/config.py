"""What an engine loads, and how much of the machine it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine loads and how much of the machine it takes.

    model:            folder or hub id of a causal language model; None is the bundled demo model
    revision:         branch, tag or commit on the hub
    device:           auto, cpu, cuda or cuda:N
    dtype:            auto, float32, bfloat16 or float16
    max_seqs:         most requests that run at once; None: 256 on a GPU, 32 on a CPU
    max_batch_tokens: token budget of one step; None: 2048 on a GPU, 512 on a CPU
    block_size:       tokens in a block of the KV cache
    kv_cache_memory:  `4GiB`, or `90%` of what is free; None: 90% on a GPU, 25% on a CPU. On a GPU a share is never so
                      large that a step finds no room
    kv_blocks:        exact number of blocks, instead of kv_cache_memory
    prefix_cache:     whether prompts that begin alike share what is computed of them
    attention:        auto, or the name of a backend
    cuda_graphs:      whether decode steps on a GPU are recorded and replayed, where the model's path allows it
    run_ahead:        whether the device computes a step while the host takes in the one before; None: on a GPU
    target_step_ms:   milliseconds that a step is to take at most while rows decode, by taking fewer tokens of prompts;
                      `auto`: 1.75 times what a step without prompts takes; None: no matter
    quantize:         int8 keeps the weights of the CPU's fast path in a byte each; None: as they are
    """

    model: str | None = None
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_seqs: int | None = None
    max_batch_tokens: int | None = None
    block_size: int = 16
    kv_cache_memory: str | None = None
    kv_blocks: int | None = None
    prefix_cache: bool = True
    attention: str = "auto"
    cuda_graphs: bool = True
    run_ahead: bool | None = None
    target_step_ms: float | Literal["auto"] | None = None
    quantize: str | None = None
