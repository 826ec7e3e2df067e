"""`cbatch info`: shows what to paste into a bug report, and checks kernels."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from cbatch import __version__
from cbatch.base.config import EngineConfig
from cbatch.cli.common.configured_command import ConfiguredCommand
from cbatch.cli.common.console import emit, safe
from cbatch.cli.common.loading import open_engine
from cbatch.cli.common.options import engine_config, engine_options

if TYPE_CHECKING:
    from cbatch.api import Engine
    from cbatch.cli.bench.roofline import DeviceRates
    from cbatch.engine.kernel_checks.kernel_check import KernelCheck

_BLOCKS = 16
"""Blocks of the KV cache of an engine that computes nothing."""


@click.command("info", cls=ConfiguredCommand)
@engine_options()
@click.option(
    "--check",
    is_flag=True,
    help="Compare every kernel with plain torch, and measure its speed; the exit code is 1 if one differs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
def info(check: bool, as_json: bool, **values: Any) -> int:
    """Show versions, devices, the model, and the size of its KV cache."""
    config = engine_config(values)
    if as_json and check:
        raise click.UsageError("--json shows what info shows without --check.")
    about = _about_machine(config)
    if not as_json:
        _show(about)
    if check:  # the kernels need the memory that the cache would take
        config = replace(config, kv_blocks=_BLOCKS, kv_cache_memory=None)
    with open_engine(config, quiet=True) as engine:
        described = engine.core.describe()
        if as_json:
            emit(json.dumps(about | described, indent=2, ensure_ascii=False))
            return 0
        _show({name: value for name, value in described.items() if not (check and name == "KV cache")})
        return 0 if not check or _kernels_agree(engine) else 1


def _about_machine(config: EngineConfig) -> dict[str, str]:
    """Versions, devices, and what is kept on disk."""
    import torch
    import transformers

    from cbatch.model.packed_file import WeightCache
    from cbatch.runtime.device import describe_gpus

    about = {
        "cbatch": __version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **describe_gpus(),
    }
    if (cache := WeightCache.of_config(config)) is not None:
        about["weight cache"] = cache.describe()
    return about


def _show(described: Mapping[str, str]) -> None:
    for name, value in described.items():
        emit(f"{name:<13} {safe(value)}")


_WIDTH = 48
"""Columns of the names of kernels."""


def _kernels_agree(engine: Engine) -> bool:
    """Checks each kernel and prints its line at once. Returns whether all agree."""
    from cbatch.cli.bench.roofline import measure_rates

    checks = engine.core.check_kernels()
    first = next(checks, None)
    if first is None:
        emit("\nThere is nothing to check: torch computes everything on this device.")
        return True
    rates = measure_rates(engine.device, engine.model.dtype)
    emit(
        f"\nA copy moves {rates.bytes_per_s / 1e9:,.1f} GB/s on {engine.device}, and a product of matrices computes "
        f"{_flops_rate(rates.flops_per_s)}.\n\n{'kernel':<{_WIDTH}}  agrees  {'error':>7}  {'limit':>7}  speed"
    )
    wrong = count = 0
    for check in (first, *checks):
        count += not check.skipped
        wrong += not check.agrees
        agrees = "yes" if check.agrees else "NO"
        said = f"{agrees:<6}  {check.error:>7.1e}  {check.tolerance:>7.1e}  {_speed(check, engine, rates)}"
        if check.skipped or check.failure:
            said = f"not checked: {safe(check.skipped)}" if check.skipped else f"NO      {safe(check.failure)}"
        emit(f"{safe(check.name):<{_WIDTH}}  {said}".rstrip())
    emit(f"\n{wrong} of {count} kernels differ from plain torch." if wrong else "\nAll kernels agree with plain torch.")
    return wrong == 0


def _speed(check: KernelCheck, engine: Engine, rates: DeviceRates) -> str:
    """The share of the limiting rate that a kernel reaches."""
    from cbatch.cli.bench.roofline import best_time, cache_bytes

    if check.workload is None:
        return ""
    work = check.workload()
    seconds = best_time(work.run, engine.device, 10 if engine.device.type != "cpu" else 1)
    if work.flops:
        rate = work.flops / seconds
        return f"{rate / rates.flops_per_s:>4.0%} of the product ({_flops_rate(rate)})"
    rate = work.bytes_read / seconds
    where = ", in a cache" if work.bytes_read <= cache_bytes(engine.device) else ""
    return f"{rate / rates.bytes_per_s:>4.0%} of the copy ({rate / 1e9:,.1f} GB/s{where})"


def _flops_rate(per_s: float) -> str:
    return f"{per_s / 1e12:,.1f} TFLOP/s" if per_s >= 1e12 else f"{per_s / 1e9:,.1f} GFLOP/s"
