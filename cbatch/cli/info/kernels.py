"""The table of `cbatch info --check`: which kernels agree with plain torch, and how fast they are."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cbatch.cli.common.console import emit, safe

if TYPE_CHECKING:
    from cbatch.api import Engine
    from cbatch.cli.bench.roofline import DeviceRates
    from cbatch.engine.kernel_checks.kernel_check import KernelCheck

_WIDTH = 48
"""Columns of the names of kernels."""


def show_kernels(engine: Engine) -> bool:
    """Checks each kernel and prints its line at once. Returns whether all agree."""
    from cbatch.cli.bench.roofline import measure_rates

    checks = engine.core.check_kernels()
    first = next(checks, None)
    if first is None:
        emit("\nThere is nothing to check: torch computes everything on this device.")
        return True
    rates = measure_rates(engine.device, engine.model.dtype)
    emit(
        f"\nA copy moves {_bytes_rate(rates.bytes_per_s)} on {engine.device}, and a product of matrices computes "
        f"{_flops_rate(rates.flops_per_s)}.\n\n{'kernel':<{_WIDTH}}  agrees  {'error':>7}  {'limit':>7}  speed"
    )
    wrong = count = 0
    for check in (first, *checks):
        count += not check.skipped
        wrong += not check.agrees
        _show(check, engine, rates)
    emit(f"\n{wrong} of {count} kernels differ from plain torch." if wrong else "\nAll kernels agree with plain torch.")
    return wrong == 0


def _show(check: KernelCheck, engine: Engine, rates: DeviceRates) -> None:
    name = f"{safe(check.name):<{_WIDTH}}"
    if check.skipped:
        emit(f"{name}  not checked: {safe(check.skipped)}")
    elif check.failure:
        emit(f"{name}  NO      {safe(check.failure)}")
    else:
        agrees = "yes" if check.agrees else "NO"
        figures = f"{agrees:<6}  {check.error:>7.1e}  {check.tolerance:>7.1e}"
        emit(f"{name}  {figures}  {_speed(check, engine, rates)}".rstrip())


def _speed(check: KernelCheck, engine: Engine, rates: DeviceRates) -> str:
    """What a kernel reaches of the rate that limits it."""
    from cbatch.cli.bench.roofline import best_time, cache_bytes

    if check.workload is None:
        return ""
    work, on_gpu = check.workload(), engine.device.type != "cpu"
    seconds = best_time(work.run, engine.device, time.perf_counter, 10 if on_gpu else 1)
    if work.flops:
        rate = work.flops / seconds
        return f"{rate / rates.flops_per_s:>4.0%} of the product ({_flops_rate(rate)})"
    rate = work.bytes_read / seconds
    where = ", in a cache" if work.bytes_read <= cache_bytes(engine.device) else ""
    return f"{rate / rates.bytes_per_s:>4.0%} of the copy ({_bytes_rate(rate)}{where})"


def _bytes_rate(per_s: float) -> str:
    return f"{per_s / 1e9:,.1f} GB/s"


def _flops_rate(per_s: float) -> str:
    return f"{per_s / 1e12:,.1f} TFLOP/s" if per_s >= 1e12 else f"{per_s / 1e9:,.1f} GFLOP/s"
