"""Which dtype a model gets on a device."""

from __future__ import annotations

import logging
from functools import cache

import torch

from cbatch.base.errors import ConfigError
from cbatch.runtime.device import gpu_name, has_bfloat16

_log = logging.getLogger("cbatch")


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


def activations_in(dtype: torch.dtype) -> str:
    """The name of a type of activations: that of `ACTIVATIONS`, or torch's."""
    return "bf16" if dtype == torch.bfloat16 else str(dtype).removeprefix("torch.")


@cache
def _warn_once(sentence: str) -> None:
    """Logs a warning once in a process: the dtype of a model may be chosen twice, for the fast path and without it."""
    _log.warning(sentence)


def _kernels_widen_bfloat16() -> bool:
    """Whether the CPU's kernels are fast with bfloat16 weights where no instruction multiplies them.

    With AVX-512, one request is 1.6 times as fast as in float32, 16 are 1.2 times, and a prompt takes 3% longer. With
    AVX2, fewer rows share what is widened, and a prompt takes 1.8 times as long.
    """
    from cbatch.kernels.cpu.jit import HAS_AVX512

    return HAS_AVX512


def _cpu_has_bfloat16() -> bool:
    # torch has no public function for this; a build without these names lacks the instructions.
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)
