"""The slots of recurrent state: which are free, and which hold snapshots that requests with the same beginning take.

A running request has a slot, which holds its state after all of its computed tokens. A request goes on from a prefix
only if there is a copy of the state at its end. Such snapshots are taken at the ends of blocks, in slots that no
request needs; the least recently used one goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import KeysView, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from cbatch.schedule.block_pool import UNKNOWN

ZERO = -1
"""Instead of a slot to copy from: the state of a sequence without a token."""


@dataclass(eq=False, slots=True)
class Snapshot:
    """The state after the first `tokens` tokens of a sequence.

    content: content number of the block that ends there (see `BlockPool`); UNKNOWN until its tokens are known
    made_in, used_in: the steps in which it was made, and last taken over
    """

    slot: int
    tokens: int
    made_in: int
    content: int = UNKNOWN
    used_in: int = -1


class ChunkState(NamedTuple):
    """The state of a chunk.

    slot:     of its request
    snapshots: the request's own list (see `RecurrentState`)
    source:   the slot that is copied there before the chunk is computed, or ZERO; None: the slot holds the state
    snapshot: what is made of it after some of the chunk's tokens, if anything
    """

    slot: int
    snapshots: list[Snapshot]
    source: int | None = None
    snapshot: Snapshot | None = None


class StateSlots:
    """Hands out slots `0 .. num_slots-1` to requests and snapshots.

    In one step a snapshot is made or taken over, not both, and its slot gets no other owner: a step copies from
    snapshots before it computes, and to them while it computes.

    Marconi (Pan et al., https://arxiv.org/abs/2411.19379) discusses where snapshots are worth their memory.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        self._free_later: list[int] = []
        """Slots that the step still writes to, or copies from, and nobody will read any more."""
        self._known: OrderedDict[int, Snapshot] = OrderedDict()
        """Snapshots by content, the least recently used first."""
        self._unknown: set[Snapshot] = set()
        """Snapshots whose last token is not known yet."""
        self._step = 0

    @property
    def num_snapshots(self) -> int:
        return len(self._known) + len(self._unknown)

    def begin_step(self) -> None:
        """From now on, snapshots of the steps before can be taken over, and give up their slots."""
        self._step += 1
        self._free += self._free_later
        self._free_later.clear()

    def has_room(self, count: int = 1) -> bool:
        """Whether `take` would find so many slots."""
        can_go = (snapshot for snapshot in self._known.values() if self._can_go(snapshot))
        return len(self._free) + sum(1 for _ in islice(can_go, max(count - len(self._free), 0))) >= count

    def take(self) -> int | None:
        """A slot, if need be that of the snapshot that was not used for the longest time; None if there is none."""
        if not self._free:
            oldest = next((snapshot for snapshot in self._known.values() if self._can_go(snapshot)), None)
            if oldest is None:
                return None
            self.drop(oldest)
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def find(self, contents: Sequence[int]) -> Snapshot | None:
        """The longest snapshot of a sequence whose full blocks have these contents."""
        for content in reversed(contents):
            snapshot = self._known.get(content)
            if snapshot is not None and snapshot.made_in < self._step:
                return snapshot
        return None

    def take_with(self, snapshot: Snapshot | None) -> tuple[int, int | None]:
        """A slot, of which there is one, and what is to be copied there (see `ChunkState.source`).

        If the only slot to be had is that of the snapshot, the request takes over that one.
        """
        if snapshot is None:
            slot = self.take()
            assert slot is not None, "no slot is left"
            return slot, ZERO
        used_before, snapshot.used_in = snapshot.used_in, self._step
        self._known.move_to_end(snapshot.content)
        slot = self.take()
        if slot is not None:
            return slot, snapshot.slot
        assert max(used_before, snapshot.made_in) < self._step, "no slot is left"
        self.drop(snapshot)
        self._free_later.remove(snapshot.slot)
        return snapshot.slot, None

    def make(self, tokens: int, spare: bool = False) -> Snapshot | None:
        """A snapshot that this step writes; None if there is no slot for it, beside one that is spared."""
        slot = self.take() if self.has_room(1 + spare) else None
        if slot is None:
            return None
        snapshot = Snapshot(slot, tokens, self._step)
        self._unknown.add(snapshot)
        return snapshot

    def publish(self, snapshot: Snapshot, content: int) -> bool:
        """Lets others find a snapshot; drops it, and returns False, if there is one of the same content already."""
        if content == UNKNOWN or content in self._known:
            self.drop(snapshot)
            return False
        self._unknown.remove(snapshot)
        snapshot.content = content
        self._known[content] = snapshot
        return True

    def drop(self, snapshot: Snapshot) -> None:
        """Gives back the slot of a snapshot that is still there."""
        if self._known.get(snapshot.content) is snapshot:
            del self._known[snapshot.content]
        elif snapshot in self._unknown:
            self._unknown.remove(snapshot)
        else:
            return
        (self._free if self._can_go(snapshot) else self._free_later).append(snapshot.slot)

    def forget(self, content: int) -> None:
        """Drops the snapshot of a block that is no longer cached."""
        if (snapshot := self._known.get(content)) is not None:
            self.drop(snapshot)

    def _can_go(self, snapshot: Snapshot) -> bool:
        return max(snapshot.made_in, snapshot.used_in) < self._step

    def check_integrity(self, held: Sequence[int], cached: KeysView[int]) -> None:
        """Raises AssertionError unless each slot has exactly one owner.

        held:   slots of the running requests
        cached: contents of cached blocks
        """
        snapshots = [*self._known.values(), *self._unknown]
        owned = [*held, *self._free, *self._free_later, *(snapshot.slot for snapshot in snapshots)]
        assert sorted(owned) == list(range(self.num_slots)), "a slot has two owners, or none"
        assert all(snapshot.content == content for content, snapshot in self._known.items())
        assert self._known.keys() <= cached, "a snapshot of a block that is not cached"
