"""Activations of feed-forward parts, over rows of float32. Each is a loop of its own, which the compiler vectorizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.kernels.cpu.fast_math import exp, silu
from cbatch.kernels.cpu.jit import kernel

NAMES = ("identity", "silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "xielu", "clipped_silu")
IDENTITY, SILU, GELU, GELU_TANH, RELU, RELU2, SIGMOID, XIELU, CLIPPED_SILU = range(len(NAMES))

_ONE, _HALF = np.float32(1), np.float32(0.5)
_SQRT_HALF, _SQRT_8_OVER_PI = np.float32(0.7071067811865476), np.float32(1.5957691216057308)


class ActivationParams(NamedTuple):
    """Which activation, one of NAMES.

    params: float32. Of xielu: alpha of positive numbers, alpha - beta of negative ones, beta, and the largest exponent.
            Of clipped_silu: the limit of gate, the slope, what is added to up, and the limit of up
    """

    kind: int
    params: NDArray[np.float32]


@kernel
def _erf(x: Any) -> Any:
    """The error function within 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
    size = abs(x)
    t = _ONE / (_ONE + np.float32(0.3275911) * size)
    p = np.float32(1.061405429)
    p = p * t - np.float32(1.453152027)
    p = p * t + np.float32(1.421413741)
    p = p * t - np.float32(0.284496736)
    p = p * t + np.float32(0.254829592)
    positive = _ONE - p * t * exp(-size * size)
    return positive if x >= 0 else -positive


@kernel
def activate(x: Any, activation: ActivationParams) -> None:
    """Applies an activation without a gate to numbers, in place."""
    kind, params = activation.kind, activation.params
    if kind == SILU:
        for i in range(len(x)):
            x[i] = silu(x[i])
    elif kind == GELU:
        for i in range(len(x)):
            x[i] = _HALF * x[i] * (_ONE + _erf(x[i] * _SQRT_HALF))
    elif kind == GELU_TANH:
        for i in range(len(x)):
            inner = _SQRT_8_OVER_PI * (x[i] + np.float32(0.044715) * x[i] * x[i] * x[i])
            x[i] = x[i] / (_ONE + exp(-inner))
    elif kind == RELU:
        for i in range(len(x)):
            x[i] = x[i] if not x[i] < 0 else np.float32(0)
    elif kind == RELU2:
        for i in range(len(x)):
            positive = x[i] if not x[i] < 0 else np.float32(0)
            x[i] = positive * positive
    elif kind == SIGMOID:
        for i in range(len(x)):
            x[i] = _ONE / (_ONE + exp(-x[i]))
    elif kind == XIELU:
        for i in range(len(x)):
            exponent = x[i] if x[i] < params[3] else params[3]
            negative = (params[1] + params[2]) * (exp(exponent) - _ONE - x[i]) + params[2] * x[i]
            x[i] = params[0] * x[i] * x[i] + params[2] * x[i] if x[i] > 0 else negative


@kernel
def clipped_silu(gate: Any, up: Any, activation: ActivationParams) -> Any:
    """The gated activation of GPT-OSS."""
    limit, slope, offset, most = activation.params[0], activation.params[1], activation.params[2], activation.params[3]
    clipped = gate if not gate > limit else limit
    other = up if not up > most else most
    other = other if not other < -most else -most
    return clipped / (_ONE + exp(-slope * clipped)) * (other + offset)
