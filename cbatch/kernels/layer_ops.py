"""The operations of a model's layers between its matrix products, as `models/device_program.py` calls them."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from cbatch.kernels.float8_matrix import Float8Matrix
from cbatch.kernels.quantized_matrix import QuantizedMatrix


class NormWeights(NamedTuple):
    """A norm of rows of a number of columns, in float32.

    kind:         RMSNorm (Zhang and Sennrich, 2019), LayerNorm (Ba et al., 2016), or none
    weight, bias: [columns] float32; None for 1 and 0. Of heads also [heads * columns], for each its own
    """

    kind: Literal["none", "rms", "layer"]
    eps: float = 0.0
    weight: Tensor | None = None
    bias: Tensor | None = None


class Embedding(NamedTuple):
    """scale * table[token id] + positions[position + offset].

    table:     [vocabulary, columns]
    positions: [positions, columns], or None
    """

    table: Tensor
    scale: float = 1.0
    positions: Tensor | None = None
    offset: int = 0


class Addend(NamedTuple):
    """factor * norm(value), which is added to the residual.  value: [T, hidden]"""

    value: Tensor
    factor: float = 1.0
    norm: NormWeights | None = None


class Positions(NamedTuple):
    """Where the T tokens of a step stand.

    cosines, sines: [T, rotary_dim / 2] float32, of their rotary angles; None if nothing is rotated
    slots:          [T] places in the cache; a token with a negative slot is not stored
    query_scales:   [T] float32 factors of the queries, or None
    """

    cosines: Tensor | None
    sines: Tensor | None
    slots: Tensor
    query_scales: Tensor | None = None


class Heads(NamedTuple):
    """What is done to the heads of a layer.

    query_norm, key_norm, value_norm: of each head by itself
    norm_last: queries and keys are normed after the rotation, not before
    clip:      0, or the largest size of a number, before anything else
    stores:    there are keys and values, and they are stored
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    query_norm: NormWeights = NormWeights("none")
    key_norm: NormWeights = NormWeights("none")
    value_norm: NormWeights = NormWeights("none")
    norm_last: bool = False
    clip: float = 0.0
    stores: bool = True


class ActivationSettings(NamedTuple):
    """What a feed-forward part does between its linears (see `Activation` in `models/programs/program.py`)."""

    name: str
    gated: bool = True
    params: tuple[float, ...] = ()
    limit: float = 0.0
    slope: float = 1.0
    up_offset: float = 0.0


class Router(NamedTuple):
    """How experts are chosen (see `Route` in `models/programs/program.py`).

    choice_bias, expert_scales: [experts] float32, or None
    """

    top_k: int
    scores: str
    choice_bias: Tensor | None = None
    groups: int = 1
    top_groups: int = 1
    group_score: str = "highest"
    normalize: bool = False
    epsilon: float = 0.0
    least_sum: float = 0.0
    factor: float = 1.0
    expert_scales: Tensor | None = None


class Routing(NamedTuple):
    """Which experts the T tokens of a step go to. Pairs of a token and an expert are sorted by expert.

    weights: [T, top_k] float32
    places:  [T, top_k] where each pair stands among the sorted ones
    order:   [T * top_k] which pair, token * top_k + k, stands at each place
    counts:  [experts] pairs of each expert
    """

    weights: Tensor
    places: Tensor
    order: Tensor
    counts: Tensor


class ExpertWeights(NamedTuple):
    """One matrix of every expert.  weight: [experts, columns, depth]; bias: [experts, columns], or None"""

    weight: Tensor | QuantizedMatrix
    bias: Tensor | None


class Recurrence(NamedTuple):
    """Where the S chunks of a step have their states (see `StepStates`).

    starts:          [S + 1] int32, first row of each chunk, and T
    slots:           [S] int32; a chunk with a negative slot is padding: its rows are undefined, nothing is kept
    snapshot_counts: [S] int32, number of the chunk's tokens after which its state is copied
    snapshot_slots:  [S] int32, where to; negative if it is not
    longest:         tokens of the longest chunk; 1 in a step that only decodes
    """

    starts: Tensor
    slots: Tensor
    snapshot_counts: Tensor
    snapshot_slots: Tensor
    longest: int


class Convolution(NamedTuple):
    """A causal convolution, channel by channel (see `ShortConvolution` in `models/programs/program.py`).

    weight: [channels, kernel] float32; bias: [channels] float32, or None
    """

    weight: Tensor
    bias: Tensor | None = None
    activation: str = "none"


class DeltaHeads(NamedTuple):
    """The heads of a gated delta rule (see `GatedDelta` in `models/programs/program.py`).

    decay: [value_heads] float32, -exp(decay_log); decay_bias: [value_heads] float32
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    decay: Tensor
    decay_bias: Tensor


class ScanHeads(NamedTuple):
    """The heads of a scan (see `SelectiveScan` in `models/programs/program.py`).

    decay: [heads] float32, -exp(decay_log); step_bias, skip: [heads] float32
    """

    heads: int
    head_dim: int
    groups: int
    state_size: int
    decay: Tensor
    step_bias: Tensor
    skip: Tensor
    step_min: float = 0.0
    step_max: float = float("inf")


class LayerOps(Protocol):
    """What computes these operations: Triton's kernels (`kernels/triton/layer.py`), or torch (`kernels/reference`).

    Sums, norms, angles, gates and the residual stream are float32 whatever the other tensors are.
    """

    @property
    def heads_first(self) -> bool:
        """Whether a block of the cache is [kv_heads, block_size, head_dim]; else [block_size, kv_heads, head_dim]."""

    @property
    def batch_invariant(self) -> bool:
        """Whether the bits of a row do not depend on other rows, or on how many there are. Recurrences are left out."""

    def embed_and_norm(
        self,
        embedding: Embedding,
        ids: Tensor,
        positions: Tensor,
        residual: Tensor,
        norm: NormWeights | None,
        out: Tensor | None,
    ) -> None:
        """residual [T, columns] float32 = the embedding of ids [T] at positions [T]; out [T, columns] = its norm."""

    def add_and_norm(
        self, residual: Tensor, addends: tuple[Addend, ...], norm: NormWeights | None, out: Tensor | None
    ) -> None:
        """residual [T, hidden] float32 += up to two addends, of which the first may have a norm.

        out: [T, hidden] = the norm of the residual; None for none
        """

    def select_and_norm(
        self,
        residual: Tensor,
        addends: tuple[Addend, ...],
        rows: Tensor,
        norm: NormWeights,
        factor: float,
        out: Tensor,
    ) -> None:
        """out [R, hidden] = factor * the norm of (residual + addends)[rows]; the residual does not change."""

    def normalize(
        self, source: Tensor, norm: NormWeights, groups: int, factor: float, out: Tensor, *, add: bool = False
    ) -> None:
        """out [T, groups * columns] = factor * the norm of each part of the source, added to what it holds if `add`.

        source: as wide, maybe the same tensor; both may be columns of wider ones
        """

    def prepare_heads(
        self,
        qkv: Tensor,
        heads: Heads,
        positions: Positions,
        query: Tensor,
        keys: Tensor | None,
        values: Tensor | None,
    ) -> None:
        """Norms and rotates a step's queries and keys (RoPE, Su et al., 2021), and stores keys and values.

        qkv:          [T, columns] queries, keys and values as their matrix gives them
        query:        [T, heads, key_dim], written
        keys, values: [num_blocks, *block] of one layer, written; None if nothing is stored
        """

    def activate(self, up: Tensor, activation: ActivationSettings, out: Tensor) -> None:
        """out [T, inner] = activation(up), or activation(gate) * up with both [T, 2 * inner] = gate, then up."""

    def gate(self, gate: Tensor, width: int, function: str, factor: float, target: Tensor) -> None:
        """target [T, columns * width] *= factor * function(gate [T, columns]), each for `width` numbers.

        function: sigmoid, softplus or identity
        """

    def linear(self, source: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """out [T, columns] = source [T, depth] times a matrix [columns, depth], plus bias [columns].

        out: of the type of the source, or of float32
        """

    def quantized_linear(self, source: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, out: Tensor) -> None:
        """The same with a quantized matrix."""

    def float8_linear(self, source: Tensor, matrix: Float8Matrix, bias: Tensor | None, out: Tensor) -> None:
        """The same with a matrix of FP8, and rows that are rounded to FP8 before they are multiplied."""

    def look_up(self, matrix: QuantizedMatrix, ids: Tensor, out: Tensor) -> None:
        """out [T, depth] float32 = the columns ids [T] of a matrix, which are the rows of an embedding."""

    def logits(self, hidden: Tensor, lm_head: Tensor | QuantizedMatrix, out: Tensor | None = None) -> Tensor:
        """Logits [R, vocabulary] float32 of hidden [R, hidden], in `out` if it is given."""

    def finish_logits(self, logits: Tensor, bias: Tensor | None, softcap: float) -> None:
        """logits [R, vocabulary] = softcap * tanh((logits + bias) / softcap), in place; softcap 0 for none."""

    def route(self, scores: Tensor, router: Router) -> Routing:
        """Chooses experts by what the router's matrix gives for each token, [T, experts] float32."""

    def expert_linear(
        self, source: Tensor, routing: Routing, experts: ExpertWeights, out: Tensor, *, gathers: bool, weighs: bool
    ) -> None:
        """out [T * top_k, columns] = each sorted row times the matrix of its expert, plus its bias.

        source:  [T, depth] if it `gathers` the rows of the pairs' tokens; else [T * top_k, depth], sorted
        weighs:  the product is multiplied by the weight of the pair, before the bias
        """

    def combine(self, rows: Tensor, routing: Routing, factor: float, out: Tensor, *, weighs: bool, add: bool) -> None:
        """out [T, columns] = factor * the sum of each token's rows [T * top_k, columns], by their weights if `weighs`.

        add: to what `out` holds
        """

    def convolve(
        self,
        source: Tensor,
        convolution: Convolution,
        state: Tensor,
        recurrence: Recurrence,
        out: Tensor,
        input_gate: Tensor | None,
        output_gate: Tensor | None,
    ) -> None:
        """out [T, channels] = output_gate * activation(convolution(source * input_gate)) of each chunk.

        source, gates: [T, channels], maybe columns of wider tensors
        state:         [slots, channels, kernel - 1], read and written
        """

    def gated_delta(
        self, qkv: Tensor, controls: Tensor, heads: DeltaHeads, state: Tensor, recurrence: Recurrence, out: Tensor
    ) -> None:
        """out [T, value_heads * value_dim] = the gated delta rule over each chunk.

        qkv:      [T, 2 * key_heads * key_dim + value_heads * value_dim]
        controls: [T, 2 * value_heads] b, then a
        state:    [slots, value_heads, key_dim, value_dim], read and written
        """

    def selective_scan(
        self, xbc: Tensor, steps: Tensor, heads: ScanHeads, state: Tensor, recurrence: Recurrence, out: Tensor
    ) -> None:
        """out [T, heads * head_dim] = the scan over each chunk.

        xbc:   [T, heads * head_dim + 2 * groups * state_size] x, B and C
        steps: [T, heads], maybe columns of a wider tensor
        state: [slots, heads, head_dim, state_size], read and written
        """

    def gated_norm(
        self, source: Tensor, gate: Tensor, norm: NormWeights, groups: int, out: Tensor, *, gate_first: bool
    ) -> None:
        """out [T, columns] = norm(source) * silu(gate), or norm(source * silu(gate)) if the gate comes first.

        source, gate: as wide, maybe columns of wider tensors; each of `groups` parts is normed by itself
        """


def head_logits(
    ops: LayerOps, hidden: Tensor, lm_head: Tensor | QuantizedMatrix, out: Tensor | None = None
) -> Tensor:  # fmt: skip
    """What every `LayerOps.logits` does: the library's product, or that of `ops` if that is another one."""
    if isinstance(lm_head, Tensor) and not ops.batch_invariant:
        return multiply_logits(hidden, lm_head, out)
    if out is None:
        columns = len(lm_head) if isinstance(lm_head, Tensor) else lm_head.columns
        out = hidden.new_empty(len(hidden), columns, dtype=torch.float32)
    if isinstance(lm_head, Tensor):
        ops.linear(hidden, lm_head, None, out)
    else:
        ops.quantized_linear(hidden, lm_head, None, out)
    return out


def multiply_logits(hidden: Tensor, lm_head: Tensor, out: Tensor | None = None) -> Tensor:
    """Logits [R, vocabulary] float32 by the library's product; see `LayerOps.logits`.

    In bfloat16, many tokens would share the largest logit. A GPU sums in float32 anyway, and writing that takes less
    time than a kernel that widens the logits for the sampler.
    """
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, lm_head.t(), out_dtype=torch.float32, out=out)
    values = linear(hidden, lm_head).float()
    return values if out is None else out.copy_(values)


def multiply(source: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """The library's product; see `LayerOps.linear`."""
    if bias is None:
        torch.mm(source, matrix.t(), out=out)
    else:
        torch.addmm(bias, source, matrix.t(), out=out)
