"""How much memory the KV cache takes, and how people say it."""

from __future__ import annotations

import pytest
import torch

from cbatch.engine.errors import ConfigError
from cbatch.engine.kv_pool import KVPool, LayerShape, choose_num_blocks
from cbatch.engine.units import format_bytes, parse_memory

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "expected"), [("90%", 900), ("4GiB", 4 * GIB), ("1.5 kb", 1500), ("512", 512), ("100%", 1000)]
)
def test_amounts_are_read_as_people_write_them(text: str, expected: int) -> None:
    """Guards the units of --kv-cache-memory."""
    assert parse_memory(text, 1000) == expected


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "0%", "101%", "4 GiB of it", "nan"])
def test_other_amounts_are_refused(text: str) -> None:
    """Guards against a cache of a size nobody asked for."""
    with pytest.raises(ConfigError, match="no amount of memory"):
        parse_memory(text, 1000)


def choose(memory: str | None = None, num_blocks: int | None = None, per_block: int = 2**20) -> int:
    return choose_num_blocks(
        memory=memory,
        num_blocks=num_blocks,
        bytes_per_block=per_block,
        blocks_wanted=50,
        device=torch.device("cpu"),
    )


def test_the_cache_takes_no_more_than_it_can_use() -> None:
    """Guards a laptop's memory: never more than every seat's full context needs."""
    assert choose("10MiB") == 10 and choose("1GiB") == 50 and choose() == 50 and choose(num_blocks=7) == 7


@pytest.mark.parametrize("memory", ["1KiB", "100000GiB"])
def test_too_little_and_too_much_are_refused(memory: str) -> None:
    """Guards against a cache that holds nothing, and one that the machine does not have."""
    with pytest.raises(ConfigError, match=r"does not hold one block|are free"):
        choose(memory)


def test_an_exact_number_of_blocks_must_fit_too() -> None:
    """Guards the machine against --kv-blocks beyond its memory."""
    with pytest.raises(ConfigError, match="are free"):
        choose(num_blocks=10**12)


def test_bytes_of_a_token() -> None:
    """Guards the figure the articles get wrong: Llama 2 7B takes 512 KiB a token over its 32 layers."""
    layer = LayerShape(heads=32, key_dim=128, value_dim=128)
    assert format_bytes(32 * layer.bytes_per_token(torch.float16)) == "512.0 KiB"


def test_layers_that_are_alike_lie_side_by_side() -> None:
    """Guards what the fast path reads: all layers in one tensor where they are alike, and each its own part of it."""
    pool = KVPool([((4, 3), (4, 5))] * 3, num_blocks=2, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
    assert pool.stacks is not None and pool.stacks[1].shape == (3, 2, 4, 5)
    pool.stacks[0].zero_()
    pool.keys[1].fill_(1)
    assert [int(part.sum()) for part in pool.stacks[0]] == [0, 24, 0]
    unlike = KVPool([((4, 3), (4, 5)), ((4, 2), (4, 2))], 2, 4, torch.float32, torch.device("cpu"))
    assert unlike.stacks is None and unlike.values[1].shape == (2, 4, 2)
