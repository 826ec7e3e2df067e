"""The options of `cbatch bench` as one record."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.batch.forms import InputForm
from cbatch.cli.bench.workload import DistributionName, LengthDistribution, open_prompts
from cbatch.cli.common.replica_options import ReplicaOptions
from cbatch.extras import require_package

if TYPE_CHECKING:
    from cbatch.cli.bench.strategies import Strategy

STRATEGIES = ("none", "static", "continuous")
ABLATIONS = ("kv-cache", "chunked-prefill", "ragged", "dynamic", "speculation")
PEERS = ("transformers-generate", "transformers-cb")
"""The names in lists. What they name needs torch, for which a shell that completes them need not wait."""

SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

MAX_USERS, MAX_SKEW = 1_000_000, 4


def parse_duration(text: str) -> float:
    """Seconds meant by `500ms`, `2s`, `1.5m` or `1h`. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text)
    if match is None or match[2] not in SECONDS:
        raise ConfigError(f"{text!r} is not a duration; write it as 500ms, 2s or 1m.")
    return float(match[1]) * SECONDS[match[2]]


def parse_users(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Reads numbers of users with commas between them."""
    parts = [part.strip() for part in (value or "").split(",") if part.strip()]
    if not all(part.isascii() and part.isdecimal() and 1 <= int(part) <= MAX_USERS for part in parts):
        raise click.BadParameter(f"{value!r} is no number of users, nor a list such as 1,8,32.", ctx, parameter)
    return tuple(sorted({int(part) for part in parts}))


def parse_skews(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[float, ...]:
    """Reads skews with commas between them."""
    try:
        skews = sorted({float(part) for part in (value or "").split(",") if part.strip()})
    except ValueError:
        skews = [math.nan]
    if not all(0 <= skew <= MAX_SKEW for skew in skews):
        raise click.BadParameter(f"{value!r} is no number from 0 to {MAX_SKEW}, nor a list of them.", ctx, parameter)
    return tuple(skews)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options of `cbatch bench` by their names; see its help. `--preset` has set others, and is not among them."""

    prompts: str | None
    format: InputForm | None
    strategies: list[str]
    ablate: list[str]
    peer: list[str]
    batch_size: int
    requests: int
    input_len: str
    output_len: str
    distribution: DistributionName
    skew: tuple[float, ...]
    rounds: int
    seed: int
    users: tuple[int, ...]
    rate: float
    duration: str
    think: str
    turns: int
    slo_ttft: str
    slo_tps: float
    find_capacity: bool
    plot: str | None
    report: str | None
    json: bool
    quiet: bool
    engine: EngineConfig
    replicas: ReplicaOptions

    @property
    def is_load(self) -> bool:
        """Whether to measure load with many users instead of strategies."""
        return self.find_capacity or bool(self.users)

    @property
    def is_curve(self) -> bool:
        """Whether to measure the gain over the skew of lengths."""
        return len(self.skew) > 1

    @property
    def is_silent(self) -> bool:
        """Whether to leave out progress."""
        return self.quiet or self.json

    @property
    def lengths(self) -> tuple[LengthDistribution, LengthDistribution]:
        """Lengths of prompts and of outputs. Raises ConfigError."""
        parse = LengthDistribution.parse
        return parse(self.input_len, self.distribution), parse(self.output_len, self.distribution)

    @property
    def mean_lengths(self) -> tuple[int, int]:
        """Mean lengths of prompts and of outputs, if they are skewed. Raises ConfigError."""
        inputs, outputs = self.lengths
        if inputs.low != inputs.high or outputs.low != outputs.high:
            raise ConfigError(
                "--skew spreads lengths around means, which --input-len and --output-len give as one number each."
            )
        return inputs.high, outputs.high

    def check(self) -> None:
        """Raises ConfigError if options do not go together, or if results could not be written in the end."""
        self._check_lists()
        if "speculation" in self.ablate and self.engine.speculate == "off":
            raise ConfigError("--ablate speculation has nothing to switch off, because --speculate is off.")
        self.replicas.check(self.engine)
        if self.replicas.ray is not None:
            require_package("ray")
        if self.skew:
            self._check_skew()
        if self.is_load:
            self._check_load()
        elif self.engine.max_seqs is not None:
            raise ConfigError("--batch-size sets the number of slots; --max-seqs is for a load (--users).")
        if self.prompts is not None:
            with open_prompts(self.prompts, self.format):  # before a model is loaded for it
                pass
        self._check_targets()

    def chosen_strategies(self) -> dict[str, Strategy]:
        """The strategies and ablations by name."""
        from cbatch.cli.bench import strategies

        chosen = {name: strategies.STRATEGIES[name] for name in self.strategies}
        if self.ablate:
            chosen.setdefault("continuous", strategies.STRATEGIES["continuous"])
        return chosen | {f"no-{name}": strategies.ABLATIONS[name] for name in self.ablate}

    def _check_lists(self) -> None:
        _check_names("strategies", self.strategies, STRATEGIES)
        _check_names("ablate", self.ablate, ABLATIONS)
        _check_names("peer", self.peer, PEERS)
        if not self.strategies:
            raise ConfigError(f"--strategies is a list of {', '.join(STRATEGIES)}, and it is empty.")

    def _check_skew(self) -> None:
        _ = self.mean_lengths
        if self.prompts is not None:
            raise ConfigError("The rows of a file have lengths of their own; leave out --skew.")
        if self.is_load:
            raise ConfigError("--skew goes with strategies, not with users.")
        if self.is_curve and (self.ablate or self.peer or self.replicas.are_given):
            raise ConfigError(
                "Several values of --skew compare static batches with continuous batching only; --ablate, --peer and "
                "--replicas go with one."
            )

    def _check_load(self) -> None:
        if self.prompts is not None:
            raise ConfigError("A file of prompts is for strategies; users ask synthetic questions (--input-len).")
        if self.ablate or self.peer:
            raise ConfigError("--ablate and --peer go with strategies, not with users.")
        if self.replicas.are_given:
            raise ConfigError("--replicas and --ray go with strategies, not with users: a conversation has one engine.")
        if not (math.isfinite(self.rate) and math.isfinite(self.slo_tps)):
            raise ConfigError("--rate and --slo-tps must be finite numbers.")
        for text in (self.duration, self.think, self.slo_ttft):
            parse_duration(text)
        if self.find_capacity and len(self.users) > 1:
            raise ConfigError("--find-capacity takes one number of --users, the most to try.")

    def _check_targets(self) -> None:
        if not self.plot and not self.report:
            return
        require_package("matplotlib")
        try:
            if self.plot:
                Path(self.plot).mkdir(parents=True, exist_ok=True)
            if self.report:
                Path(self.report).open("ab").close()
        except OSError as error:
            raise ConfigError(f"Cannot write {error.filename}: {error.strerror}.") from error


def _check_names(option: str, given: list[str], known: Sequence[str]) -> None:
    wrong = ", ".join(name for name in given if name not in known)
    if wrong:
        raise ConfigError(f"--{option} is a list of {', '.join(known)}; {wrong} is not one of them.")
