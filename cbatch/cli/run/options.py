"""The options of `cbatch run`, as the command and `/run` under a chat read them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from cbatch.cli.common.options import SamplingOptions
from cbatch.engine import ConfigError, EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """One field for each option of `cbatch run`; the help of the command describes them."""

    input: str
    output: str
    resume: bool
    retry_errors: bool
    recompute_changed: bool
    overwrite: bool
    format: Literal["jsonl", "text"]
    order: Literal["input", "completion"]
    window: int | None
    max_errors: int | None
    check: bool
    date: datetime | None
    raw: bool
    token_ids: bool
    timings: bool
    allow_unknown: bool
    stats: str | None
    trace: str | None
    quiet: bool
    verbose: bool
    sampling: SamplingOptions
    engine: EngineConfig

    def check_usage(self) -> None:
        """Raises ConfigError for options that would make every row an error row."""
        self.sampling.check()
        for name, is_given in (("retry-errors", self.retry_errors), ("recompute-changed", self.recompute_changed)):
            if is_given and not self.resume:
                raise ConfigError(f"--{name} needs --resume.")
        if self.resume and self.overwrite:
            raise ConfigError("--resume keeps the rows of the output file, --overwrite drops them; give one of them.")
