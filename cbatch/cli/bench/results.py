"""What a bench reports: typed results, which `to_json` turns into the object that `--json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cbatch.cli.bench.machine import Machine
from cbatch.cli.bench.metrics import OutputDifference, RunMetrics


@dataclass(frozen=True, slots=True)
class PeerMetrics:
    """What is measured of a peer, named as in `--json`. `attention` is what transformers calls the backend it used."""

    elapsed_s: float
    output_tokens_per_s: float
    attention: str


@dataclass(frozen=True, slots=True)
class StrategyResult:
    """The median run of one strategy or peer.

    name:                what `--strategies`, `--ablate` or `--peer` call it
    floor_share:         speed as a share of what the roofline allows
    elapsed_s_of_rounds: seconds of every round
    difference:          from the outputs of the reference run
    """

    name: str
    title: str
    metrics: RunMetrics | PeerMetrics
    floor_share: float
    elapsed_s_of_rounds: list[float]
    difference: OutputDifference

    def to_json(self) -> dict[str, Any]:
        return {
            "strategy": self.name,
            "title": self.title,
            **asdict(self.metrics),
            "floor_share": self.floor_share,
            "elapsed_s_of_rounds": self.elapsed_s_of_rounds,
            **asdict(self.difference),
        }


@dataclass(frozen=True, slots=True)
class FailedPeer:
    """A peer that did not get through; `error` says why in a sentence."""

    name: str
    error: str

    @property
    def title(self) -> str:
        return self.name

    def to_json(self) -> dict[str, Any]:
        return {"strategy": self.name, "title": self.title, "error": self.error}


AnyResult = StrategyResult | FailedPeer


@dataclass(frozen=True, slots=True)
class RooflineSummary:
    """The rates of the device and the least seconds that the work takes on it, named as in `--json`.

    assumed: sentences about what the model did not tell
    """

    copy_bytes_per_s: float
    matrix_flops_per_s: float
    weights_s: float
    compute_s: float
    cache_s: float
    floor_s: float
    assumed: Sequence[str]


@dataclass(frozen=True, slots=True)
class PromptMemory:
    """The memory that a long prompt takes when it is computed in chunks of `tokens_a_step` tokens."""

    prompt_tokens: int
    tokens_a_step: int
    peak_bytes: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Seconds that one more token takes after a context, with its KV cache and without."""

    context_tokens: int
    without_cache_s: float
    with_cache_s: float


@dataclass(frozen=True, slots=True)
class Techniques:
    """What chunked prefill and the KV cache are worth; None for what was not measured."""

    prompt_memory: list[PromptMemory] | None = None
    token_costs: list[TokenCost] | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class WorkSummary:
    """The work that every strategy did, named as in `--json`."""

    source: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    slots: int
    rounds: int


@dataclass(frozen=True, slots=True)
class ComparisonReport:
    """Strategies and peers on the same work."""

    machine: Machine
    model: str
    work: WorkSummary
    strategies: list[AnyResult]
    roofline: RooflineSummary
    techniques: Techniques

    @property
    def runs(self) -> dict[str, RunMetrics]:
        """The metrics of our own strategies, by title."""
        results = [result for result in self.strategies if isinstance(result, StrategyResult)]
        return {result.title: result.metrics for result in results if isinstance(result.metrics, RunMetrics)}

    def to_json(self) -> dict[str, Any]:
        data = {
            "machine": asdict(self.machine),
            "model": self.model,
            "work": asdict(self.work),
            "strategies": [result.to_json() for result in self.strategies],
            "roofline": asdict(self.roofline),
        }
        techniques = self.techniques.to_json()
        return data | {"techniques": techniques} if techniques else data
