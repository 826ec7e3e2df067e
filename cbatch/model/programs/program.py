"""A model as data: a list of operations over named weights.

A declaration (`families/`) makes the program of a model from its config.json. Two modules run programs: `cpu.py` with
compiled kernels, one call a step, and `cuda.py` with Triton's kernels or torch's operations. Neither knows of families.

Operations read and write buffers of T rows, one for each token of a step. The buffer `RESIDUAL` is float32; the others
are as exact as the device needs them. A buffer keeps what was written to it until it is written again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from cbatch.model.base import ALL_EXPERTS_READ, LinearCost
from cbatch.runtime.kv_cache import LayerShape
from cbatch.runtime.state_pool import StateShape

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
    function:  applied to each number
    factor, offset: each number becomes factor * number + offset, in float32
    """

    name: str
    shape: tuple[int, ...]
    index: int | None = None
    transpose: bool = False
    is_flat: bool = False
    rows: Tensor | None = None
    function: Literal["softplus"] | None = None
    factor: float = 1.0
    offset: float = 0.0

    @property
    def size(self) -> tuple[int, ...]:
        """The shape once it is loaded."""
        shape = self.shape if self.index is None else self.shape[1:]
        shape = shape[::-1] if self.transpose else shape
        shape = (math.prod(shape),) if self.is_flat else shape
        return shape if self.rows is None else (len(self.rows), *shape[1:])

    def read(self, tensor: Tensor) -> Tensor:
        """The weight, given the tensor of the files; the same memory if nothing has to be done."""
        tensor = tensor if self.index is None else tensor[self.index]
        tensor = tensor.T if self.transpose else tensor
        tensor = tensor.flatten() if self.is_flat else tensor
        tensor = tensor if self.rows is None else tensor[self.rows]
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

    kind:         none copies
    weight, bias: as long as the row that is normed; parts side by side, none for 1 and 0
    """

    kind: Literal["none", "rms", "layer"]
    eps: float
    weight: tuple[Weight, ...] = ()
    bias: tuple[Weight, ...] = ()


@dataclass(frozen=True, slots=True)
class Activation:
    """What a feed-forward part does between its linears.

    name:    silu, gelu, gelu_tanh, relu, relu2 (its square), sigmoid, xielu (Huang and Schlag, 2025), or identity
    gated:   the linear gives gate, then up; the result is activation(gate) * up
    params:  of xielu: alpha for positive numbers, alpha - beta for negative ones, beta, and the largest exponent
    limit:   0, or the most that gate and the size of up may be (GPT-OSS)
    slope:   factor of a silu's exponent
    up_offset: added to up
    """

    name: str
    gated: bool = True
    params: tuple[Weight | float, ...] = field(default=(), compare=False)
    limit: float = 0.0
    slope: float = 1.0
    up_offset: float = 0.0


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
    """

    inv_freq: tuple[float, ...]
    factor: float = 1.0
    switch: int = 0
    long_inv_freq: tuple[float, ...] = ()
    scale_beta: float = 0.0
    scale_floor: float = 1.0
    scale_shift: int = 0

    def tables(self, positions: Tensor, inv_freq: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and sines [N, rotary_dim / 2] float32 of positions [N].

        inv_freq: [rotary_dim / 2] on their device, or [N, rotary_dim / 2]; those of short sequences by default
        """
        if inv_freq is None:
            inv_freq = torch.tensor(self.inv_freq, device=positions.device)
        angles = positions[:, None].float() * inv_freq
        cosines, sines = angles.cos(), angles.sin()
        return (cosines, sines) if self.factor == 1 else (cosines * self.factor, sines * self.factor)

    def query_scales(self, positions: Tensor) -> Tensor:
        """[N] float32"""
        steps = torch.floor((positions.float() + self.scale_shift) / self.scale_floor)
        return 1 + self.scale_beta * torch.log1p(steps)


@dataclass(frozen=True, slots=True, eq=False)
class Embed:
    """target = scale * table[token ids] + positions[position + position_offset]."""

    table: Weight
    scale: float = 1.0
    positions: Weight | None = None
    position_offset: int = 0
    target: str = RESIDUAL


@dataclass(frozen=True, slots=True, eq=False)
class Normalize:
    """target = norm(source[:, start : start + width]); added to the target if `add`.

    width:  0 for the rest of the row
    groups: so many parts of `width` numbers are normed, each by itself
    factor: of the result
    """

    source: str
    target: str
    norm: Norm
    add: bool = False
    start: int = 0
    width: int = 0
    groups: int = 1
    factor: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """target = factor * activation(source times matrix + biases); added to the target if `add`.

    A gated activation takes two columns for each of its own, all gates before all ups.
    """

    source: str
    target: str
    matrix: Matrix
    add: bool = False
    factor: float = 1.0
    activation: Activation | None = None

    @property
    def width(self) -> int:
        is_gated = self.activation is not None and self.activation.gated
        return self.matrix.columns // 2 if is_gated else self.matrix.columns


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """Norms of queries, keys and values. Weights are as long as all heads side by side.

    by_row: a norm takes all heads of a row together; else each by itself
    last:   those of queries and keys come after the rotation
    """

    query: Norm | None = None
    key: Norm | None = None
    value: Norm | None = None
    by_row: bool = False
    last: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PrepareHeads:
    """Norms, rotates and stores the heads of `source`: queries, then keys, then values, side by side.

    query:  target [T, heads * key_dim]
    cache:  number of the KV cache in which keys and values are stored
    stores: else the source has queries only, for a cache that another layer fills
    rotary: number of the program's `Rotary`; None if positions do not matter
    clip:   0, or the largest size of a number, before anything else
    """

    source: str
    query: str
    heads: int
    shape: LayerShape
    cache: int
    stores: bool = True
    rotary: int | None = None
    norms: HeadNorms = HeadNorms()
    clip: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Attend:
    """target [T, heads * value_dim] = causal attention of the query over a KV cache.

    window:  a token sees itself and the window - 1 tokens before it; 0: all
    chunk:   a token sees those of its chunk only, up to itself; 0: no chunks
    softcap: 0, or a score becomes softcap * tanh(score / softcap)
    sinks:   [heads] scores that take part in the softmax and carry no value
    """

    query: str
    target: str
    cache: int
    heads: int
    shape: LayerShape
    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: Weight | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """target *= function(gate), where each number of the gate is for `width` numbers of the target.

    start: first column of the gate
    """

    gate: str
    target: str
    width: int = 1
    start: int = 0
    function: Literal["sigmoid", "softplus", "identity"] = "sigmoid"
    factor: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """target[:, i] = the sources side by side [:, columns[i]].  columns: int64"""

    sources: tuple[str, ...]
    target: str
    columns: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """target *= weight, a number.  See `Weight`."""

    target: str
    weight: Weight


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Chooses `top_k` experts for each token by its scores source times matrix + biases, in float32.

    scores:      function of the scores: over all experts, or softmax over those that were chosen
    choice_bias: added to the scores for the choice only
    groups:      experts lie in so many groups, of which the `top_groups` with the highest score are used: the score
                 of a group is its highest, or the sum of its two highest
    normalize:   the weights of a token are divided by their sum + epsilon, or by least_sum if that is more
    factor:      of the weights
    expert_scales: [experts] factors of the weights
    """

    source: str
    matrix: Matrix
    top_k: int
    scores: Literal["softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen"]
    choice_bias: Weight | None = None
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["highest", "two_highest"] = "highest"
    normalize: bool = False
    epsilon: float = 0.0
    least_sum: float = 0.0
    factor: float = 1.0
    expert_scales: Weight | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """target = sum over the experts of the last `Route` of weight * down(activation(up(source))).

    weigh_input: the weight multiplies the source, and not the result
    """

    source: str
    target: str
    up: tuple[Matrix, ...]
    down: tuple[Matrix, ...]
    activation: Activation
    add: bool = False
    factor: float = 1.0
    weigh_input: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ShortConvolution:
    """target [T, channels] = activation(a causal convolution over the tokens of each sequence, channel by channel).

    start:       first column of the source that goes in
    weight:      [channels, 1, kernel]; its last number is for the token itself
    state:       number of the state [channels, kernel - 1]: what the last tokens gave, the last one last
    activation:  silu, or none
    input_gate:  first column of the source with which what goes in is multiplied; None for none
    output_gate: likewise for what comes out
    """

    source: str
    target: str
    weight: Weight
    state: int
    start: int = 0
    bias: Weight | None = None
    activation: Literal["silu", "none"] = "none"
    input_gate: int | None = None
    output_gate: int | None = None

    @property
    def channels(self) -> int:
        return self.weight.size[0]

    @property
    def kernel(self) -> int:
        return self.weight.size[-1]


@dataclass(frozen=True, slots=True, eq=False)
class GatedDelta:
    """target [T, value_heads * value_dim] = the gated delta rule (Yang et al., https://arxiv.org/abs/2412.06464).

    For each token, with the state S [key_dim, value_dim] of each value head, float32:
        S = exp(-exp(decay_log) * softplus(a + decay_bias)) * S
        S = S + k outer (sigmoid(b) * (v - k S))
        target = key_dim**-0.5 * q S
    with q and k divided by their lengths (eps 1e-6 under the root). Each head of keys serves value_heads / key_heads
    value heads in a row.

    source:   [T, 2 * key_heads * key_dim + value_heads * value_dim] queries, keys, values
    controls: [T, 2 * value_heads] b, then a
    state:    number of the state [value_heads, key_dim, value_dim]
    decay_log, decay_bias: [value_heads]
    """

    source: str
    controls: str
    target: str
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    state: int
    decay_log: Weight
    decay_bias: Weight


@dataclass(frozen=True, slots=True, eq=False)
class SelectiveScan:
    """target [T, heads * head_dim] = the scan of Mamba 2 (Dao and Gu, https://arxiv.org/abs/2405.21060).

    For each token, with the state S [head_dim, state_size] of each head, float32:
        d = clamp(softplus(step + step_bias), step_min, step_max)
        S = exp(-exp(decay_log) * d) * S + d * x outer B
        target = S C + skip * x

    source: [T, heads * head_dim + 2 * groups * state_size] x, then B and C of all groups; heads / groups heads in a row
            share one
    steps:  [T, ...], of which `heads` columns from `step_start` are the step
    state:  number of the state [heads, head_dim, state_size]
    decay_log, step_bias, skip: [heads]
    """

    source: str
    steps: str
    target: str
    heads: int
    head_dim: int
    groups: int
    state_size: int
    state: int
    decay_log: Weight
    step_bias: Weight
    skip: Weight
    step_start: int = 0
    step_min: float = 0.0
    step_max: float = math.inf


@dataclass(frozen=True, slots=True, eq=False)
class GatedNorm:
    """target = norm(source) * silu(gate), or norm(source * silu(gate)) if the gate comes first.

    gate_start: first column of the gate, which is as wide as the source
    groups:     so many parts of the source are normed, each by itself; the norm's weight is as long as the source
    """

    source: str
    gate: str
    target: str
    norm: Norm
    groups: int
    gate_start: int = 0
    gate_first: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """Logits of the wanted rows: softcap(factor * (norm(residual) times matrix + biases)); softcap 0 for none."""

    norm: Norm
    matrix: Matrix
    factor: float = 1.0
    softcap: float = 0.0


Operation = (
    Embed
    | Normalize
    | Linear
    | PrepareHeads
    | Attend
    | Gate
    | Gather
    | Scale
    | Route
    | Experts
    | ShortConvolution
    | GatedDelta
    | SelectiveScan
    | GatedNorm
    | Head
)


Layout = tuple[tuple[str, str], ...]
"""Beginnings of names here, and what files have instead."""


@dataclass(frozen=True)
class Program:
    """A model, ready to be run.

    name, kind:    its class in transformers, and the `model_type` of its config
    caches:        shape of each KV cache
    windows:       how many tokens back its layers see, including the token itself; None for all
    rotaries:      those that its operations number
    states:        shapes of the states of recurrent layers
    is_tied:       the output head is the embedding
    replaced_ids:  token ids that stand for something else than text, and what is embedded instead
    layouts:       other ways in which files name the weights
    spare:         regular expressions of weights that the files may hold and that are not used
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
    is_tied: bool
    replaced_ids: Mapping[int, int] = field(default_factory=dict)
    layouts: tuple[Layout, ...] = ()
    spare: tuple[str, ...] = ()
    states: tuple[StateShape, ...] = ()

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
        parameters, top_k, assumed = 0.0, 0, ""
        for operation in self.operations:
            match operation:
                case Linear():
                    parameters += operation.matrix.size
                case Route():
                    parameters += operation.matrix.size
                    top_k = operation.top_k
                case Experts():
                    parameters += top_k * (operation.up[0].size + operation.down[0].size)
                    assumed = ALL_EXPERTS_READ
        return LinearCost(weight_bytes, parameters, self.head.matrix.size, (assumed,) if assumed else ())

    @property
    def short_context(self) -> int | None:
        """See `Model`."""
        return min((rotary.switch for rotary in self.rotaries if rotary.switch), default=None)

    @property
    def embed(self) -> Embed:
        return next(operation for operation in self.operations if isinstance(operation, Embed))

    @property
    def head(self) -> Head:
        return next(operation for operation in self.operations if isinstance(operation, Head))


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
