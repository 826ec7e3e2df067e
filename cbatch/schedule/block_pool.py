"""The blocks of the KV cache: which are free, which are used how often, and what the full ones hold (prefix cache)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

ROOT, UNKNOWN = 0, -1
"""Content numbers: of what comes before a first block, and of a block that is not cached."""


class BlockPool:
    """Hands out block ids `0 .. num_blocks-1`; each block holds `block_size` tokens.

    A block has one reference for each request that holds it; without any it is free. A full block can be cached: it is
    then found by its tokens and the content before it, so that a request that begins with the same tokens takes the
    block instead of computing it again. The tokens themselves are compared, not a hash of them. A free block keeps its
    content until it is allocated again; the least recently used one goes first, and the end of a sequence before its
    beginning.

    Paged attention's block pool: Kwon et al., https://arxiv.org/abs/2309.06180.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._references = [0] * num_blocks
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}
        self._keys: list[tuple[int, tuple[int, ...]] | None] = [None] * num_blocks
        self._contents = [UNKNOWN] * num_blocks
        self._last_content = ROOT
        self.cached_contents: dict[int, int] = {}
        """The blocks that can be found, by their content numbers."""
        self._begun: dict[tuple[int, tuple[int, ...]], int] = {}
        self._begun_keys: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.on_evict: Callable[[int], None] | None = None
        """Called with the content number of each block that leaves the prefix cache."""

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

    def ref_count(self, block: int) -> int:
        """Number of requests that hold a block."""
        return self._references[block]

    def contents(self, blocks: Sequence[int]) -> list[int]:
        """The content number of each block, which stands for its tokens and all before them; UNKNOWN if not cached."""
        return [self._contents[block] for block in blocks]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks. The caller has made sure that they are free."""
        if count > len(self._free):
            raise AssertionError(f"{count} blocks asked for, {len(self._free)} free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        self.evict(blocks)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Drops one reference to each block of a sequence."""
        for block in reversed(blocks):
            if self._references[block] == 0:
                raise AssertionError(f"block {block} freed twice")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                self._free.move_to_end(block, last=self._keys[block] is not None or block in self._begun_keys)

    def get_cached_blocks(
        self, token_ids: Sequence[int], kind: int = 0, most: int | None = None, behind: Sequence[int] = ()
    ) -> list[int]:
        """Cached blocks that hold the beginning of a sequence, without its last token, which has to be computed.

        kind:   sequences of different kinds share nothing; not negative
        most:   tokens that they may hold; None: all but the last
        behind: blocks that the sequence has already; those that follow them are returned
        """
        size, most = self.block_size, len(token_ids) - 1 if most is None else most
        blocks: list[int] = []
        content = self._contents[behind[-1]] if behind else _root(kind)
        for start in range(len(behind) * size, most - size + 1 if content != UNKNOWN else 0, size):
            block = self._known.get((content, tuple(token_ids[start : start + size])))
            if block is None:
                break
            blocks.append(block)
            content = self._contents[block]
        return blocks

    def touch(self, blocks: Sequence[int]) -> None:
        """Adds one reference to each block that `get_cached_blocks` has found."""
        for block in blocks:
            self._references[block] += 1
            self._free.pop(block, None)

    def cache_full_blocks(
        self, blocks: Sequence[int], token_ids: Sequence[int], start: int, stop: int, kind: int = 0
    ) -> None:
        """Caches the blocks of a sequence that its tokens `start .. stop-1` fill.  kind: see `get_cached_blocks`"""
        size = self.block_size
        for index in range(start // size, stop // size):
            before = self._contents[blocks[index - 1]] if index else _root(kind)
            if before == UNKNOWN:
                return
            key = before, tuple(token_ids[index * size : (index + 1) * size])
            block, same = blocks[index], self._known.get(key)
            if same is None:
                self._last_content += 1
                self._known[key], self._keys[block] = block, key
                self._contents[block] = self._last_content
                self.cached_contents[self._last_content] = block
            else:  # computed twice, side by side: what follows is the same
                self._contents[block] = self._contents[same]

    def cache_begun_block(self, blocks: Sequence[int], token_ids: Sequence[int], stop: int, kind: int = 0) -> int:
        """Caches the last tokens before `stop`, which begin a block, and returns this block.

        Others can have a copy of the block, but not hold it, since tokens of its owner follow in it.

        kind: see `get_cached_blocks`
        """
        block, key = blocks[stop // self.block_size], self._begun_key(blocks, token_ids, stop, kind)
        if key[0] != UNKNOWN and key not in self._begun and block not in self._begun_keys:
            self._begun[key], self._begun_keys[block] = block, key
        return block

    def get_begun_block(self, blocks: Sequence[int], token_ids: Sequence[int], stop: int, kind: int = 0) -> int | None:
        """The cached block that begins as `cache_begun_block` says; None if there is none."""
        return self._begun.get(self._begun_key(blocks, token_ids, stop, kind))

    def _begun_key(
        self, blocks: Sequence[int], token_ids: Sequence[int], stop: int, kind: int
    ) -> tuple[int, tuple[int, ...]]:
        full = stop // self.block_size
        before = self._contents[blocks[full - 1]] if full else _root(kind)
        return before, tuple(token_ids[full * self.block_size : stop])

    def evict(self, blocks: Sequence[int]) -> None:
        """Removes blocks from the prefix cache."""
        for block in blocks:
            if (begun := self._begun_keys.pop(block, None)) is not None:
                del self._begun[begun]
            if (key := self._keys[block]) is not None:
                del self._known[key]
                self._keys[block] = None
                del self.cached_contents[self._contents[block]]
                if self.on_evict is not None:
                    self.on_evict(self._contents[block])
            self._contents[block] = UNKNOWN

    def check_integrity(self) -> None:
        """Raises AssertionError if references, free blocks and contents do not fit; tests call it after every step."""
        assert all((count == 0) == (block in self._free) for block, count in enumerate(self._references))
        assert all(self._keys[block] == key for key, block in self._known.items())
        assert sum(key is not None for key in self._keys) == len(self._known), "a key leads to another block"
        assert {block: key for key, block in self._begun.items()} == self._begun_keys
        assert self.cached_contents == {self._contents[block]: block for block in self._known.values()}


def _root(kind: int) -> int:
    return UNKNOWN - kind if kind else ROOT
