"""The kernels of operations as methods, with operations whose weights are tensors: for tests and what compiles all."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

import cbatch.model.ops.all  # noqa: F401  # registers the kernels of every operation
from cbatch.kernels.operands import NormWeights
from cbatch.model.ops.attention import HeadNorms, PrepareHeads
from cbatch.model.ops.convolution import ShortConvolution
from cbatch.model.ops.device_kernel import KERNELS, DeviceOps
from cbatch.model.ops.experts import Route
from cbatch.model.ops.gated_delta import GatedDelta
from cbatch.model.ops.products import logits
from cbatch.model.ops.selective_scan import SelectiveScan
from cbatch.runtime.kv_cache import LayerShape

_NO_NORM = NormWeights("none")


class Heads(NamedTuple):
    """Heads of a layer, with the norms of each by itself; see `PrepareHeads`."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    query_norm: NormWeights = _NO_NORM
    key_norm: NormWeights = _NO_NORM
    value_norm: NormWeights = _NO_NORM
    norm_last: bool = False
    clip: float = 0.0
    stores: bool = True

    @property
    def operation(self) -> PrepareHeads:
        shape, norms = LayerShape(self.kv_heads, self.key_dim, self.value_dim), HeadNorms(last=self.norm_last)
        return PrepareHeads("", "", self.heads, shape, 0, self.stores, norms=norms, clip=self.clip)


def convolution(weight: Any, bias: Any = None, activation: Any = "none") -> ShortConvolution:
    return ShortConvolution("", "", weight, 0, bias=bias, activation=activation)


def delta_rule(key_heads: int, value_heads: int, key_dim: int, value_dim: int, decay: Any, bias: Any) -> GatedDelta:
    return GatedDelta("", "", "", key_heads, value_heads, key_dim, value_dim, 0, decay, bias)


def scan(
    heads: int, head_dim: int, groups: int, state_size: int, decay: Any, step_bias: Any, skip: Any,
    step_min: float = 0.0, step_max: float = math.inf,
) -> SelectiveScan:  # fmt: skip
    return SelectiveScan(
        "", "", "", heads, head_dim, groups, state_size, 0, decay, step_bias, skip, 0, step_min, step_max
    )


def router(top_k: int, scores: Any, choice_bias: Any = None, *how: Any, **others: Any) -> Route:
    no_matrix: Any = None
    return Route("", no_matrix, top_k, scores, choice_bias, *how, **others)


class BoundKernels:
    """Every kernel as a method; an operation brings its weights."""

    def __init__(self, ops: DeviceOps) -> None:
        self.ops = ops

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(KERNELS[name], self.ops)

    def logits(self, hidden: Tensor, matrix: Any, out: Tensor | None = None) -> Tensor:
        return logits(self.ops, hidden, matrix, out)

    def route(self, scores: Tensor, one: Any) -> Any:
        return KERNELS["route"](self.ops, scores, one, (one.choice_bias, one.expert_scales))

    def prepare_heads(self, qkv: Tensor, heads: Heads, *others: Any) -> None:
        norms = heads.query_norm, heads.key_norm, heads.value_norm
        KERNELS["prepare_heads"](self.ops, qkv, heads.operation, norms, *others)

    def convolve(self, source: Tensor, one: Any, *others: Any) -> None:
        KERNELS["convolve"](self.ops, source, (one.weight, one.bias), one.activation, *others)

    def gated_delta(self, qkv: Tensor, controls: Tensor, one: Any, *others: Any) -> None:
        KERNELS["gated_delta"](self.ops, qkv, controls, one, (one.decay_log, one.decay_bias), *others)

    def selective_scan(self, xbc: Tensor, steps: Tensor, one: Any, *others: Any) -> None:
        weights = one.decay_log, one.step_bias, one.skip
        KERNELS["selective_scan"](self.ops, xbc, steps, one, weights, *others)
