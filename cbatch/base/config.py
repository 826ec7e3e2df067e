"""Configuration of an engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cbatch.base.errors import ConfigError
from cbatch.base.units import parse_memory

DEVICE_VARIABLE = "CBATCH_DEVICE"
"""The environment variable that says what `auto` is."""

CPU_CACHE_SHARE = "25%"
"""What the KV cache takes of free memory if nothing is said, where the device works in the memory of the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine loads, and how much of the machine it uses.

    model:            folder or Hugging Face hub id of a causal language model, a GGUF file, or one on the hub as
                      `ID:FILE.gguf`; None: the bundled demo model
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
    deterministic:    give a token the same bits whatever else is in its step, however its prompt was cut and whether it
                      was preempted; on a GPU that takes time (see docs/gpu.md)
    cuda_graphs:      replay steps on a GPU as CUDA graphs, if model and attention backend allow it
    run_ahead:        overlap scheduling with execution; None: on an NVIDIA or AMD GPU only
    target_step_ms:   longest time of a step in milliseconds while requests decode; prompts get fewer tokens to keep to
                      it. `auto`: 1.75 times the time of a step without prompts; None: no limit
    speculate:        most tokens that are drafted for a request in a step, off, or auto: as many as pay, on the fast
                      path of a CPU (see docs/speculation.md)
    state_slots:      exact number of slots for recurrent states, running requests and snapshots together, of a model
                      that has any; None: as many as are of use and fit
    state_dtype:      type of recurrent states. auto: that in which the model's reference has them; bfloat16 or float16:
                      half of that
    kv_dtype:         type of the KV cache. auto: that of the model; fp8: one byte for each number, on a GPU; u8: one
                      byte for each number, and a scale for those of a token and head, on a CPU
    quantize:         int8: store weights in one byte each; int4: in half a byte, but the head (fast path only); None:
                      as they are
    activations:      how products with quantized weights round what they multiply them with. On a CPU: int8, or bf16,
                      which is slower and loses nothing. On a GPU only fp8 does something: it rounds for FP8 weights, if
                      the chip multiplies FP8
    weight_cache:     keep packed weights in a file, which later engines and those of other processes map (fast path on
                      a CPU only, on Linux)
    weight_cache_size: the most that these files may take: `50GiB`, or a share of what their disk would have free
                      without them; None: 50%
    weights_folder:   folder of this user alone for these files, also of small models; None: `~/.cache/cbatch/weights`
    device_map:       auto: spread a model that is larger than its device over CUDA GPUs, CPU memory and disk; none:
                      keep it on its device
    max_memory:       most memory that weights may take on a device when they are spread, such as {"cuda:0": "20GiB",
                      "cpu": "50%"}; of the others 80% of what is free
    offload_folder:   folder for weights that are rewritten for the disk; None: that of temporary files
    lora:             LoRA adapters that requests may name, in folders or hub ids: {"sql": "adapters/sql"}
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
    deterministic: bool = False
    cuda_graphs: bool = True
    run_ahead: bool | None = None
    target_step_ms: float | Literal["auto"] | None = None
    speculate: int | Literal["auto", "off"] = "auto"
    state_slots: int | None = None
    state_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_dtype: str = "auto"
    quantize: str | None = None
    activations: str = "int8"
    weight_cache: bool = True
    weight_cache_size: str | None = None
    weights_folder: str | None = None
    device_map: Literal["none", "auto"] = "none"
    max_memory: Mapping[str, str | int] | None = None
    offload_folder: str | None = None
    lora: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for a value of another type, or a number below 1."""
        for name in ("max_seqs", "max_batch_tokens", "block_size", "kv_blocks", "state_slots"):
            value = getattr(self, name)
            if value is None and name != "block_size":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}.")
        for name in ("prefix_cache", "deterministic", "cuda_graphs", "run_ahead", "weight_cache"):
            if not isinstance(getattr(self, name), bool | None):
                raise ConfigError(f"{name} must be True or False, not {getattr(self, name)!r}.")
        always = ("kv_dtype", "device", "dtype", "attention", "activations")
        sizes = ("kv_cache_memory", "weight_cache_size")
        for name in ("model", "revision", "quantize", "weights_folder", "offload_folder", *sizes, *always):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name in always):
                example = ', such as "4GiB" or "90%"' if name in sizes else ""
                raise ConfigError(f"{name} must be a text{example}, not {value!r}.")
        if self.state_dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError(
                f"There is no state dtype {self.state_dtype!r}; choose auto, float32, bfloat16 or float16."
            )
        is_count = isinstance(self.speculate, int) and not isinstance(self.speculate, bool) and self.speculate >= 1
        if not is_count and self.speculate not in ("auto", "off"):
            raise ConfigError(f"speculate must be auto, off or a whole number of at least 1, not {self.speculate!r}.")
        if self.deterministic and self.activations == "fp8":
            raise ConfigError(
                "--activations fp8 multiplies by products of the library, which depend on the number of rows; leave it "
                "out with --deterministic."
            )
        self._check_device_map()
        self._check_lora()

    def _check_device_map(self) -> None:
        if self.device_map not in ("none", "auto"):
            raise ConfigError(f"There is no device map {self.device_map!r}; choose none or auto.")
        _check_max_memory(self.max_memory)
        if self.device_map == "none":
            for name in ("max_memory", "offload_folder"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"--{name.replace('_', '-')} is only for --device-map auto.")
        elif self.quantize is not None:
            raise ConfigError(
                "--device-map auto runs a model by the layers of transformers, which have no quantized weights here; "
                "leave out --quantize or --device-map."
            )

    def _check_lora(self) -> None:
        if self.lora is None:
            return
        if not isinstance(self.lora, Mapping) or not all(
            isinstance(text, str) and text for item in self.lora.items() for text in item
        ):
            raise ConfigError(
                'lora must give each adapter a name and a folder, such as {"sql": "adapters/sql"}, '
                f"not {self.lora!r}."
            )
        if self.lora and self.device_map == "auto":
            raise ConfigError("A model that is spread over devices takes no LoRA adapters; leave out --device-map.")


def _check_max_memory(limits: Any) -> None:
    """Raises ConfigError for limits that are not those of devices."""
    if limits is None:
        return
    if not isinstance(limits, Mapping):
        raise ConfigError(
            f'max_memory must say how much each device may hold, such as {{"cpu": "30GiB"}}, not {limits!r}.'
        )
    for device, amount in limits.items():
        if not isinstance(device, str) or not re.fullmatch(r"cpu|cuda:\d+", device):
            raise ConfigError(f"max_memory: there is no device {device!r}; write cpu or cuda:N.")
        if isinstance(amount, bool) or not isinstance(amount, int | str):
            raise ConfigError(f"max_memory: {amount!r} is not an amount of memory; write it as 4GiB, 500MiB or 90%.")
        parse_memory(str(amount), free=0)
