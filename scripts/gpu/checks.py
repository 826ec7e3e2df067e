"""Compares every kernel of a model with plain torch, as `cbatch info --check` does, on random weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cbatch.base.config import EngineConfig
from cbatch.cli.bench.roofline import DeviceRates, best_time
from cbatch.engine.kernel_checks.kernel_check import KernelCheck
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.loader import LoadedModel

BLOCKS = 64
"""Blocks of the cache of an engine that computes nothing."""


@dataclass(frozen=True, slots=True)
class Check:
    """One kernel: whether it agrees, and its share of the device's rate, if its speed says something.

    error, limit: the largest error, and the largest of a kernel that is right
    """

    what: str
    agrees: bool
    error: float
    limit: float
    share: float | None
    note: str = ""

    @classmethod
    def of(cls, shape: str, check: KernelCheck, device: torch.device, rates: DeviceRates) -> Check:
        note = check.failure or (f"not checked: {check.skipped}" if check.skipped else "")
        share = None if note else share_of(check, device, rates)
        return cls(f"{shape}, {check.name}", check.agrees, check.error, check.tolerance, share, note)

    def __str__(self) -> str:
        share = "" if self.share is None else f", {self.share:.0%} of the device's rate"
        figures = self.note or f"error {self.error:.1e} of at most {self.limit:.1e}{share}"
        return f"{'right' if self.agrees else 'WRONG'}: {self.what} ({figures})"


def share_of(check: KernelCheck, device: torch.device, rates: DeviceRates) -> float | None:
    if check.workload is None:
        return None
    work = check.workload()
    seconds = best_time(work.run, device, 10 if device.type == "cuda" else 1)
    return max(work.flops / rates.flops_per_s, work.bytes_read / rates.bytes_per_s) / seconds


def check_lines(name: str, loaded: LoadedModel, device: torch.device, rates: DeviceRates) -> Iterator[Check | str]:
    """Raises RuntimeError at the end if a kernel does not agree."""
    config = EngineConfig(device=str(device), kv_blocks=BLOCKS, cuda_graphs=False, max_batch_tokens=64)
    wrong = []
    with SteppingEngine(config, loaded) as engine:
        yield f"{name}, stepped down: {engine.stats().fallback or 'no'}"
        for check in engine.check_kernels():
            yield Check.of(name, check, device, rates)
            wrong += [] if check.agrees else [check.name]
    if wrong:
        raise RuntimeError(f"{len(wrong)} kernels differ from plain torch, such as {wrong[0]}.")
