"""The operations of a layer by Triton's kernels (see `LayerOps`).

Sums, norms, angles and gates are float32 whatever the tensors are. No argument of a kernel that changes from step to
step is a number on the host: nothing is compiled again, and a captured launch is right for the next step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cbatch.kernels.float8_matrix import Float8Matrix
from cbatch.kernels.layer_ops import (
    ActivationSettings,
    Addend,
    Convolution,
    DeltaHeads,
    Embedding,
    ExpertWeights,
    Heads,
    NormWeights,
    Positions,
    Recurrence,
    Router,
    Routing,
    ScanHeads,
    head_logits,
    multiply,
)
from cbatch.kernels.quantized_matrix import QuantizedMatrix
from cbatch.kernels.triton import activation as activations
from cbatch.kernels.triton import heads as projections
from cbatch.kernels.triton import norm as norms
from cbatch.kernels.triton.occupancy import device_limits
from cbatch.kernels.triton.products import experts as mixtures
from cbatch.kernels.triton.products import float8
from cbatch.kernels.triton.products import quantized as products
from cbatch.kernels.triton.products.linear import tiled_linear
from cbatch.kernels.triton.recurrence import convolution as convolutions
from cbatch.kernels.triton.recurrence import gated_delta as delta_rules
from cbatch.kernels.triton.recurrence import gated_norm as gated_norms
from cbatch.kernels.triton.recurrence import selective_scan as scans


@dataclass(frozen=True, slots=True)
class TritonLayerOps:
    """See `LayerOps`.  capability: of the chip, 90 for 9.0"""

    capability: int
    batch_invariant: bool = False

    @classmethod
    def for_device(cls, device: torch.device) -> TritonLayerOps:
        return cls(device_limits(device).capability)

    @property
    def heads_first(self) -> bool:
        return True

    def embed_and_norm(
        self,
        embedding: Embedding,
        ids: Tensor,
        positions: Tensor,
        residual: Tensor,
        norm: NormWeights | None,
        out: Tensor | None,
    ) -> None:
        norms.embed_and_norm(embedding, ids, positions, residual, norm, out)

    def add_and_norm(
        self, residual: Tensor, addends: tuple[Addend, ...], norm: NormWeights | None, out: Tensor | None
    ) -> None:
        norms.add_and_norm(residual, addends, norm, out)

    def select_and_norm(
        self,
        residual: Tensor,
        addends: tuple[Addend, ...],
        rows: Tensor,
        norm: NormWeights,
        factor: float,
        out: Tensor,
    ) -> None:
        norms.select_and_norm(residual, addends, rows, norm, factor, out)

    def normalize(
        self, source: Tensor, norm: NormWeights, groups: int, factor: float, out: Tensor, *, add: bool = False
    ) -> None:
        norms.normalize(source, norm, groups, factor, out, add=add)

    def prepare_heads(
        self,
        qkv: Tensor,
        heads: Heads,
        positions: Positions,
        query: Tensor,
        keys: Tensor | None,
        values: Tensor | None,
    ) -> None:
        projections.prepare_heads(qkv, heads, positions, query, keys, values)

    def activate(self, up: Tensor, activation: ActivationSettings, out: Tensor) -> None:
        activations.activate(up, activation, out)

    def gate(self, gate: Tensor, width: int, function: str, factor: float, target: Tensor) -> None:
        activations.gate(gate, width, function, factor, target)

    def linear(self, source: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor) -> None:
        if self.batch_invariant:
            tiled_linear(source, matrix, bias, out, self.capability)
        else:
            multiply(source, matrix, bias, out)

    def quantized_linear(self, source: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, out: Tensor) -> None:
        products.quantized_linear(
            source, matrix, bias, out, self.capability, batch_invariant=self.batch_invariant
        )  # fmt: skip

    def float8_linear(self, source: Tensor, matrix: Float8Matrix, bias: Tensor | None, out: Tensor) -> None:
        float8.float8_linear(source, matrix, bias, out)

    def look_up(self, matrix: QuantizedMatrix, ids: Tensor, out: Tensor) -> None:
        products.look_up(matrix, ids, out)

    def logits(self, hidden: Tensor, lm_head: Tensor | QuantizedMatrix, out: Tensor | None = None) -> Tensor:
        return head_logits(self, hidden, lm_head, out)

    def finish_logits(self, logits: Tensor, bias: Tensor | None, softcap: float) -> None:
        activations.finish_logits(logits, bias, softcap)

    def route(self, scores: Tensor, router: Router) -> Routing:
        return mixtures.route(scores, router)

    def expert_linear(
        self, source: Tensor, routing: Routing, experts: ExpertWeights, out: Tensor, *, gathers: bool, weighs: bool
    ) -> None:
        mixtures.expert_linear(
            source, routing, experts, out, self.capability, gathers=gathers, weighs=weighs,
            batch_invariant=self.batch_invariant,
        )  # fmt: skip

    def combine(self, rows: Tensor, routing: Routing, factor: float, out: Tensor, *, weighs: bool, add: bool) -> None:
        mixtures.combine(rows, routing, factor, out, weighs=weighs, add=add)

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
        convolutions.convolve(source, convolution, state, recurrence, out, input_gate, output_gate)

    def gated_delta(
        self, qkv: Tensor, controls: Tensor, heads: DeltaHeads, state: Tensor, recurrence: Recurrence, out: Tensor
    ) -> None:
        delta_rules.gated_delta(qkv, controls, heads, state, recurrence, out, self.capability)

    def selective_scan(
        self, xbc: Tensor, steps: Tensor, heads: ScanHeads, state: Tensor, recurrence: Recurrence, out: Tensor
    ) -> None:
        scans.selective_scan(xbc, steps, heads, state, recurrence, out, self.capability)

    def gated_norm(
        self, source: Tensor, gate: Tensor, norm: NormWeights, groups: int, out: Tensor, *, gate_first: bool
    ) -> None:
        gated_norms.gated_norm(source, gate, norm, groups, out, gate_first=gate_first)
