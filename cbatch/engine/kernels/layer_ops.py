"""The operations of a layer of the Llama family between its matrix products, as `models/cuda.py` calls them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Positions(NamedTuple):
    """Where the T tokens of a step stand.

    cosines, sines: [T, head_dim / 2] float32, of their rotary angles
    slots:          [T] places in the cache; a token with a negative slot is not stored
    """

    cosines: Tensor
    sines: Tensor
    slots: Tensor


class LayerOps(Protocol):
    """What computes these operations: Triton's kernels (`kernels/triton/layer.py`), or torch (`kernels/reference`).

    Sums, norms, angles, gates and the residual stream are float32 whatever the other tensors are.
    """

    @property
    def heads_first(self) -> bool:
        """Whether a block of the cache is [kv_heads, block_size, head_dim]; else [block_size, kv_heads, head_dim]."""

    def embed_and_norm(
        self, embedding: Tensor, ids: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """residual [T, hidden] float32 = embedding[ids]; out [T, hidden] = its RMSNorm (Zhang and Sennrich, 2019)."""

    def add_and_norm(self, residual: Tensor, added: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """residual [T, hidden] float32 += added [T, hidden]; out [T, hidden] = its RMSNorm."""

    def select_and_norm(
        self, residual: Tensor, added: Tensor, rows: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """out [R, hidden] = RMSNorm of (residual + added)[rows]; the residual does not change."""

    def rope_and_store_kv(
        self,
        qkv: Tensor,
        positions: Positions,
        norms: Tensor | None,
        eps: float,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """Norms and rotates a step's queries and keys, and stores keys and values in the cache of one layer.

        qkv:          [T, (heads + 2 * kv_heads) * head_dim] queries, keys and values as their matrix gives them
        norms:        [2 * head_dim] weights of the norms of queries, then of keys, if the model has them
        query:        [T, heads, head_dim], written
        keys, values: [num_blocks, *block], written
        """

    def silu_and_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """out [T, inner] = silu(gate) * up (SwiGLU, Shazeer, 2020), with both [T, 2 * inner] = gate, then up."""

    def logits(self, hidden: Tensor, lm_head: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits [R, vocabulary] float32 of hidden [R, hidden], in `out` if it is given."""
