"""A model as data: a list of operations over named weights.

A declaration (`families/`) makes the program of a model from its config.json. Two modules run programs:
`cpu.py` with compiled kernels, one call a step, and `cuda.py` with Triton's kernels or torch's operations. Neither
knows of families.

Operations read and write buffers of T rows, one for each token of a step. The buffer `RESIDUAL` is float32; the others
are as exact as the device needs them. A buffer keeps what was written to it until it is written again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from cbatch.model.base import LinearCost
from cbatch.model.ops.operation import Operation
from cbatch.model.weight import Matrix, Weight, weights_of
from cbatch.runtime.kv_cache import LayerShape
from cbatch.runtime.state_pool import StateShape


@dataclass(frozen=True, slots=True)
class Rotary:
    """How positions enter queries and keys (RoPE, Su et al., 2021).

    inv_freq:   [rotary_dim / 2] radians from one position to the next; empty if nothing is rotated. Number i of a
                head is rotated with number i + rotary_dim / 2; weights of models that pair neighbours are reordered
    factor:     of cosines and sines
    switch, long_inv_freq: if switch is not 0, sequences that may become longer are rotated by long_inv_freq, from their
                first token on (LongRoPE)
    scale_beta, scale_floor: if beta is not 0, the query at a position p is multiplied by 1 + beta * log(1 +
                floor((p + scale_shift) / scale_floor)) (Llama 4)
    axes:       which of the three positions of a token in an image, time, row and column, turns each frequency; empty
                if there are none. Other tokens have three equal ones (M-RoPE, Wang et al., 2024)
    """

    inv_freq: tuple[float, ...]
    factor: float = 1.0
    switch: int = 0
    long_inv_freq: tuple[float, ...] = ()
    scale_beta: float = 0.0
    scale_floor: float = 1.0
    scale_shift: int = 0
    axes: tuple[int, ...] = ()

    def tables(self, positions: Tensor, inv_freq: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and sines [N, rotary_dim / 2] float32 of positions [N], or [3, N].

        inv_freq: [rotary_dim / 2] on their device, or [N, rotary_dim / 2]; those of short sequences by default
        """
        if inv_freq is None:
            inv_freq = torch.tensor(self.inv_freq, device=positions.device)
        if positions.dim() == 2:
            angles = positions[list(self.axes)].T.float() * inv_freq
        else:
            angles = positions[:, None].float() * inv_freq
        cosines, sines = angles.cos(), angles.sin()
        return (cosines, sines) if self.factor == 1 else (cosines * self.factor, sines * self.factor)

    def query_scales(self, positions: Tensor) -> Tensor:
        """[N] float32"""
        steps = torch.floor((positions.float() + self.scale_shift) / self.scale_floor)
        return 1 + self.scale_beta * torch.log1p(steps)


@dataclass(frozen=True)
class Program:
    """A model, ready to be run.

    name, kind:    its class in transformers, and the `model_type` of its config
    caches:        shape of each KV cache
    windows:       how many tokens back its layers see, including the token itself; None for all
    rotaries:      those that its operations number
    is_causal:     whether tokens see earlier ones only
    states:        shapes of the states of recurrent layers
    embedding:     what token ids are looked up in first
    head:          the matrix of the output head, which is the embedding if it `is_tied`
    replaced_ids:  token ids that stand for something else than text, and what is embedded instead
    root:          how the names of its weights begin, but for that of the head
    renamed:       how else names begin in files, and what that stands for
    is_wrapped:    it lies in a larger model, whose other weights are not used
    spare:         regular expressions of weights that the files may hold and that are not used
    notes:         what people should know of it, in sentences
    """

    name: str
    kind: str
    hidden_size: int
    vocab_size: int
    max_model_len: int
    operations: tuple[Operation, ...]
    caches: tuple[LayerShape, ...]
    windows: tuple[int | None, ...]
    rotaries: tuple[Rotary, ...]
    embedding: Weight
    head: Matrix
    is_tied: bool
    replaced_ids: Mapping[int, int] = field(default_factory=dict)
    root: str = ""
    renamed: tuple[tuple[str, str], ...] = ()
    is_wrapped: bool = False
    spare: tuple[str, ...] = ()
    states: tuple[StateShape, ...] = ()
    notes: tuple[str, ...] = ()
    is_causal: bool = True

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """Every weight of every operation, as often as it is used."""
        return tuple(weight for operation in self.operations for weight in weights_of(operation))

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that the files must hold."""
        return {weight.name: weight.shape for weight in self.weights}

    def linear_cost(self, weight_bytes: int) -> LinearCost:
        """weight_bytes: of all matrices"""
        assumed = dict.fromkeys(filter(None, (operation.assumed for operation in self.operations)))
        parameters = sum(operation.multiplied for operation in self.operations)
        return LinearCost(weight_bytes, float(parameters), self.head.size, tuple(assumed))

    @property
    def short_context(self) -> int | None:
        """See `Model`."""
        return min((rotary.switch for rotary in self.rotaries if rotary.switch), default=None)
