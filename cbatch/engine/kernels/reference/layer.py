"""The operations of a layer by torch alone, for any device: the reference of the kernels, and what replaces them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from cbatch.engine.kernels.layer_ops import Positions
from cbatch.engine.runtime.kv_cache import as_bytes, as_stored


@dataclass(frozen=True, slots=True)
class TorchLayerOps:
    """See `LayerOps`. Nothing here waits for a device.

    heads_first: whether blocks are [kv_heads, block_size, head_dim], as Triton's attention has them, and not
                 [block_size, kv_heads, head_dim], as the reference has them
    """

    heads_first: bool = False

    def embed_and_norm(
        self, embedding: Tensor, ids: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        residual.copy_(embedding[ids])
        out.copy_(_norm(residual, weight, eps))

    def add_and_norm(self, residual: Tensor, added: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        residual += added
        out.copy_(_norm(residual, weight, eps))

    def select_and_norm(
        self, residual: Tensor, added: Tensor, rows: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        out.copy_(_norm(residual[rows] + added[rows], weight, eps))

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
        tokens, heads, dim = query.shape
        kv_heads = keys.shape[1 if self.heads_first else 2]
        new_query, new_keys, new_values = torch.split(qkv.view(tokens, -1, dim), [heads, kv_heads, kv_heads], dim=1)
        query_norm, key_norm = (None, None) if norms is None else torch.split(norms, dim)
        query.copy_(_norm_and_rotate(new_query, query_norm, eps, positions))
        new_keys = _norm_and_rotate(new_keys, key_norm, eps, positions)
        store_in_blocks(keys, new_keys, positions.slots, heads_first=self.heads_first)
        store_in_blocks(values, new_values, positions.slots, heads_first=self.heads_first)

    def silu_and_mul(self, gate_up: Tensor, out: Tensor) -> None:
        gate, up = gate_up.float().chunk(2, dim=-1)
        out.copy_(silu(gate) * up)

    def logits(self, hidden: Tensor, lm_head: Tensor, out: Tensor | None = None) -> Tensor:
        logits = linear(hidden, lm_head).float()
        return logits if out is None else out.copy_(logits)


def store_in_blocks(cache: Tensor, new: Tensor, slots: Tensor, *, heads_first: bool) -> None:
    """Writes new [T, kv_heads, dim] to the slots [T] that are not negative, without asking the device which these are.

    cache: [num_blocks, *block] of one layer; for `heads_first` see `TorchLayerOps`
    """
    blocks = as_bytes(cache).transpose(1, 2) if heads_first else as_bytes(cache)
    block_size = blocks.shape[1]
    is_stored = slots >= 0
    # A token without a slot does again what the first one with a slot does; if there is none, nothing changes.
    doer = torch.where(is_stored, torch.arange(len(slots), device=slots.device), is_stored.byte().argmax())
    place = slots[doer].clamp(min=0)
    block, offset = torch.div(place, block_size, rounding_mode="floor"), place % block_size
    blocks[block, offset] = torch.where(
        is_stored.any(), as_bytes(as_stored(new[doer], cache.dtype)), blocks[block, offset]
    )


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.float()


def _norm_and_rotate(heads: Tensor, norm: Tensor | None, eps: float, positions: Positions) -> Tensor:
    """Heads [T, heads, dim] rotated by their positions (RoPE), float32."""
    heads = heads.float() if norm is None else _norm(heads, norm, eps)
    left, right = heads.chunk(2, dim=-1)
    cosines, sines = positions.cosines[:, None], positions.sines[:, None]
    return torch.cat([left * cosines - right * sines, right * cosines + left * sines], dim=-1)
