"""The options of `cbatch bench` as one record."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.base.option import option, options_of
from cbatch.batch.forms import InputForm
from cbatch.cli.bench import workload
from cbatch.cli.bench.workload import DistributionName, LengthDistribution, Workload, open_prompts
from cbatch.extras import require_package

if TYPE_CHECKING:
    from cbatch.api import Engine

STRATEGIES = ("none", "static", "continuous", "drafts")
ABLATIONS = ("kv-cache", "chunked-prefill", "ragged", "dynamic")
PEERS = ("transformers-generate", "transformers-cb")
"""The names in lists. What they name needs torch, for which a shell that completes them need not wait."""

PRESETS: dict[str, dict[str, Any]] = {
    "article": {"requests": 8, "input_len": "8:128", "output_len": "32", "batch_size": 4},
    "skewed": {"skew": 1.0, "requests": 384, "batch_size": 16, "strategies": ["static", "continuous"]},
}
"""Values of options. article: eight users who get 32 tokens each, with half as many slots."""

SKEWED_WORK = {"requests": 192, "input_len": "24", "output_len": "32"}
"""Values of options for lengths that are skewed."""

SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

MAX_USERS = 1_000_000


def parse_duration(text: str) -> float:
    """Seconds meant by `500ms`, `2s`, `1.5m` or `1h`. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text)
    if match is None or match[2] not in SECONDS:
        raise ValueError(f"{text!r} is not a duration; write it as 500ms, 2s or 1m.")
    return float(match[1]) * SECONDS[match[2]]


def _parse_users(text: str) -> tuple[int, ...]:
    parts = _parse_names(text)
    if not all(part.isascii() and part.isdecimal() and 1 <= int(part) <= MAX_USERS for part in parts):
        raise ValueError(f"{text!r} is no number of users, nor a list such as 1,8,32.")
    return tuple(sorted({int(part) for part in parts}))


def _parse_names(text: str) -> list[str]:
    """The items between the commas of a list, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


_NAMES: dict[str, Any] = {"metavar": "LIST", "parse": _parse_names}
_TIME: dict[str, Any] = {"metavar": "TIME", "parse": parse_duration}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options of `cbatch bench`. `preset` has set others already."""

    prompts: str | None
    engine: EngineConfig
    format: InputForm | None = option(None, "Form of PROMPTS.", shown="by its ending, else jsonl")
    strategies: Sequence[str] = option(
        ",".join(STRATEGIES), "Strategies to compare; only drafts uses --speculate.", choices=STRATEGIES, **_NAMES
    )
    ablate: Sequence[str] = option(
        "", f"Switch off techniques, one at a time: {','.join(ABLATIONS)}.", shown="", choices=ABLATIONS, **_NAMES
    )
    peer: Sequence[str] = option(
        "", f"Compare with transformers too: {','.join(PEERS)}.", shown="", choices=PEERS, **_NAMES
    )
    batch_size: int = option(8, "Slots of every strategy.", low=1)
    requests: int = option(32, "Synthetic requests.", low=1)
    input_len: str = option("16:256", "Prompt lengths in tokens.", metavar="LO:HI")
    output_len: str = option("8:256", "Output lengths in tokens.", metavar="LO:HI")
    distribution: DistributionName = option("loguniform", "How lengths are spread between LO and HI.")
    skew: float | None = option(
        None, "Spread lengths around a mean instead: 0 makes all equal, 1 is usual, 2 heavy-tailed.", low=0, high=4
    )
    preset: str | None = option(
        None, "The articles' experiment: 8 users, 32 tokens each; or skewed lengths.", choices=tuple(PRESETS)
    )
    rounds: int = option(3, "Runs of everything, by turns; the median counts.", low=1, shown="3; of a load 1")
    seed: int = option(7, "Seed of synthetic prompts and users.")
    users: Sequence[int] = option(
        "",
        "Measure load with this many users, instead of strategies. Several: measure a curve. With --find-capacity: "
        "the most to try [default then: 1,024].",
        metavar="N[,N…]",
        parse=_parse_users,
        shown="",
    )
    rate: float = option(4.0, "Users who arrive in a second.", low=0, above=True)
    duration: float = option("60s", "Duration of the load; with --find-capacity, of each probe (20s at most).", **_TIME)
    think: float = option("2s", "Mean pause of a user between turns.", **_TIME)
    turns: int = option(1, "Questions in a conversation.", low=1)
    slo_ttft: float = option("500ms", "SLO: time to the first token.", **_TIME)
    slo_tps: float = option(50.0, "SLO: tokens a second for each user.", low=0)
    find_capacity: bool = option(False, "Search for the most users, up to --users, for whom the SLO holds.")
    plot: str | None = option(
        None, "Write pictures to this folder (SVG; needs cbatch[plot]).", metavar="DIR", is_file=True
    )
    report: str | None = option(
        None, "Write one HTML page with tables and pictures (needs cbatch[plot]).", metavar="FILE", is_file=True
    )
    json: bool = option(False, "Print one JSON object to stdout.")
    quiet: bool = option(False, "Show no progress.", names=("-q", "--quiet"))

    @property
    def is_load(self) -> bool:
        """Whether to measure load with many users instead of strategies."""
        return self.find_capacity or bool(self.users)

    @property
    def is_silent(self) -> bool:
        """Whether to leave out progress."""
        return self.quiet or self.json

    def lengths(self) -> tuple[LengthDistribution, LengthDistribution]:
        """Lengths of prompts and of outputs. Raises ConfigError."""
        one, other = (
            replace(LengthDistribution.parse(text, self.distribution), skew=self.skew)
            for text in (self.input_len, self.output_len)
        )
        if self.skew is not None and (one.low != one.high or other.low != other.high):
            raise ConfigError(
                "--skew spreads lengths around means, which --input-len and --output-len give as one number each."
            )
        return one, other

    def check(self) -> None:
        """Raises ConfigError if options do not go together, or if results could not be written in the end."""
        for name in ("strategies", "ablate", "peer"):
            names = options_of(BenchOptions)[name].choices
            if wrong := [one for one in getattr(self, name) if one not in names]:
                raise ConfigError(f"--{name} is a list of {', '.join(names)}; {', '.join(wrong)} is not one of them.")
        for sentence, is_true in self._mistakes():
            if is_true:
                raise ConfigError(sentence)
        if self.prompts is not None:
            with open_prompts(self.prompts, self.format):  # before a model is loaded for it
                pass
        if self.plot or self.report:
            require_package("matplotlib")
        try:
            if self.plot:
                Path(self.plot).mkdir(parents=True, exist_ok=True)
            if self.report:
                Path(self.report).open("ab").close()
        except OSError as error:
            raise ConfigError(f"Cannot write {error.filename}: {error.strerror}.") from error

    def _mistakes(self) -> Iterator[tuple[str, bool]]:
        """Sentences about options that do not go together, and whether that is so."""
        has_file, has_others = self.prompts is not None, bool(self.ablate or self.peer)
        yield "The prompts are read twice, so they cannot come from stdin; name a file.", self.prompts == "-"
        yield f"--strategies is a list of {', '.join(STRATEGIES)}, and it is empty.", not self.strategies
        yield (
            "--strategies has drafts, which --speculate off forbids.",
            self.engine.speculate == "off" and "drafts" in self.strategies,
        )
        if self.skew is not None:
            self.lengths()
            yield "The rows of a file have lengths of their own; leave out --skew.", has_file
            yield "--skew goes with strategies, not with users.", self.is_load
        if self.is_load:
            yield "A file of prompts is for strategies; users ask synthetic questions (--input-len).", has_file
            yield "--ablate and --peer go with strategies, not with users.", has_others
            is_one = not self.find_capacity and len(self.users) == 1
            yield "There is no picture of one number of users; leave out --plot.", is_one and bool(self.plot)
            is_several = self.find_capacity and len(self.users) > 1
            yield "--find-capacity takes one number of --users, the most to try.", is_several
        else:
            has_seqs, is_split = self.engine.max_seqs is not None, self.engine.min_gpus > 1
            yield "--tensor-parallel goes with --users; strategies share one model in this process.", is_split
            yield "--batch-size sets the number of slots; --max-seqs is for a load (--users).", has_seqs

    def make_workload(self, engine: Engine) -> Workload:
        """The rows of the file that the options name, or synthetic ones. Raises ConfigError."""
        if self.prompts is not None:
            return workload.read_workload(self.prompts, engine, self.format)
        vocabulary, longest = engine.model.vocab_size, engine.limits.sequence.longest
        return workload.synthetic_workload(self.requests, *self.lengths(), vocabulary, longest, self.seed)
