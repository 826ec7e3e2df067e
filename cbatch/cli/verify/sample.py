"""Which rows of a file are run again."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import click


@dataclass(frozen=True, slots=True)
class Sample:
    """A part of the rows.

    amount:   a number of rows, or of hundredths of all rows
    is_share: whether it is the latter
    """

    amount: float = 5.0
    is_share: bool = True

    @classmethod
    def parse(cls, text: str) -> Sample:
        """Reads `5%` or `100`. Raises ValueError, with a reason, for anything else."""
        is_share = text.endswith("%")
        try:
            amount = float(text.removesuffix("%")) if is_share else int(text)
        except ValueError:
            amount = math.nan
        if not 0 < amount < math.inf or (is_share and amount > 100):
            raise ValueError(f"{text!r} is neither a number of rows from 1 on nor a share such as 5%")
        return cls(amount, is_share)

    def size(self, total: int) -> int:
        """Of so many rows; at least one of a file that has any."""
        wanted = math.ceil(total * self.amount / 100) if self.is_share else int(self.amount)
        return min(max(wanted, 1), total)

    def choose(self, total: int, seed: int) -> list[int]:
        """Places of the chosen rows, ascending; the same ones for the same seed."""
        return sorted(random.Random(seed).sample(range(total), self.size(total)))


def parse_sample(ctx: click.Context, parameter: click.Parameter, value: str) -> Sample:
    try:
        return Sample.parse(value)
    except ValueError as error:
        raise click.BadParameter(f"{error}.", ctx, parameter) from None
