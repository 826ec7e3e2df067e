"""The work to do: prompts as token ids, and how many output tokens each of them gets."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

from cbatch.base.errors import ConfigError
from cbatch.base.params import SamplingParams

if TYPE_CHECKING:
    from cbatch.api import Engine
    from cbatch.batch.forms import InputForm
    from cbatch.batch.tables.row_input import RowInput

Outputs = list[list[int]]
"""Output tokens of each request."""

DistributionName = Literal["fixed", "uniform", "lognormal", "loguniform"]

LOGNORMAL_MEDIAN = 0.35
"""The median of a lognormal distribution, as a share of its range on a logarithmic scale."""


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Lengths in tokens from `low` to `high`, both included.

    skew: spreads them around `high` instead, which is their mean (see `skewed_lengths`)
    """

    low: int
    high: int
    distribution: DistributionName = "loguniform"
    skew: float | None = None

    def __str__(self) -> str:
        if self.skew is not None:
            return f"{self.high} in the mean, skew {self.skew:g}"
        return f"{self.low}:{self.high}, {self.distribution}"

    @classmethod
    def parse(cls, text: str, distribution: DistributionName) -> LengthDistribution:
        """`16:256`, or one number for both ends. Raises ConfigError."""
        first, _, second = text.partition(":")
        try:
            low, high = int(first), int(second or first)
        except ValueError:
            low = high = 0
        if not 1 <= low <= high:
            raise ConfigError(f"{text!r} is not a range of lengths; write it as 16:256, or as one number.")
        return cls(low, high, distribution)

    def sampler(self, rng: random.Random) -> Callable[[], int]:
        """A function that draws a length; `fixed` always gives the high end."""
        low, high = math.log(self.low), math.log(self.high)
        draws: dict[DistributionName, Callable[[], float]] = {
            "fixed": lambda: self.high,
            "uniform": lambda: rng.randint(self.low, self.high),
            "loguniform": lambda: math.exp(rng.uniform(low, high)),
            "lognormal": lambda: rng.lognormvariate(low + LOGNORMAL_MEDIAN * (high - low), (high - low) / 4),
        }
        draw = draws[self.distribution]
        return lambda: min(max(round(draw()), self.low), self.high)

    def lengths(self, count: int, rng: random.Random) -> Iterable[int]:
        """So many lengths. Skewed ones are a list; others are drawn one by one, as they are asked for."""
        if self.skew is None:
            draw = self.sampler(rng)
            return (draw() for _ in range(count))
        found = skewed_lengths(count, self.high, self.skew)
        rng.shuffle(found)
        return found


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests: their prompts, and the number of output tokens of each. `source` says where they come from."""

    prompts: list[list[int]]
    output_lengths: list[int]
    source: str

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.output_lengths)

    @property
    def warmup(self) -> Workload:
        """The first two requests, with short outputs."""
        return Workload(self.prompts[:2], [min(length, 8) for length in self.output_lengths[:2]], "")

    def batches(self, size: int) -> list[range]:
        """Indices of the requests in groups of `size`, in order."""
        return [range(first, min(first + size, len(self.prompts))) for first in range(0, len(self.prompts), size)]


def skewed_lengths(count: int, mean: int, skew: float) -> list[int]:
    """Lengths whose logarithms are normal with the standard deviation `skew`, from the shortest to the longest.

    They are quantiles of the distribution, not drawn from it, so that the same few hundred of them are as heavy-tailed
    with every seed. Together they have `count * mean` tokens, whatever the skew; with 0, all are equal.
    """
    normal = NormalDist()
    sizes = [math.exp(skew * normal.inv_cdf((n + 0.5) / count)) for n in range(count)]
    scale = count * mean / sum(sizes)
    lengths = [max(round(scale * size), 1) for size in sizes]
    lengths[-1] = max(lengths[-1] + count * mean - sum(lengths), 1)  # what rounding has changed
    return lengths


def plain_tokens(vocabulary: int) -> range:
    """The token ids to draw: without the first, which are special tokens in most vocabularies."""
    return range(min(10, vocabulary // 2), vocabulary)


def synthetic_workload(
    count: int, inputs: LengthDistribution, outputs: LengthDistribution, vocabulary: int, context: int, seed: int
) -> Workload:
    """Random prompts. Raises ConfigError if a request would not fit the context."""
    rng, tokens = random.Random(seed), plain_tokens(vocabulary)
    sizes, lengths = inputs.lengths(count, rng), outputs.lengths(count, rng)
    longest = inputs.high + outputs.high if inputs.skew is None else max(map(operator.add, sizes, lengths))
    if longest > context:
        raise ConfigError(
            f"The longest request has {longest:,} tokens; the model's context holds {context:,} (--input-len, "
            "--output-len, --skew, --requests)."
        )
    # In this order a seed gives the prompts of published figures.
    prompts = [[rng.choice(tokens) for _ in range(size)] for size in sizes]
    return Workload(prompts, list(lengths), f"synthetic, prompts {inputs}, outputs {outputs}, seed {seed}")


def open_prompts(path: str, form: InputForm | None = None) -> closing[RowInput]:
    """The rows of a file, as `cbatch run` reads them. Raises ConfigError.  form: None: its name says"""
    from cbatch.cli.run.command import open_input
    from cbatch.cli.run.options import RunOptions

    return closing(open_input(RunOptions(input=path, format=form)))


def read_workload(path: str, engine: Engine, asked_form: InputForm | None = None) -> Workload:
    """The rows of a file of prompts. Each wants as many tokens as it gets with greedy decoding up to its own end.

    Raises ConfigError if the file cannot be read, or if a row is wrong.
    """
    from cbatch.batch.line_processor import LineProcessor
    from cbatch.batch.lines import checked_lines
    from cbatch.cli.common.options import SamplingOptions
    from cbatch.cli.run.options import RunOptions
    from cbatch.requests.completion import Completion

    greedy = SamplingOptions(params={"temperature": 0.0})
    options = RunOptions(input=path, format=asked_form, sampling=greedy).row_options()
    processor = LineProcessor.of(engine.core, options)
    prompts: list[list[int]] = []
    asked: list[SamplingParams] = []
    with open_prompts(path, asked_form) as source:
        for line in checked_lines(source.lines()):
            request = processor.process(line)
            if isinstance(request, Completion):
                raise ConfigError(f"{path}: {request.error}")
            if request.params.n != 1 or request.params.max_tokens == 0:
                where = f"{path}, {options.unit} {line.index + 1}"
                raise ConfigError(f"{where}: bench needs one output of at least one token for each row.")
            prompts.append(list(request.prompt_ids))
            asked.append(replace(request.params, temperature=0.0))
    if not prompts:
        raise ConfigError(f"{path} holds no rows.")
    done = engine.generate(prompts, asked)
    for number, completion in enumerate(done):
        if completion.error is not None:
            raise ConfigError(f"{path}: row {number + 1}: {completion.error}")
    return Workload(prompts, [len(completion.token_ids) for completion in done], f"{path}, greedy")
