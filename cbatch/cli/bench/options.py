"""The options of `cbatch bench` as one record."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch.cli.bench.workload import DistributionName, LengthDistribution
from cbatch.cli.common.replica_options import ReplicaOptions
from cbatch.engine import ConfigError, EngineConfig

if TYPE_CHECKING:
    from cbatch.cli.bench.strategies import Strategy

SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float:
    """Seconds meant by `500ms`, `2s`, `1.5m` or `1h`. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text)
    if match is None or match[2] not in SECONDS:
        raise ConfigError(f"{text!r} is not a duration; write it as 500ms, 2s or 1m.")
    return float(match[1]) * SECONDS[match[2]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options of `cbatch bench` by their names; see its help. `--preset` has set others, and is not among them."""

    prompts: str | None
    strategies: list[str]
    ablate: list[str]
    peer: list[str]
    batch_size: int
    requests: int
    input_len: str
    output_len: str
    distribution: DistributionName
    rounds: int
    seed: int
    users: int | None
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
        return self.find_capacity or self.users is not None

    @property
    def is_silent(self) -> bool:
        """Whether to leave out progress."""
        return self.quiet or self.json

    @property
    def lengths(self) -> tuple[LengthDistribution, LengthDistribution]:
        """Lengths of prompts and of outputs. Raises ConfigError."""
        parse = LengthDistribution.parse
        return parse(self.input_len, self.distribution), parse(self.output_len, self.distribution)

    def check(self) -> None:
        """Raises ConfigError if options do not go together, or if results could not be written in the end."""
        self.chosen_strategies()
        if "speculation" in self.ablate and self.engine.speculate == "off":
            raise ConfigError("--ablate speculation has nothing to switch off, because --speculate is off.")
        self.replicas.check(self.engine)
        if self.is_load:
            self._check_load()
        elif self.engine.max_seqs is not None:
            raise ConfigError("--batch-size sets the number of slots; --max-seqs is for a load (--users).")
        self._check_targets()

    def chosen_strategies(self) -> dict[str, Strategy]:
        """The strategies and ablations by name. Raises ConfigError if a name is unknown."""
        from cbatch.cli.bench.peers import PEERS
        from cbatch.cli.bench.strategies import ABLATIONS, STRATEGIES

        _check_names("strategies", self.strategies, STRATEGIES)
        _check_names("ablate", self.ablate, ABLATIONS)
        _check_names("peer", self.peer, PEERS)
        if not self.strategies:
            raise ConfigError(f"--strategies is a list of {', '.join(STRATEGIES)}, and it is empty.")
        chosen = {name: STRATEGIES[name] for name in self.strategies}
        if self.ablate:
            chosen.setdefault("continuous", STRATEGIES["continuous"])
        return chosen | {f"no-{name}": ABLATIONS[name] for name in self.ablate}

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

    def _check_targets(self) -> None:
        if not self.plot and not self.report:
            return
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise ConfigError("Pictures need matplotlib: pip install 'cbatch[plot]'.") from error
        try:
            if self.plot:
                Path(self.plot).mkdir(parents=True, exist_ok=True)
            if self.report:
                Path(self.report).open("ab").close()
        except OSError as error:
            raise ConfigError(f"Cannot write {error.filename}: {error.strerror}.") from error


def _check_names(option: str, names: list[str], known: Collection[str]) -> None:
    wrong = ", ".join(name for name in names if name not in known)
    if wrong:
        raise ConfigError(f"--{option} is a list of {', '.join(known)}; {wrong} is not one of them.")
