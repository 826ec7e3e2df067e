"""The work to do: prompts as token ids, and how many output tokens each of them gets."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cbatch.engine import ConfigError, SamplingParams

if TYPE_CHECKING:
    from cbatch.engine import Engine

Outputs = list[list[int]]
"""Output tokens of each request."""

DistributionName = Literal["fixed", "uniform", "lognormal", "loguniform"]

LOGNORMAL_MEDIAN = 0.35
"""The median of a lognormal distribution, as a share of its range on a logarithmic scale."""


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Lengths in tokens from `low` to `high`, both included."""

    low: int
    high: int
    distribution: DistributionName = "loguniform"

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

    def repeated(self, times: int) -> Workload:
        """Each request several times."""
        return Workload(self.prompts * times, self.output_lengths * times, self.source)

    def batches(self, size: int) -> list[range]:
        """Indices of the requests in groups of `size`, in order."""
        return [range(first, min(first + size, len(self.prompts))) for first in range(0, len(self.prompts), size)]


def first_plain_token(vocabulary: int) -> int:
    """The first token id to draw; lower ids are special tokens in most vocabularies."""
    return min(10, vocabulary // 2)


def synthetic_workload(
    count: int, inputs: LengthDistribution, outputs: LengthDistribution, vocabulary: int, context: int, seed: int
) -> Workload:
    """Random prompts. Raises ConfigError if a request would not fit the context."""
    longest = inputs.high + outputs.high
    if longest > context:
        raise ConfigError(
            f"Prompts of {inputs.high} and outputs of {outputs.high} tokens are {longest} together; "
            f"the model's context holds {context} (--input-len, --output-len)."
        )
    rng = random.Random(seed)
    input_length, output_length = inputs.sampler(rng), outputs.sampler(rng)
    first = first_plain_token(vocabulary)
    prompts = [[rng.randrange(first, vocabulary) for _ in range(input_length())] for _ in range(count)]
    spread = f"prompts {inputs.low}:{inputs.high}, outputs {outputs.low}:{outputs.high}, {outputs.distribution}"
    return Workload(prompts, [output_length() for _ in range(count)], f"synthetic, {spread}, seed {seed}")


def read_workload(path: str, engine: Engine) -> Workload:
    """The rows of a file of prompts. Each wants as many tokens as it gets with greedy decoding up to its own end.

    Raises ConfigError if the file cannot be read, or if a row is wrong.
    """
    from cbatch.engine import Completion, LineProcessor, RequestDefaults, read_lines

    lines = LineProcessor(engine.core.input_processor(RequestDefaults(params={"temperature": 0.0})))
    prompts: list[list[int]] = []
    asked: list[SamplingParams] = []
    try:
        with Path(path).open("rb") as file:
            for line in read_lines(file):
                request = lines.process(line)
                if isinstance(request, Completion):
                    raise ConfigError(f"{path}: {request.error}")
                prompts.append(list(request.prompt_ids))
                if request.params.n != 1 or request.params.max_tokens == 0:
                    raise ConfigError(
                        f"{path}, line {line.index + 1}: bench needs one output of at least one token for each row."
                    )
                asked.append(replace(request.params, temperature=0.0))
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    if not prompts:
        raise ConfigError(f"{path} holds no rows.")
    done = engine.generate(prompts, asked)
    for number, completion in enumerate(done):
        if completion.error is not None:
            raise ConfigError(f"{path}: row {number + 1}: {completion.error}")
    return Workload(prompts, [len(completion.token_ids) for completion in done], f"{path}, greedy")
