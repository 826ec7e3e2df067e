"""Whether a device can multiply FP8, and what is said if activations were to be rounded to FP8."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

import torch

from cbatch.base.errors import in_short
from cbatch.kernels.quantized_matrix import Float8Matrix, rounded_rows
from cbatch.kernels.triton.occupancy import device_limits
from cbatch.model.base import Model
from cbatch.runtime.device import gpu_name, is_accelerator, is_nvidia

_log = logging.getLogger("cbatch")

_CAPABILITY = 89
"""The first with matrix units for FP8."""


def activations_in(dtype: torch.dtype) -> str:
    """The name of a type of activations: that of `ACTIVATIONS`, or torch's."""
    return "bf16" if dtype == torch.bfloat16 else str(dtype).removeprefix("torch.")


@dataclass(slots=True)
class Float8Use:
    """The use that a model on a GPU makes of FP8 matrices.

    problem: why activations are rounded for none of them, as a part of a sentence; empty if they may be
    rounded: how many have activations that are rounded to FP8
    others:  how many have not, by what they are
    """

    problem: str = "the model was loaded without asking for that"
    rounded: int = 0
    others: Counter[str] = field(default_factory=Counter)

    def sentence(self, dtype: torch.dtype) -> str:
        """dtype: that of the model"""
        name = activations_in(dtype)
        total = self.rounded + self.others.total()
        if not total:
            return f"None of the model's matrices is FP8, so activations stay {name}."
        if self.problem:
            return f"Activations stay {name} for all {total} FP8 matrices: {self.problem}."
        if not self.others:
            return f"Activations are rounded to fp8 for all {total} FP8 matrices."
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.others.most_common())
        count = f"{self.rounded or 'none'} of {total} FP8 matrices"
        return f"Activations are rounded to fp8 for {count}, and stay {name} for {kinds}."


def tell_float8(model: Model) -> None:
    """Says in one line what became of activations that should be rounded to FP8."""
    use = getattr(model, "float8", None)
    if isinstance(use, Float8Use):
        is_met = use.rounded and not use.others
        _log.log(logging.INFO if is_met else logging.WARNING, "%s", use.sentence(model.dtype))
    elif not is_accelerator(model.device):
        _log.warning(
            "Activations are not rounded to fp8, which is for NVIDIA GPUs: on a CPU, products with quantized weights "
            "round them to int8."
        )
    else:
        name = activations_in(model.dtype)
        _log.warning("Activations stay %s: only the fast path of an NVIDIA GPU rounds them to fp8.", name)


@cache
def float8_problem(device: torch.device, dtype: torch.dtype) -> str:
    """Why a device cannot multiply FP8 for a model of a type, as a part of a sentence; empty if it can.

    Some chips have the matrix units, and torch's library still refuses a scale for each row: so products are tried.
    """
    if dtype == torch.float32:
        return "the model computes in float32, and products of FP8 give numbers of 16 bits"
    if device_limits(device).capability < _CAPABILITY:
        name = gpu_name(device) if is_nvidia(device) else str(device)
        return f"{name} has no matrix units for FP8, which came with compute capability 8.9"
    try:
        matrix, bias = Float8Matrix.empty(64, 128, device), torch.zeros(64, dtype=dtype, device=device)
        for rows in (1, 33):
            out = torch.empty(rows, 64, dtype=dtype, device=device)
            matrix.multiply(*rounded_rows(torch.ones(rows, 128, device=device)), bias, out)
            out.sum().item()  # an error of a kernel comes with its result
    except Exception as error:  # whatever torch and its libraries raise
        return f"torch {torch.__version__} does not multiply FP8 with a scale for each row there ({in_short(error)})"
    return ""
