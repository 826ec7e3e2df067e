"""The KV cache in memory, and amounts of memory as users write them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cbatch.base.errors import ConfigError
from cbatch.base.units import parse_memory
from cbatch.runtime.kv_cache import FP8, U8, KVCache, as_bytes
from cbatch.runtime.state_pool import StatePool, StateShape

GIB = 2**30
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "expected"), [("90%", 900), ("4GiB", 4 * GIB), ("1.5 kb", 1500), ("512", 512), ("100%", 1000)]
)
def test_amounts_are_parsed_as_users_write_them(text: str, expected: int) -> None:
    """Guards the units of --kv-cache-memory."""
    assert parse_memory(text, 1000) == expected


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "0%", "101%", "4 GiB of it", "nan"])
def test_other_amounts_are_refused(text: str) -> None:
    """Guards against a cache of a size that was not requested."""
    with pytest.raises(ConfigError, match="not an amount of memory"):
        parse_memory(text, 1000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, U8, FP8])
def test_blocks_are_copied_in_every_layer(dtype: torch.dtype) -> None:
    """Guards keys and values of every layer of a copied block, and those of all other blocks."""
    cache = KVCache([((4, 3), (5, 4)), ((4, 2), (2, 4))], 4, 4, dtype, CPU)
    for number, part in enumerate([*cache.keys, *cache.values]):
        as_bytes(part).copy_(torch.arange(4).view(-1, 1, 1) + 10 * number)
    cache.copy_blocks(np.array([[0, 3], [1, 2]]))
    for number, part in enumerate([*cache.keys, *cache.values]):
        expected = torch.tensor([0, 1, 1, 0]).view(-1, 1, 1) + 10 * number
        assert torch.equal(as_bytes(part).int(), expected.int().expand(part.shape))


def test_layers_lie_in_one_tensor() -> None:
    """Guards what the CPU's kernels read: the layers of a device one after the other, each its own part of a tensor."""
    kv_cache = KVCache([((4, 3), (4, 5))] * 3, 2, 4, torch.float32, CPU)
    assert kv_cache.flat is not None and kv_cache.flat[1].shape == (3 * 2 * 4 * 5,)
    kv_cache.flat[0].zero_()
    kv_cache.keys[1].fill_(1)
    assert [int(part.sum()) for part in kv_cache.flat[0].chunk(3)] == [0, 24, 0]
    unlike = KVCache([((4, 3), (4, 5)), ((4, 2), (4, 2))], 2, 4, torch.float32, CPU)
    assert unlike.flat is not None and unlike.values[1].shape == (2, 4, 2)
    unlike.flat[1].zero_()
    unlike.values[0].fill_(1)
    assert int(unlike.flat[1].sum()) == 2 * 4 * 5 and not unlike.values[1].any()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which pages are resident")
def test_the_first_token_touches_little_memory() -> None:
    """Guards the time to the first token: the system cleared two large pages of each layer for its keys and values."""

    def resident_bytes() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    kv_cache = KVCache([((2**12,), (2**12,))] * 8, 1000, 16, torch.float32, CPU)
    before = resident_bytes()
    for layer in (*kv_cache.keys, *kv_cache.values):
        layer[:2].fill_(1)
    assert 2**19 <= resident_bytes() - before < 2**22


def test_states_of_one_type_lie_in_one_tensor() -> None:
    """Guards kernels that find every state by where it begins, and slots that are zeroed or copied for them."""
    shapes = [StateShape((3, 2), torch.float32), StateShape((5,), torch.float32)]
    pool = StatePool(shapes, 4, CPU)
    assert pool.flat is not None and len(pool.flat) == 4 * 11
    pool.flat.copy_(torch.arange(44.0))
    pool.zero([2])
    pool.copy([0, 2], [3, 1])
    first, second = pool.flat[:24].view(4, 6), pool.flat[24:].view(4, 5)
    assert first[1:].tolist() == [[0.0] * 6, [0.0] * 6, list(range(6))]
    assert second[1:].tolist() == [[0.0] * 5, [0.0] * 5, [24.0, 25.0, 26.0, 27.0, 28.0]]
