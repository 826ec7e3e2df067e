"""Configuration of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cbatch.engine.base.errors import ConfigError

DEVICE_VARIABLE = "CBATCH_DEVICE"
"""The environment variable that says what `auto` is."""

CPU_CACHE_SHARE = "25%"
"""What the KV cache takes of free memory if nothing is said, where the device works in the memory of the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine loads, and how much of the machine it uses.

    model:            folder or Hugging Face hub id of a causal language model; None: the bundled demo model
    revision:         branch, tag or commit on the hub
    device:           auto, cpu, cuda, cuda:N, xpu or mps
    dtype:            auto, float32, bfloat16 or float16
    max_seqs:         most requests that run at once; None: 256 on a GPU, 32 on a CPU
    max_batch_tokens: token budget of one step; longer prompts are computed in chunks; None: 2048 on a GPU, 512 on a CPU
    block_size:       tokens in one block of the KV cache
    kv_cache_memory:  `4GiB`, or `90%` of free memory; None: 90% on a GPU, 25% on a CPU. On a GPU, a percentage is
                      reduced as needed, so that the largest step still fits
    kv_blocks:        exact number of blocks, instead of kv_cache_memory
    prefix_cache:     compute the common beginning of prompts only once
    attention:        auto, or the name of an attention backend
    cuda_graphs:      replay steps on a GPU as CUDA graphs, if model and attention backend allow it
    run_ahead:        overlap scheduling with execution; None: on an NVIDIA or AMD GPU only
    target_step_ms:   longest time of a step in milliseconds while requests decode; prompts get fewer tokens to keep to
                      it. `auto`: 1.75 times the time of a step without prompts; None: no limit
    kv_dtype:         type of the KV cache. auto: that of the model; fp8: one byte for each number, on a GPU
    quantize:         int8: store weights in one byte each (fast path on a CPU only); None: as they are
    weights_folder:   folder of this user alone, where engines of this machine share packed weights (fast path on a CPU
                      only); None: each engine packs its own
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
    kv_dtype: str = "auto"
    quantize: str | None = None
    weights_folder: str | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for a value of another type, or a number below 1."""
        for name in ("max_seqs", "max_batch_tokens", "block_size", "kv_blocks"):
            value = getattr(self, name)
            if value is None and name != "block_size":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}.")
        for name in ("prefix_cache", "cuda_graphs", "run_ahead"):
            if not isinstance(getattr(self, name), bool | None):
                raise ConfigError(f"{name} must be True or False, not {getattr(self, name)!r}.")
        always = ("kv_dtype", "device", "dtype", "attention")
        for name in ("model", "revision", "quantize", "weights_folder", "kv_cache_memory", *always):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name in always):
                example = ', such as "4GiB" or "90%"' if name == "kv_cache_memory" else ""
                raise ConfigError(f"{name} must be a text{example}, not {value!r}.")
