"""A part of an input's rows, for several runs on several machines."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cbatch.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows whose index leaves `number - 1` when divided by `count`. All shards together are the whole input."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Reads `2/8`. Raises ConfigError for what is no shard."""
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        shard = cls(int(found[1]), int(found[2])) if found else None
        if shard is None or not 1 <= shard.number <= shard.count:
            raise ConfigError(f"--shard takes K/N, such as 2/8 for the second of eight shards, not {text!r}.")
        return shard

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and index % self.count == self.number - 1

    def size(self, rows: int) -> int:
        """How many of the first `rows` indices are in it."""
        return (rows - self.number + self.count) // self.count


WHOLE = Shard(1, 1)
