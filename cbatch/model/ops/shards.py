"""Cuts a program into parts, one for each of several processes that compute every step together (tensor parallelism).

A process has some columns of a buffer: some heads, or some of the numbers between two linears. A linear whose product
every process needs whole is cut along its depth, as its source is, and its products are summed over the processes;
other linears are cut along their columns (Shoeybi et al., Megatron-LM, https://arxiv.org/abs/1909.08053). Embedding and
head are cut along the vocabulary. Every process computes alike what cannot be cut.

The operations are visited from the last to the first, because what reads a buffer decides which columns are needed.
Each returns a function that makes the operations of the process once all columns are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from cbatch.model.config import UnsupportedConfig
from cbatch.model.ops.operation import Operation, with_role
from cbatch.model.ops.program import Program
from cbatch.model.weight import RESIDUAL, Matrix, Norm, Weight
from cbatch.runtime.kv_cache import LayerShape
from cbatch.runtime.state_pool import StateShape

_LEAST_GRAIN = 16
"""Numbers of a row that are not separated: what the kernels of a GPU read together."""

Made = Callable[[], Sequence[Operation]]
"""Makes the operations of a process in place of one of the program."""

Grain = Callable[[Sequence[Matrix]], int]
"""How many numbers of the depth of matrices share a scale; 1 if they are not packed."""


class Part(NamedTuple):
    """The place of a process among all that compute a step."""

    rank: int
    size: int

    def range_of(self, total: int) -> range:
        """Its share of so many things; shares differ by one at most."""
        return range(total * self.rank // self.size, total * (self.rank + 1) // self.size)

    def widths_of(self, total: int) -> list[int]:
        """How many each of the processes has."""
        return [len(Part(rank, self.size).range_of(total)) for rank in range(self.size)]


WHOLE = Part(0, 1)


class Heads(NamedTuple):
    """Heads of a process: queries, and the heads of keys and values that these use."""

    queries: range
    keys: range


def columns_of(heads: range, width: int, start: int = 0) -> Tensor:
    """The columns of heads of so many numbers, which begin at `start`."""
    return torch.arange(start + heads.start * width, start + heads.stop * width)


class Columns:
    """Columns of a buffer that a process has, from the operation that writes them to the next one that writes it.

    width:  of the whole buffer
    chosen: ascending; None for all, once the operation that writes them has been visited
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.chosen: Tensor | None = None
        self.grain = _LEAST_GRAIN
        """Columns that belong together, if a process may have any."""
        self._is_needed_whole = self._is_summed = False
        self._needed: list[Callable[[], Tensor | None]] = []

    def need_all(self) -> None:
        self._is_needed_whole = True

    def need(self, find: Callable[[], Tensor | None]) -> None:
        """find: gives the columns when the operation that writes them is visited; None for all"""
        self._needed.append(find)

    def need_any(self, grain: int) -> None:
        """Any share of the columns will do, in parts of so many, if no other process has any of them."""
        self._is_summed = True
        self.grain = math.lcm(self.grain, grain)

    @property
    def may_be_shared(self) -> bool:
        """Whether nothing needs more than a share, which the operation that writes the columns chooses."""
        return not self._is_needed_whole and not self._needed

    def take(self, share: Tensor | None = None) -> Tensor | None:
        """Decides on the columns: those that are needed, or else a share that the process can compute."""
        if self.may_be_shared:
            self.chosen = share
        elif not self._is_needed_whole and not self._is_summed:
            found = [find() for find in self._needed]
            if all(one is not None for one in found):
                self.chosen = torch.unique(torch.cat([one for one in found if one is not None]))
        return self.chosen

    def places_of(self, columns: Tensor) -> Tensor:
        """Where the process has some columns of the whole buffer."""
        return columns if self.chosen is None else torch.searchsorted(self.chosen, columns)

    def start_of(self, columns: Tensor) -> int:
        """The first place of some columns. Raises UnsupportedConfig if they do not lie together."""
        places = self.places_of(columns)
        first = int(places[0])
        if not torch.equal(places, torch.arange(first, first + len(places))):
            raise UnsupportedConfig("parts of a buffer that are read together lie apart in the share of a process")
        return first

    @property
    def depth(self) -> tuple[int, int]:
        """The chosen columns as the first and the one after the last."""
        assert self.chosen is not None
        first = int(self.chosen[0])
        if not torch.equal(self.chosen, torch.arange(first, first + len(self.chosen))):
            raise UnsupportedConfig("the share of a process of what a linear reads does not lie together")
        return first, first + len(self.chosen)


class Shards:
    """The part of a program that one process computes; see the module.

    embedding: the part of the first embedding
    heads:     those of the process in each cache; None for all
    """

    def __init__(self, program: Program, part: Part, grain: Grain) -> None:
        self._program, self.part, self.grain = program, part, grain
        self.caches: list[LayerShape] = list(program.caches)
        self.states: list[StateShape] = list(program.states)
        self.heads: dict[int, Heads | None] = {}
        self._columns = {RESIDUAL: Columns(program.hidden_size)}
        self._columns[RESIDUAL].need_all()
        self._widths = _widths_of(program)
        self.embedding = self.rows_of(program.embedding)

    def program(self) -> Program:
        made: list[Made] = []
        for number in reversed(range(len(self._program.operations))):
            self._number = number
            made.append(self._program.operations[number].on_shard(self))
        return replace(
            self._program,
            operations=tuple(operation for make in reversed(made) for operation in make()),
            caches=tuple(self.caches),
            states=tuple(self.states),
            embedding=self.embedding,
            head=self.vocabulary_of(self._program.head),
        )

    def read(self, name: str) -> Columns:
        """The columns of a buffer that was written before. What reads it says which of them it needs."""
        return self._columns.setdefault(name, Columns(self._widths[self._number][name]))

    def written(self, name: str) -> Columns:
        """The columns that later operations need of a buffer that is written now. Before, it held something else."""
        if name == RESIDUAL:
            return self._columns[name]
        return self._columns.pop(name, None) or Columns(self._widths[self._number + 1][name])

    def follow(self, source: str, target: str) -> Columns:
        """The columns of a target that are those of a source, which nothing reads later."""
        columns = self._columns[source] = self.written(target)
        return columns

    def share_of(self, columns: Columns) -> Tensor | None:
        """The share of a process of columns of which it may have any; None if there are too few."""
        number, rest = divmod(columns.width, columns.grain)
        if rest or number < self.part.size:
            return None
        return columns_of(self.part.range_of(number), columns.grain)

    def heads_of(self, heads: int, groups: int, width: int, grain: int) -> Heads | None:
        """Heads of the process; None if they cannot be shared.

        groups: how many heads of keys and values serve the heads
        width:  numbers that a head gives, of which `grain` belong together

        Each process has whole groups; or, if it is their multiple, a part of the queries of one.
        """
        each, size, parts = heads // groups, self.part.size, 1
        if groups < size:
            parts = size // groups
            if size % groups or each % parts:
                return None
        together = grain // math.gcd(grain, each // parts * width)
        units, rest = divmod(groups * parts, together)
        if rest or units < size:
            return None
        own = self.part.range_of(units)
        first, stop = own.start * together, own.stop * together
        return Heads(range(first * each // parts, stop * each // parts), range(first // parts, -(-stop // parts)))

    def keep_heads(self, cache: int, heads: Heads | None) -> None:
        """Decides on the heads that the process has in a cache; None for all.

        Raises UnsupportedConfig if layers that read the same cache disagree.
        """
        if self.heads.setdefault(cache, heads) != heads:
            raise UnsupportedConfig("layers that read the same keys and values cannot be shared among processes alike")
        if heads is not None:
            self.caches[cache] = replace(self.caches[cache], heads=len(heads.keys))

    def matrix(self, matrix: Matrix, columns: Tensor | None, depth: tuple[int, int] | None = None) -> Matrix:
        """A part of a matrix: some columns, or a part of the depth, of which the first process adds the biases."""
        parts, biases = matrix.parts, matrix.biases
        if columns is not None:
            parts, biases = taken(parts, columns), taken(biases, columns)
        if depth is not None:
            parts = tuple(replace(part, depth=depth) for part in parts)
            biases = biases if self.part.rank == 0 else ()
        return Matrix(parts, biases)

    def rows_of(self, table: Weight) -> Weight:
        """A share of a table of the vocabulary."""
        return replace(table, rows=columns_of(self.part.range_of(table.size[0]), 1))

    def is_first(self, table: Weight) -> bool:
        """Whether a table is the program's first embedding, whose part may be that of the head, too."""
        return table is self._program.embedding

    def vocabulary_of(self, head: Matrix) -> Matrix:
        if self.is_first(head.parts[0]):
            return replace(head, parts=(self.embedding,))
        return self.matrix(head, columns_of(self.part.range_of(head.columns), 1))

    def set_state(self, number: int, *shape: int) -> None:
        """The shape of a state of the process."""
        self.states[number] = replace(self.states[number], shape=shape)

    def alike(self, operation: Operation, target: Columns | None = None) -> Made:
        """Every process computes the operation, and all that it reads.  target: what it writes, if that is known"""
        for _, name in with_role(operation, "writes"):
            if target is None:
                target = self.read(name) if getattr(operation, "add", False) else self.written(name)
            target.need_all()
            target.take()
        for _, names in with_role(operation, "reads", "updates"):
            for name in names if isinstance(names, tuple) else [names]:
                self.read(name).need_all()
        return lambda: (operation,)


def taken(weights: tuple[Weight, ...], columns: Tensor) -> tuple[Weight, ...]:
    """Some columns of weights side by side, in their order."""
    found, start = [], 0
    for weight in weights:
        size = weight.size[0]
        own = columns[(columns >= start) & (columns < start + size)] - start
        if len(own):
            found.append(replace(weight, rows=own if weight.rows is None else weight.rows[own]))
        start += size
    return tuple(found)


def norm_for(norm: Norm | None, columns: Tensor) -> Norm | None:
    """The norm of some columns of a row."""
    if norm is None:
        return None
    return replace(norm, weight=taken(norm.weight, columns), bias=taken(norm.bias, columns))


def shard_of(program: Program, part: Part, grain: Grain) -> Program:
    """The program of one of several processes. Raises UnsupportedConfig for what cannot be cut."""
    return Shards(program, part, grain).program()


def _widths_of(program: Program) -> list[dict[str, int]]:
    """How wide each buffer is before each operation, and after the last."""
    widths = {RESIDUAL: program.hidden_size}
    found = [widths]
    for operation in program.operations:
        for _, name in with_role(operation, "writes"):
            widths = widths | {name: operation.target_width(widths.__getitem__)}
        found.append(widths)
    return found
