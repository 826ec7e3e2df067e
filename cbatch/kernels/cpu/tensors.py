"""Torch tensors as arrays that the kernels take, without copying them."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.kernels.cpu.matmul.byte_tile import byte_tile_address
from cbatch.kernels.cpu.matmul.microkernel import LANES, microkernel_address
from cbatch.kernels.cpu.paged_kv import PagedCaches, PagedKV
from cbatch.runtime.kv_cache import U8, U8_SCALE_BYTES, KVCache, LayerShape, Shape

DTYPES = (torch.float32, torch.bfloat16)


def as_array(tensor: Tensor) -> NDArray[Any]:
    """An array over the tensor's memory; bfloat16 as uint16. Copies only what is not contiguous."""
    tensor = tensor.detach().contiguous()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def element_of(dtype: torch.dtype) -> np.dtype[Any]:
    """The type of arrays of float32 or bfloat16."""
    return np.dtype(np.float32 if dtype == torch.float32 else np.uint16)


def fits(layers: list[LayerShape], block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> bool:
    """Whether the cache of these layers can be laid out in panels. kv_dtype: None for `dtype`"""
    per_word = 4 if kv_dtype == U8 else 2
    even = all(layer.key_dim % per_word == 0 and layer.value_dim % LANES == 0 for layer in layers)
    return even and block_size % LANES == 0 and dtype in DTYPES


def block_shapes(layer: LayerShape, block_size: int, dtype: torch.dtype) -> tuple[Shape, Shape]:
    """Shapes of the keys and of the values of a block (see `paged_kv.py`)."""
    if dtype == U8:
        panels = layer.heads, block_size // LANES
        return (*panels, layer.key_dim + U8_SCALE_BYTES, LANES), (*panels, layer.value_dim + U8_SCALE_BYTES, LANES)
    pair = 1 if dtype == torch.float32 else 2
    keys = (layer.heads, block_size // LANES, layer.key_dim // pair, LANES, pair)
    return keys, (layer.heads, layer.value_dim // LANES, block_size // pair, LANES, pair)


def paged_kv_of(keys: Tensor, values: Tensor, element: np.dtype[Any]) -> PagedKV:
    """The cache of one layer: keys and values [num_blocks, *block shape]. element: of products with them"""
    heads, panels = keys.shape[1:3]
    if keys.dtype == U8:
        key_dim, value_dim = (part.shape[3] - U8_SCALE_BYTES for part in (keys, values))
    else:
        key_dim, value_dim = keys.shape[3] * keys.shape[5], values.shape[2] * LANES
    return PagedKV(
        byte_tile_address() if keys.dtype == U8 else microkernel_address(element),
        as_array(keys).reshape(-1).view(np.uint8),
        as_array(values).reshape(-1).view(np.uint8),
        keys.itemsize,
        True if keys.dtype == U8 else None,
        heads,
        key_dim,
        value_dim,
        panels * LANES,
    )


def paged_caches_of(kv_cache: KVCache, element: np.dtype[Any]) -> PagedCaches:
    """The caches of all layers; see `paged_kv_of`. Raises ValueError if they do not lie in one tensor."""
    if not kv_cache.keys:
        none, size = np.empty(0, np.uint8), kv_cache.block_size
        nothing = PagedKV(microkernel_address(element), none, none, element.itemsize, None, 0, 0, 0, size)
        return PagedCaches(nothing, np.empty((0, 5), np.int64))
    if kv_cache.flat is None:
        raise ValueError("The layers' caches must lie in one tensor.")
    layers = [paged_kv_of(keys, values, element) for keys, values in zip(kv_cache.keys, kv_cache.values, strict=True)]
    starts = [[0, *accumulate(len(getattr(kv, part)) for kv in layers)] for part in ("keys", "values")]
    rows = [(key, value, kv.heads, kv.key_dim, kv.value_dim) for key, value, kv in zip(*starts, layers, strict=False)]
    keys, values = (as_array(flat).view(np.uint8) for flat in kv_cache.flat)
    return PagedCaches(layers[0]._replace(keys=keys, values=values), np.array(rows, np.int64))
