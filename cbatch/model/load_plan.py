"""Everything that decides how a model is loaded, in one record that is made once and handed down."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cbatch.attention.registry import check_attention, check_kv_dtype, check_quantize, has_fast_path
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.base.quantization import STORED, Quantization
from cbatch.base.units import parse_memory
from cbatch.model.device_map import DeviceMap, choose_device_map
from cbatch.model.ops.shards import WHOLE, Part
from cbatch.model.packed_file import PackedFile, WeightCache
from cbatch.model.tensor_files import Tensors
from cbatch.runtime.device import choose_device, gpu_name, has_bfloat16, is_accelerator
from cbatch.runtime.numba_setup import require_compiler

if TYPE_CHECKING:
    from cbatch.model.cpu import CpuModel
    from cbatch.model.cuda import CudaModel

_log = logging.getLogger("cbatch")

DEMO_MODEL = Path(__file__).parents[1] / "demo"
CALIBRATION_TEXT = Path(__file__).parent / "rounding" / "calibration.txt"
"""Prose, talk, code and tables, by whose tokens weights are rounded to 4 bits."""

CPU = torch.device("cpu")

_ROUNDING = 2
"""Raised when weights are rounded to other integers than before."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The plan of loading: the model, its device, and its formats.

    source:       a folder, a GGUF file, or a hub id
    dtype:        auto, or by name
    fast:         take the fast path if the model has one
    quantize:     round the matrices of the fast path to integers, whatever the files have
    activations:  how rows are rounded that are multiplied with integers which the files have (see `Quantization`)
    weight_cache: where packed weights are kept; for the fast path on a CPU
    device_map:   spread the model if it does not fit on its device
    reply_format: name of what the model writes, or auto
    chat_template: instead of the model's own
    kv_dtype:     of the KV cache; None: that of the model
    part:         which part of the model this process has, of several that compute it together
    ids:          tokens of `CALIBRATION_TEXT`
    """

    source: str = str(DEMO_MODEL)
    revision: str | None = None
    device: torch.device = CPU
    dtype: str = "auto"
    fast: bool = True
    quantize: Quantization | None = None
    activations: str = "int8"
    weight_cache: WeightCache | None = None
    device_map: DeviceMap | None = None
    reply_format: str = "auto"
    chat_template: str | None = None
    kv_dtype: torch.dtype | None = None
    part: Part = WHOLE
    ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: EngineConfig) -> LoadPlan:
        """The plan of a config. Raises ConfigError for requests that this machine cannot meet."""
        device = choose_device(config.device)
        if not is_accelerator(device):
            require_compiler()
        check_attention(config.attention, device, config.block_size)
        for size in (config.kv_cache_memory, config.weight_cache_size, config.media_cache):
            if size is not None:
                parse_memory(size, free=0)
        if "%" in config.media_cache:
            raise ConfigError("--media-cache is an amount of memory, such as 512MiB, and no share.")
        fast = has_fast_path(config.attention, device, config.block_size)
        quantize = check_quantize(config.quantize, config.activations, fast=fast)
        return cls(
            source=config.model or str(DEMO_MODEL),
            revision=config.revision,
            device=device,
            dtype=config.dtype,
            fast=fast,
            quantize=quantize,
            activations=config.activations,
            weight_cache=WeightCache.of_config(config),
            device_map=choose_device_map(config, device),
            reply_format=config.reply_format,
            chat_template=config.chat_template,
            kv_dtype=check_kv_dtype(config.kv_dtype, config.attention, device),
        )

    def formats(
        self, stored: torch.dtype | str | None, *, is_quantized: bool
    ) -> tuple[torch.dtype, Quantization | None]:
        """The dtype of a model on the fast path, and how its matrices are kept as integers, if they are.

        stored:       type of the weights in the files
        is_quantized: the files have integers. They stay so on a GPU, and beside bfloat16 on a CPU; else they become
                      numbers

        On a CPU, activations are rounded to int8 in place of fp8. Raises ConfigError for an unknown name, and on a CPU
        for one that cannot stand beside `quantize`.
        """
        dtype = choose_dtype(self.dtype, stored, self.device, by_kernels=True)
        on_cpu, quantize = not is_accelerator(self.device), self.quantize
        keeps = quantize is None or quantize.weights == "auto"
        if keeps and is_quantized and not (on_cpu and self.dtype not in ("auto", "bfloat16")):
            quantize = Quantization(STORED, self.activations)
        if quantize is None or not on_cpu:
            return dtype, quantize
        if quantize.activations == "fp8":
            quantize = replace(quantize, activations="int8")
        if self.dtype not in ("auto", "bfloat16"):
            raise ConfigError(
                f"Weights can be quantized to {quantize.weights} with --dtype bfloat16 only, not {self.dtype}."
            )
        return torch.bfloat16, quantize

    def fast_model(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        quantize: Quantization | None,
        files: Sequence[Path],
        fingerprint: Callable[[], str],
    ) -> CpuModel | CudaModel:
        """A model on the fast path, made of its config.json and its weights.

        dtype, quantize:    of `formats`
        files, fingerprint: what the weights come from, by which a cache finds them packed
        """
        rounded = None
        if quantize is not None and quantize.tries_4_bits and isinstance(tensors, Tensors):
            from cbatch.model.rounding.calibration import calibrated, chosen

            rounded = calibrated(config, tensors, self.device, self.ids)
            if quantize.weights == "auto":
                quantize = replace(quantize, weights=chosen(rounded))
                rounded = rounded if quantize.weights == "int4" else None
        weights = tensors if rounded is None else rounded
        is_causal = config.get("use_bidirectional_attention") is not True  # else the reference of attention serves it
        if is_accelerator(self.device) or self.part.size > 1 or not is_causal:
            from cbatch.model.cuda import CudaModel
            from cbatch.model.ops.device_kernel import by_torch

            ops = None if is_accelerator(self.device) and is_causal else by_torch()
            model: CpuModel | CudaModel = CudaModel(
                config, weights, dtype, self.device, ops, quantize=quantize, part=self.part
            )
        else:
            from cbatch.model.cpu import CpuModel

            shared = self._packed_file(dtype, quantize, files, fingerprint)
            model = CpuModel(config, weights, dtype, quantize=quantize, shared=shared, kv_dtype=self.kv_dtype)
        if rounded is not None:
            rounded.forget()
        return model

    def _packed_file(
        self, dtype: torch.dtype, quantize: Quantization | None, files: Sequence[Path], fingerprint: Callable[[], str]
    ) -> PackedFile | None:
        """Where the weights of a CPU's model are kept packed; None without a cache. See `fast_model`."""
        if self.weight_cache is None:
            return None
        from cbatch.model.ops.cpu_layout import PACKING

        # The fingerprint is of samples; sizes and times notice any other change.
        times = [(status.st_size, status.st_mtime_ns) for status in (path.stat() for path in files)]
        content = {"packing": PACKING, "model": fingerprint(), "files": times, "dtype": str(dtype)}
        weights: dict[str, Any] = {"quantize": None if quantize is None else quantize.weights}
        weights["rounding"] = _ROUNDING, zlib.crc32(repr(self.ids).encode())
        return PackedFile(self.weight_cache, content | weights)


def choose_dtype(
    name: str, checkpoint: torch.dtype | str | None, device: torch.device, *, by_kernels: bool = False
) -> torch.dtype:
    """The dtype by name; `auto` is the checkpoint's, or one that the device computes in.

    by_kernels: the kernels of this project compute, not torch

    bfloat16 becomes float32 on a CPU without instructions for it, unless kernels widen it there, and float16 on a GPU
    without. The latter is said, as is a bfloat16 that was asked for and has to be emulated. Raises ConfigError for an
    unknown name.
    """
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name != "auto":
        if name not in names:
            raise ConfigError(f"There is no dtype {name!r}; use auto, float32, bfloat16 or float16.")
        if name == "bfloat16" and not has_bfloat16(device):
            _warn_once(
                f"{gpu_name(device)} does not compute in bfloat16: torch emulates it, without the kernels of this "
                "program; use --dtype float16 if that is too slow."
            )
        return names[name]
    if isinstance(checkpoint, str):
        checkpoint = getattr(torch, checkpoint, None)
    wanted = checkpoint if isinstance(checkpoint, torch.dtype) else torch.float32
    if device.type == "cpu":
        keeps = _cpu_has_bfloat16() or (by_kernels and _kernels_widen_bfloat16())
        return torch.bfloat16 if wanted == torch.bfloat16 and keeps else torch.float32
    if wanted == torch.bfloat16 and not has_bfloat16(device):
        _warn_once(
            f"{gpu_name(device)} does not compute in bfloat16, so the model runs in float16, whose numbers end at "
            "65504; if it gives no numbers (nan_logits), use --dtype float32."
        )
        return torch.float16
    return wanted


@cache
def _warn_once(sentence: str) -> None:
    """Logs a warning once in a process: the dtype of a model may be chosen twice, for the fast path and without it."""
    _log.warning(sentence)


def _kernels_widen_bfloat16() -> bool:
    """Whether the CPU's kernels are fast with bfloat16 weights where no instruction multiplies them.

    They are widened in registers, for all rows that are multiplied at once: half the bytes are read, and products take
    as long as in float32. Without any special instructions, registers hold too few rows for that.
    """
    from cbatch.kernels.cpu.instruction_sets import CHOSEN

    return bool(CHOSEN.needs)


def _cpu_has_bfloat16() -> bool:
    # torch has no public function for this; a build without these names lacks the instructions.
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)
