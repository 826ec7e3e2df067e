"""The options of `cbatch verify`."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from cbatch.base.errors import ConfigError
from cbatch.base.option import option, options_of
from cbatch.cli.common.options import SamplingOptions, engine_config
from cbatch.cli.run.options import RunOptions
from cbatch.requests.columns import KEYED


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
            raise ValueError(f"{text!r} is neither a number of rows from 1 on nor a share such as 5%.")
        return cls(amount, is_share)

    def size(self, total: int) -> int:
        """Of so many rows; at least one of a file that has any."""
        wanted = math.ceil(total * self.amount / 100) if self.is_share else int(self.amount)
        return min(max(wanted, 1), total)

    def choose(self, total: int, seed: int) -> list[int]:
        """Places of the chosen rows, ascending; the same ones for the same seed."""
        return sorted(random.Random(seed).sample(range(total), self.size(total)))


ROW_OPTIONS = {
    *"format output_format template shard date template_kwargs raw score embed allow_unknown quiet verbose".split(),
    *KEYED,
}
"""Options of `cbatch run` that decide what its rows are, and how they are written."""


_comparison = partial(option, group="Comparison")


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The options of `cbatch verify`.

    run:       the options of the run that made the file; its input and output are named there
    """

    run: RunOptions
    prompts: str | None = _comparison(None, "The input of the run that made OUT; - is stdin.", metavar="IN")
    offline: bool = _comparison(
        False, "Run nothing: tell which rows are damaged, doubled and, with --prompts, missing or superfluous."
    )
    sample: Sample = _comparison(
        make=Sample, help="How many rows to run again.", metavar="N|P%", parse=Sample.parse, shown="5%"
    )
    sample_seed: int = _comparison(0, "Another seed takes other rows of OUT.")

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> VerifyOptions:
        """Makes the record from Click's values.

        No prefixes are cached: a prompt that was computed in one company would be the same in the other.
        """
        run = RunOptions(
            input=values["prompts"] or "-",
            output=values["output"],
            sampling=SamplingOptions.from_values(values),
            engine=engine_config({**values, "prefix_cache": False}),
            **{name: values[name] for name in ROW_OPTIONS},
        )
        return cls(run, **{name: values[name] for name in options_of(cls)})

    def check_usage(self) -> None:
        """Raises ConfigError for options with which nothing can be compared."""
        if not (self.offline or self.prompts is not None):
            raise ConfigError(
                "Give the input of the run that made OUT as --prompts IN; or --offline, which only reads OUT."
            )
        self.run.sampling.check()
