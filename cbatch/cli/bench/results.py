"""What a bench reports: typed results, which `to_json` turns into the object that `--json` prints."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from cbatch import __version__
from cbatch.cli.bench.metrics import OutputDifference, RunMetrics
from cbatch.cli.bench.options import BenchOptions
from cbatch.cli.bench.recorder import RunRecord
from cbatch.cli.bench.roofline import DeviceRates, RooflineBound
from cbatch.cli.bench.techniques import Techniques
from cbatch.cli.bench.workload import Workload
from cbatch.cli.common.loading import describe
from cbatch.engine import Engine


@dataclass(frozen=True, slots=True)
class Machine:
    """The device and the versions of what runs on it, named as in `--json`."""

    device: str
    threads: int
    system: str
    cbatch: str
    python: str
    torch: str
    transformers: str

    @classmethod
    def of(cls, engine: Engine) -> Machine:
        device = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else _processor()
        return cls(
            device=device,
            threads=torch.get_num_threads(),
            system=platform.platform(),
            cbatch=__version__,
            python=platform.python_version(),
            torch=torch.__version__,
            transformers=transformers.__version__,
        )


def describe_model(engine: Engine) -> str:
    shown = describe(engine)
    return f"{shown['model']}, {shown['parameters']}, {shown['dtype']}, attention {shown['attention']}"


def _processor() -> str:
    """The name of the processor, if the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.processor() or platform.machine()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonReport:
    """Strategies and peers on the same work.

    records: the median run of each strategy, by its title
    assumed: sentences about what the model did not tell, for the roofline
    """

    options: BenchOptions
    machine: Machine
    model: str
    work: Workload
    strategies: list[AnyResult]
    records: dict[str, RunRecord]
    rates: DeviceRates
    bound: RooflineBound
    assumed: Sequence[str]
    techniques: Techniques

    @property
    def runs(self) -> dict[str, RunMetrics]:
        """The metrics of our own strategies, by title."""
        results = [result for result in self.strategies if isinstance(result, StrategyResult)]
        return {result.title: result.metrics for result in results if isinstance(result.metrics, RunMetrics)}

    def to_json(self) -> dict[str, Any]:
        work, techniques = self.work, self.techniques.to_json()
        data: dict[str, Any] = {
            "machine": asdict(self.machine),
            "model": self.model,
            "work": {
                "source": work.source,
                "requests": len(work.prompts),
                "prompt_tokens": work.prompt_tokens,
                "output_tokens": work.output_tokens,
                "slots": self.options.batch_size,
                "rounds": self.options.rounds,
            },
            "strategies": [result.to_json() for result in self.strategies],
            "roofline": {
                "copy_bytes_per_s": self.rates.bytes_per_s,
                "matrix_flops_per_s": self.rates.flops_per_s,
                **asdict(self.bound),
                "floor_s": self.bound.seconds,
                "assumed": self.assumed,
            },
        }
        return data | {"techniques": techniques} if techniques else data
