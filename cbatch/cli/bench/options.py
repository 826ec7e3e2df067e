"""The options of `cbatch bench` as one record."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch.engine import ConfigError

if TYPE_CHECKING:
    from cbatch.cli.bench.load.scenario import SLO
    from cbatch.cli.bench.strategies import Strategy
    from cbatch.cli.bench.workload import DistributionName, LengthDistribution
    from cbatch.engine import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """One field for each option of `cbatch bench`, under the option's name; see the help of the command."""

    prompts: str | None
    strategies: list[str]
    ablate: list[str]
    peer: list[str]
    batch_size: int
    requests: int
    input_len: str
    output_len: str
    distribution: DistributionName
    preset: str | None
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
        from cbatch.cli.bench.workload import LengthDistribution, parse_length_range

        inputs, outputs = parse_length_range(self.input_len), parse_length_range(self.output_len)
        return LengthDistribution(*inputs, self.distribution), LengthDistribution(*outputs, self.distribution)

    @property
    def slo(self) -> SLO:
        """Raises ConfigError."""
        from cbatch.cli.bench.load.scenario import SLO, parse_duration

        return SLO(parse_duration(self.slo_ttft), self.slo_tps)

    def check(self) -> None:
        """Raises ConfigError if options do not go together, or if results could not be written in the end."""
        self.chosen_strategies()
        if self.is_load:
            self._check_load()
        elif self.engine.max_seqs is not None:
            raise ConfigError("--batch-size sets the number of slots; --max-seqs is for a load (--users).")
        self._check_targets()

    def chosen_strategies(self) -> dict[str, Strategy]:
        """The strategies and ablations by name. Raises ConfigError if a name is unknown."""
        from cbatch.cli.bench.peers import PEERS
        from cbatch.cli.bench.strategies import ABLATIONS, STRATEGIES

        for option, names, known in (
            ("strategies", self.strategies, list(STRATEGIES)),
            ("ablate", self.ablate, list(ABLATIONS)),
            ("peer", self.peer, list(PEERS)),
        ):
            wrong = [name for name in names if name not in known]
            if wrong:
                raise ConfigError(f"--{option} is a list of {', '.join(known)}; {', '.join(wrong)} is not one of them.")
        if not self.strategies:
            raise ConfigError(f"--strategies is a list of {', '.join(STRATEGIES)}, and it is empty.")
        chosen = {name: STRATEGIES[name] for name in self.strategies}
        if self.ablate:
            chosen.setdefault("continuous", STRATEGIES["continuous"])
        return chosen | {f"no-{name}": ABLATIONS[name] for name in self.ablate}

    def _check_load(self) -> None:
        from cbatch.cli.bench.load.scenario import parse_duration

        if self.prompts is not None:
            raise ConfigError("A file of prompts is for strategies; users ask synthetic questions (--input-len).")
        if self.ablate or self.peer:
            raise ConfigError("--ablate and --peer go with strategies, not with users.")
        if not (math.isfinite(self.rate) and math.isfinite(self.slo_tps)):
            raise ConfigError("--rate and --slo-tps must be finite numbers.")
        for text in (self.duration, self.think, self.slo_ttft):
            parse_duration(text)

    def _check_targets(self) -> None:
        if not self.plot and not self.report:
            return
        from cbatch.cli.bench.render.style import require_matplotlib

        require_matplotlib()
        try:
            if self.plot:
                Path(self.plot).mkdir(parents=True, exist_ok=True)
            if self.report:
                Path(self.report).open("ab").close()
        except OSError as error:
            raise ConfigError(f"Cannot write {error.filename}: {error.strerror}.") from error
