"""The weights that a model's operations name, and what stands around them: matrices, norms and activations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

RESIDUAL = "residual"
"""The buffer that an operation with `add` adds to: the residual stream [T, hidden size]."""


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A tensor of the files, and what is done to it when it is loaded, in this order.

    shape:     as it is stored
    index:     which of several tensors that are stored as one, along the first dimension
    transpose: it is stored as [depth, columns]
    is_flat:   its numbers become one row
    rows:      which of its rows are taken, in their order: int64
    depth:     which numbers of a row are taken: the first, and the one after the last; None: all
    function:  applied to each number
    factor, offset: each number becomes factor * number + offset, in float32
    """

    name: str
    shape: tuple[int, ...]
    index: int | None = None
    transpose: bool = False
    is_flat: bool = False
    rows: Tensor | None = None
    depth: tuple[int, int] | None = None
    function: Literal["softplus"] | None = None
    factor: float = 1.0
    offset: float = 0.0

    @property
    def size(self) -> tuple[int, ...]:
        """The shape once it is loaded."""
        shape = self.shape if self.index is None else self.shape[1:]
        shape = shape[::-1] if self.transpose else shape
        shape = (math.prod(shape),) if self.is_flat else shape
        shape = shape if self.rows is None else (len(self.rows), *shape[1:])
        return shape if self.depth is None else (shape[0], self.depth[1] - self.depth[0])

    def read(self, tensor: Tensor) -> Tensor:
        """The weight, given the tensor of the files; the same memory if nothing has to be done."""
        tensor = tensor if self.index is None else tensor[self.index]
        tensor = tensor.T if self.transpose else tensor
        tensor = tensor.flatten() if self.is_flat else tensor
        tensor = tensor if self.rows is None else tensor[self.rows]
        tensor = tensor if self.depth is None else tensor[:, slice(*self.depth)]
        if self.function == "softplus":
            tensor = torch.nn.functional.softplus(tensor.float())
        return tensor if (self.factor, self.offset) == (1, 0) else self.factor * tensor.float() + self.offset


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A weight [columns, depth] of a linear: parts stacked along their columns, and their biases if they have any."""

    parts: tuple[Weight, ...]
    biases: tuple[Weight, ...] = ()

    @property
    def columns(self) -> int:
        return sum(part.size[0] for part in self.parts)

    @property
    def depth(self) -> int:
        return self.parts[0].size[1]

    @property
    def size(self) -> int:
        return self.columns * self.depth


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """RMSNorm (Zhang and Sennrich, 2019) or LayerNorm (Ba et al., 2016), in float32.

    kind:         none: weight and bias alone
    weight, bias: as long as the row that is normed; parts side by side, none for 1 and 0
    """

    kind: Literal["none", "rms", "layer"]
    eps: float
    weight: tuple[Weight, ...] = ()
    bias: tuple[Weight, ...] = ()


@dataclass(frozen=True, slots=True)
class Activation:
    """The function of a feed-forward part between its linears.

    name:    silu, gelu, gelu_tanh, relu, relu2 (its square), sigmoid, xielu (Huang and Schlag, 2025), or identity
    gated:   the linear gives gate, then up; the result is activation(gate) * up
    params:  of xielu: alpha for positive numbers, alpha - beta for negative ones, beta, and the largest exponent
    limit:   0, or the most that gate and the size of up may be (GPT-OSS)
    slope:   factor of a silu's exponent
    up_offset: added to up
    up_limit: 0, or the most that the size of up may be, if it is another than that of gate
    """

    name: str
    gated: bool = True
    params: tuple[Weight | float, ...] = field(default=(), compare=False)
    limit: float = 0.0
    slope: float = 1.0
    up_offset: float = 0.0
    up_limit: float = 0.0


def weights_of(value: Any) -> Iterator[Weight]:
    """The weights in an operation, or in a part of one."""
    if isinstance(value, Weight):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from weights_of(item)
    elif hasattr(value, "__dataclass_fields__"):
        for each in fields(value):
            yield from weights_of(getattr(value, each.name))
