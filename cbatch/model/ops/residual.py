"""The residual stream on a device: what is added to it, and its norm for what comes next."""

from __future__ import annotations

import torch
from torch import Tensor

from cbatch.kernels.operands import Addend, Embedding, NormWeights
from cbatch.model.ops.device_kernel import device_kernel


def normed(x: Tensor, norm: NormWeights) -> Tensor:
    """The last dimension, normed in float32."""
    x = x.float()
    if norm.kind == "layer":
        x = x - x.mean(dim=-1, keepdim=True)
    if norm.kind != "none":
        x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + norm.eps)
    x = x if norm.weight is None else x * norm.weight
    return x if norm.bias is None else x + norm.bias


def scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else factor * x


def _value_of(addend: Addend) -> Tensor:
    value = addend.value if addend.norm is None else normed(addend.value, addend.norm)
    return scaled(value.float(), addend.factor)


@device_kernel("norm:embed_and_norm")
def embed_and_norm(
    embedding: Embedding, ids: Tensor, positions: Tensor, residual: Tensor, norm: NormWeights | None, out: Tensor | None
) -> None:
    """residual [T, columns] float32 = the embedding of ids [T] at positions [T]; out [T, columns] = its norm."""
    residual.copy_(embedding.table[ids])
    if embedding.scale != 1:
        residual *= embedding.scale
    if embedding.positions is not None:
        residual += embedding.positions[positions + embedding.offset]
    if out is not None and norm is not None:
        out.copy_(normed(residual, norm))


@device_kernel("norm:add_and_norm", updates="residual")
def add_and_norm(residual: Tensor, addends: tuple[Addend, ...], norm: NormWeights | None, out: Tensor | None) -> None:
    """residual [T, hidden] float32 += up to two addends, of which the first may have a norm.

    out: [T, hidden] = the norm of the residual; None for none
    """
    for addend in addends:
        residual += _value_of(addend)
    if out is not None and norm is not None:
        out.copy_(normed(residual, norm))


@device_kernel("norm:select_and_norm")
def select_and_norm(
    residual: Tensor, addends: tuple[Addend, ...], rows: Tensor, norm: NormWeights, factor: float, out: Tensor
) -> None:
    """out [R, hidden] = factor * the norm of (residual + addends)[rows]; the residual does not change."""
    chosen = residual[rows]
    for addend in addends:
        chosen += _value_of(addend._replace(value=addend.value[rows]))
    out.copy_(scaled(normed(chosen, norm), factor))


@device_kernel("norm:normalize")
def normalize(source: Tensor, norm: NormWeights, groups: int, factor: float, out: Tensor, *, add: bool = False) -> None:
    """out [T, groups * columns] = factor * the norm of each part of the source, added to what it holds if `add`.

    source: as wide, maybe the same tensor; both may be columns of wider ones
    """
    found = scaled(normed(source.view(len(source), groups, -1), norm).flatten(1), factor)
    out.copy_(out + found if add else found)
