"""Norms of a row, in float32."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.kernels.cpu.fast_math import copy_row, from_float32
from cbatch.kernels.cpu.jit import kernel

NO_NORM, RMS_NORM, LAYER_NORM = range(3)


class NormParams(NamedTuple):
    """kind: NO_NORM: weight and bias alone; weight, bias: as long as the row, or empty for 1 and 0."""

    kind: int
    eps: float
    weight: NDArray[np.float32]
    bias: NDArray[np.float32]


@kernel
def inverse_rms(x: Any, eps: float) -> Any:
    """The factor that scales x to a root mean square of 1 (RMSNorm, Zhang and Sennrich, 2019)."""
    squares = np.float32(0)
    for i in range(len(x)):
        squares += x[i] * x[i]
    return np.float32(1) / np.sqrt(squares / np.float32(len(x)) + np.float32(eps))


@kernel
def _scale(x: Any, mean: Any, factor: Any, norm: NormParams, out: Any) -> None:
    has_weight, has_bias = len(norm.weight) > 0, len(norm.bias) > 0
    for i in range(len(x)):
        scaled = (x[i] - mean) * factor
        scaled = scaled * norm.weight[i] if has_weight else scaled
        out[i] = from_float32(scaled + norm.bias[i] if has_bias else scaled, out)


@kernel
def normalize(x: Any, norm: NormParams, out: Any) -> None:
    """out = the norm of a row, which may be the row itself."""
    if norm.kind == RMS_NORM:
        _scale(x, np.float32(0), inverse_rms(x, norm.eps), norm, out)
    elif norm.kind == LAYER_NORM:
        mean, squares = np.float32(0), np.float32(0)
        for i in range(len(x)):
            mean += x[i]
        mean /= np.float32(len(x))
        for i in range(len(x)):
            squares += (x[i] - mean) * (x[i] - mean)
        factor = np.float32(1) / np.sqrt(squares / np.float32(len(x)) + np.float32(norm.eps))
        _scale(x, mean, factor, norm, out)
    elif len(norm.weight) or len(norm.bias):
        _scale(x, np.float32(0), np.float32(1), norm, out)
    else:
        copy_row(x, out)
