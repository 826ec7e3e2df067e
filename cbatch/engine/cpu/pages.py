"""Where keys and values lie for the CPU's attention, and what it is told of a step.

A page is the keys or values of one block, for one head, in panels (see `tile`):

    keys    [num_blocks, heads, block_size / 16, key_dim / pair, 16, pair]      16 tokens are the columns of a panel
    values  [num_blocks, heads, value_dim / 16, block_size / pair, 16, pair]    16 numbers of a value are
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.engine.cpu.memory import empty
from cbatch.engine.cpu.softmax import CHUNK
from cbatch.engine.cpu.tile import COLUMNS, LANES, MAX_ROWS, filled_up

_QUERIES = 96
"""Query rows (tokens times heads that share keys) for which a chunk of keys is used while it is in the cache."""


SEGMENT = 512
"""Tokens of a sequence that are seen one after the other; what each such part gives is added up in their order.

So several threads may look at one sequence, and a token's result is the same however many they are.
"""


class Pages(NamedTuple):
    """Where the cache of a model's layers lies, all with the same heads and sizes.

    code:          of the tiles (see `tile_code`)
    keys, values:  [layers, all pages of a layer] float32, or uint16 for bfloat16
    """

    code: int
    keys: NDArray[Any]
    values: NDArray[Any]
    heads: int
    key_dim: int
    value_dim: int
    block_size: int


class Slices(NamedTuple):
    """The sequences of a step, and the pieces in which they attend.

    tables:  [S, B] int32 blocks of each sequence
    starts:  [S] int64 place in its sequence of a slice's first token
    firsts:  [S] int64 row of the step with that token
    pieces:  [N, 6] int64: sequence, first query token in its slice, number of query tokens, the tokens that they may
             see (from, up to), and the number of the part if others see the rest, else -1
    merges:  [M, 3] int64: row of the step, the first of its parts, and how many there are
    parts:   [parts, query heads, value_dim + 2] float32 states (see `attention`)
    slots:   [T] int64 where each token goes: block * block_size + offset
    lasts:   [T] bool, whether a token is the last of its slice
    """

    tables: NDArray[np.int32]
    starts: NDArray[np.int64]
    firsts: NDArray[np.int64]
    pieces: NDArray[np.int64]
    merges: NDArray[np.int64]
    parts: NDArray[np.float32]
    slots: NDArray[np.int64]
    lasts: NDArray[np.bool_]


def cut(
    tables: NDArray[np.int32],
    starts: Sequence[int],
    stops: Sequence[int],
    slots: NDArray[np.int64],
    heads: int,
    group: int,
    value_dim: int,
) -> Slices:
    """A step's slices, cut into pieces of which none is too large.

    heads: of queries, of which each `group` shares one head of the cache
    """
    begins = np.array(starts)
    counts = np.array(stops) - begins
    ends = counts.cumsum()
    most = max(1, _QUERIES // group)
    alone = (counts == 1) & (begins >= SEGMENT)
    numbers = np.where(alone, begins // SEGMENT + 1, -(-counts // most))
    before = numbers.cumsum() - numbers
    sequence = np.repeat(np.arange(len(counts)), numbers)
    number, is_part = np.arange(len(sequence)) - before[sequence], alone[sequence]
    first = np.where(is_part, 0, number * most)
    tokens = np.minimum(most, counts[sequence] - first)
    begin = np.where(is_part, number * SEGMENT, 0)
    end = begins[sequence] + first + tokens
    end = np.where(is_part, np.minimum(end, begin + SEGMENT), end)
    part = np.where(is_part, is_part.cumsum() - 1, -1)
    pieces = np.stack([sequence, first, tokens, begin, end, part], axis=1)
    longest_first = np.argsort((begin - end) * tokens, kind="stable")
    of_many = np.flatnonzero(alone)
    merges = np.stack([(ends - counts)[of_many], part[before[of_many]], numbers[of_many]], axis=1)
    parts = np.empty((int(is_part.sum()), heads, value_dim + 2), np.float32)
    lasts = np.zeros(len(slots), np.bool_)
    lasts[ends - 1] = True
    return Slices(tables, begins, ends - counts, pieces[longest_first], merges, parts, slots, lasts)


class Rule(NamedTuple):
    """How a layer attends. window, softcap: 0 for none; sinks: [query heads] float32, empty for none."""

    scale: float
    window: int
    softcap: float
    sinks: NDArray[np.float32]


class Workspace(NamedTuple):
    """What each thread needs for one piece: [threads, ...], rows for query tokens times the heads of a group.

    states: [threads, 2, rows, filled up value_dim + 32], of the first segment and of a later one
    """

    panels: NDArray[np.int64]
    pairs: NDArray[np.int64]
    query: NDArray[Any]
    scores: NDArray[np.float32]
    weights: NDArray[Any]
    states: NDArray[np.float32]


def new_workspace(threads: int, group: int, key_dim: int, value_dim: int, dtype: np.dtype[Any]) -> Workspace:
    rows = max(_QUERIES, group)
    return Workspace(
        empty((threads, 2, CHUNK // LANES), np.int64),
        empty((threads, CHUNK // LANES, 2), np.int64),
        empty((threads, rows, key_dim), dtype),
        empty((threads, MAX_ROWS, CHUNK), np.float32),
        empty((threads, MAX_ROWS, CHUNK), dtype),
        empty((threads, 2, rows, filled_up(value_dim) + COLUMNS), np.float32),
    )
