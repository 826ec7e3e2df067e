"""The dtype that a model computes in."""

from __future__ import annotations

import torch

from cbatch.engine.base.errors import ConfigError


def choose_dtype(name: str, checkpoint: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype by name; `auto` is the checkpoint's, or float32 on a CPU without fast arithmetic for that.

    Raises ConfigError for an unknown name.
    """
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name != "auto":
        if name not in names:
            raise ConfigError(f"There is no dtype {name!r}; use auto, float32, bfloat16 or float16.")
        return names[name]
    wanted = checkpoint or torch.float32
    if device.type == "cpu" and not (wanted == torch.bfloat16 and _cpu_has_bfloat16()):
        return torch.float32
    return wanted


def _cpu_has_bfloat16() -> bool:
    # torch has no public function for this; a build without these names lacks the instructions.
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)
