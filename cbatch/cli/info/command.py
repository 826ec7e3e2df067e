"""`cbatch info`: shows what to paste into a bug report."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from cbatch import __version__
from cbatch.base.config import EngineConfig
from cbatch.base.units import format_bytes, format_count
from cbatch.cli.common.configured_command import ConfiguredCommand
from cbatch.cli.common.console import emit, safe
from cbatch.cli.common.loading import open_engine
from cbatch.cli.common.options import engine_config, engine_options
from cbatch.cli.info.kernels import show_kernels
from cbatch.cli.info.models import show_models
from cbatch.model.weight_cache import WeightCache

_BLOCKS = 16
"""Blocks of the KV cache of an engine that computes nothing."""


@click.command("info", cls=ConfiguredCommand)
@engine_options()
@click.option(
    "--check",
    is_flag=True,
    help="Compare every kernel with plain torch, and measure its speed; the exit code is 1 if one differs.",
)
@click.option("--clear-weight-cache", is_flag=True, help="Remove the files of packed weights, and do nothing else.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
@click.option("--models", is_flag=True, help="List the models on this machine, and do nothing else.")
def info(check: bool, clear_weight_cache: bool, as_json: bool, models: bool, **values: Any) -> int:
    """Show versions, devices, the model, and the size of its KV cache."""
    config = engine_config(values)
    if as_json and (check or clear_weight_cache or models):
        raise click.UsageError("--json shows what info shows without --check, --models and --clear-weight-cache.")
    if clear_weight_cache:
        cache = WeightCache.of_config(config)
        emit(f"{format_bytes(cache.clear() if cache else 0)} of packed weights were removed.")
        return 0
    if models:
        show_models()
        return 0
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
        return 0 if not check or show_kernels(engine) else 1


def _about_machine(config: EngineConfig) -> dict[str, str]:
    """Versions, devices, and what is kept on disk."""
    import torch
    import transformers

    from cbatch.runtime.device import describe_gpus

    about = {
        "cbatch": __version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": f"{torch.__version__}, {format_count(torch.get_num_threads(), 'thread')}",
        "transformers": transformers.__version__,
        **describe_gpus(),
    }
    if (cache := WeightCache.of_config(config)) is not None:
        about["weight cache"] = cache.describe()
    return about


def _show(described: Mapping[str, str]) -> None:
    for name, value in described.items():
        emit(f"{name:<13} {safe(value)}")
