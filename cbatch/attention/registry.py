"""Chooses the attention backend of a model on a device, or of one whose layers are on several devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from cbatch.attention.base import AttendOptions, AttentionBackend
from cbatch.attention.reference import ReferenceAttention
from cbatch.base.errors import ConfigError
from cbatch.base.quantization import ACTIVATIONS, WEIGHTS, Quantization
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.device import has_bfloat16, is_accelerator, is_nvidia
from cbatch.runtime.kv_cache import FP8, U8, LayerShape, Shape
from cbatch.runtime.transfer import use_device

BACKENDS = {"cpu": "a CPU", "triton": "an NVIDIA GPU", "reference": "any device"}
"""The backends, and what each runs on."""


def check_attention(name: str, device: torch.device, block_size: int) -> None:
    """Raises ConfigError for a backend that does not exist, or cannot serve any model here."""
    if name not in ("auto", *BACKENDS):
        raise ConfigError(f"There is no attention backend {name!r}; choose auto or one of: {', '.join(BACKENDS)}.")
    if name not in ("auto", "reference", _own_backend(device)):
        raise ConfigError(f"The attention backend {name} runs on {BACKENDS[name]}, not on {device}; choose auto.")
    if name == "cpu" and block_size % 16:
        raise ConfigError(f"The attention backend cpu needs blocks of a multiple of 16 tokens, not {block_size}.")


def _own_backend(device: torch.device) -> str:
    """The backend that was made for the device."""
    return "cpu" if not is_accelerator(device) else "triton" if is_nvidia(device) else "reference"


def has_fast_path(name: str, device: torch.device, block_size: int) -> bool:
    """Whether a model with a program may take the fast path, as far as is known before it is loaded."""
    own = _own_backend(device)
    return "reference" not in (name, own) and (own == "triton" or block_size % 16 == 0)


def check_quantize(name: str | None, activations: str, *, fast: bool) -> Quantization | None:
    """How to quantize the weights. Raises ConfigError for an unknown type, and without a fast path for it."""
    if activations not in ACTIVATIONS:
        raise ConfigError(f"Activations cannot be rounded to {activations!r}; choose one of: {', '.join(ACTIVATIONS)}.")
    if name is None:
        return None
    if name not in WEIGHTS:
        raise ConfigError(f"Weights cannot be quantized to {name!r}; choose one of: {', '.join(WEIGHTS)}.")
    if not fast:
        raise ConfigError(
            f"Only the fast path of a CPU or an NVIDIA GPU has {name} weights: use --attention auto, and blocks of a "
            "multiple of 16 tokens; --device cpu has them on any machine."
        )
    return Quantization(name, activations)


def check_kv_dtype(name: str, attention: str, device: torch.device) -> torch.dtype | None:
    """The type of the KV cache; None: that of the model. Raises ConfigError if nothing here stores keys in it."""
    if name == "auto":
        return None
    if name not in ("fp8", "u8"):
        raise ConfigError(f"The KV cache cannot be kept in {name!r}; choose auto, fp8 or u8.")
    if name == "u8":
        if attention == "reference" or _own_backend(device) != "cpu":
            raise ConfigError(
                "Only the CPU's attention kernels have a KV cache in u8: use --device cpu and --attention auto or cpu, "
                "or --kv-dtype auto."
            )
        return U8
    if attention != "reference" and _own_backend(device) == "cpu":
        raise ConfigError(
            "The CPU's attention kernels have no KV cache in fp8: use --kv-dtype u8, which takes as little, or "
            "--attention reference, which is slow."
        )
    return FP8


def select_attention(
    name: str,
    device: torch.device,
    layers: list[LayerShape],
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> AttentionBackend:
    """The backend of that name, or for `auto` the fastest. Raises ConfigError if it cannot serve the model.

    kv_dtype:        see `check_kv_dtype`
    batch_invariant: see `AttentionBackend`; the reference never is
    """
    check_attention(name, device, block_size)
    named = _own_backend(device)
    if "reference" in (name, named):
        return ReferenceAttention(kv_dtype)
    backend: AttentionBackend | None
    try:
        if named == "cpu":
            from cbatch.attention.cpu import CpuAttention
            from cbatch.kernels.cpu import tensors

            backend = CpuAttention(kv_dtype) if tensors.fits(layers, block_size, dtype, kv_dtype) else None
        else:
            from cbatch.attention import triton

            fits = (dtype != torch.bfloat16 or has_bfloat16(device)) and triton.fits(layers, dtype, device)
            make = triton.TritonAttention
            backend = make(device, kv_dtype=kv_dtype, batch_invariant=batch_invariant) if fits else None
    except ImportError as error:  # numba and Triton do not exist for every platform of torch
        if name == named:
            raise ConfigError(f"The attention backend {name} is not available: {error}.") from error
        return ReferenceAttention(kv_dtype)
    if backend is None and name == named:
        raise ConfigError(f"The attention backend {name} does not serve this model in {dtype}; choose auto.")
    return backend or ReferenceAttention(kv_dtype)


class PerDeviceAttention:
    """The same backend once for each device. Each layer is served by that of its device.

    Blocks are laid out alike everywhere, and a step is prepared on each device that has layers.
    """

    graph_buffers = None

    def __init__(self, backends: Mapping[torch.device, AttentionBackend]) -> None:
        """backends: of the same name and the same type of KV cache"""
        self.backends = backends
        any_of_them = next(iter(backends.values()))
        self.name, self.kv_dtype = any_of_them.name, any_of_them.kv_dtype
        self.gathers_kv, self.batch_invariant = any_of_them.gathers_kv, any_of_them.batch_invariant

    def block_shapes(self, layer: LayerShape, block_size: int, dtype: torch.dtype) -> tuple[Shape, Shape]:
        return next(iter(self.backends.values())).block_shapes(layer, block_size, dtype)

    def prepare(self, batch: RaggedBatch, block_size: int) -> Any:
        with use_device(batch.device):
            return self.backends[batch.device].prepare(batch, block_size)

    def store_kv(self, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, metadata: Any) -> None:
        with use_device(keys.device):
            self.backends[keys.device].store_kv(keys, values, new_keys, new_values, metadata)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, metadata: Any, **options: Unpack[AttendOptions]
    ) -> Tensor:
        with use_device(keys.device):
            return self.backends[keys.device].attend(query, keys, values, metadata, **options)
