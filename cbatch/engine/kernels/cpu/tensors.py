"""Torch tensors as arrays that the kernels take, without copying them."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.engine.kernels.cpu.microkernel import LANES, microkernel_address
from cbatch.engine.kernels.cpu.paged_kv import PagedKV
from cbatch.engine.runtime.kv_cache import LayerShape, Shape

DTYPES = (torch.float32, torch.bfloat16)


def as_array(tensor: Tensor) -> NDArray[Any]:
    """An array over the tensor's memory; bfloat16 as uint16. Copies only what is not contiguous."""
    tensor = tensor.detach().contiguous()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def fits(layers: list[LayerShape], block_size: int, dtype: torch.dtype) -> bool:
    """Whether the cache of these layers can be laid out in panels."""
    even = all(layer.key_dim % 2 == 0 and layer.value_dim % LANES == 0 for layer in layers)
    return even and block_size % LANES == 0 and dtype in DTYPES


def block_shapes(layer: LayerShape, block_size: int, dtype: torch.dtype) -> tuple[Shape, Shape]:
    """Shapes of the keys and of the values of a block (see `paged_kv.py`)."""
    pair = 1 if dtype == torch.float32 else 2
    keys = (layer.heads, block_size // LANES, layer.key_dim // pair, LANES, pair)
    return keys, (layer.heads, layer.value_dim // LANES, block_size // pair, LANES, pair)


def paged_kv_of(keys: Tensor, values: Tensor) -> PagedKV:
    """The cache of several layers: keys and values [layers, num_blocks, *block shape]."""
    heads, panels, steps, _, pair = keys.shape[2:]
    return PagedKV(
        microkernel_address(as_array(keys).dtype),
        as_array(keys).reshape(len(keys), -1),
        as_array(values).reshape(len(values), -1),
        heads,
        steps * pair,
        values.shape[3] * LANES,
        panels * LANES,
    )
