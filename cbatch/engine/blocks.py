"""The KV cache's address space: which blocks are free, and which are taken."""

from __future__ import annotations

from collections import deque


class BlockPool:
    """Hands out block ids `0 .. num_blocks-1`; each block holds `block_size` tokens.

    Invariant: every id is either in the free list or taken, never both, and is handed out once at a time.
    Paged attention's block pool: Kwon et al., https://arxiv.org/abs/2309.06180.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._taken = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def capacity(self) -> int:
        """Tokens that fit when the pool is empty."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks; the caller has made sure that so many are free."""
        if count > len(self._free):
            raise AssertionError(f"{count} blocks asked for, {len(self._free)} free")
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._taken[block] = 1
        return blocks

    def free(self, blocks: list[int]) -> None:
        for block in blocks:
            if not self._taken[block]:
                raise AssertionError(f"block {block} freed twice")
            self._taken[block] = 0
        self._free.extend(blocks)

    def check_integrity(self) -> None:
        """Raises AssertionError where free and taken do not add up; tests call it after every step."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert all(self._taken[block] == (block not in free) for block in range(self.num_blocks))
