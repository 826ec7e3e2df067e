"""`cbatch info`: shows what to paste into a bug report."""

from __future__ import annotations

import platform
from dataclasses import replace
from typing import Any

import click

from cbatch import __version__
from cbatch.cli.common.configured_command import ConfiguredCommand
from cbatch.cli.common.console import emit, safe
from cbatch.cli.common.loading import open_engine
from cbatch.cli.common.options import engine_config, engine_options, model_options
from cbatch.cli.info.kernels import show_kernels
from cbatch.cli.info.models import show_models
from cbatch.engine import WeightCache, format_bytes

_BLOCKS = 16
"""Blocks of the KV cache of an engine that computes nothing."""


@click.command("info", cls=ConfiguredCommand)
@model_options
@engine_options()
@click.option(
    "--check",
    is_flag=True,
    help="Compare every kernel with plain torch, and measure its speed; the exit code is 1 if one differs.",
)
@click.option("--clear-weight-cache", is_flag=True, help="Remove the files of packed weights, and do nothing else.")
@click.option("--models", is_flag=True, help="List the models on this machine, and do nothing else.")
def info(check: bool, clear_weight_cache: bool, models: bool, **values: Any) -> int:
    """Show versions, devices, the model, and the size of its KV cache."""
    config = engine_config(values)
    if clear_weight_cache:
        cache = WeightCache.of_config(config)
        emit(f"{format_bytes(cache.clear() if cache else 0)} of packed weights were removed.")
        return 0
    if models:
        show_models()
        return 0
    import torch
    import transformers

    from cbatch.engine import describe_gpus

    emit(f"cbatch        {__version__}")
    emit(f"python        {platform.python_version()} on {platform.platform()}")
    emit(f"torch         {torch.__version__}, {torch.get_num_threads()} threads")
    emit(f"transformers  {transformers.__version__}")
    for name, value in describe_gpus().items():
        emit(f"{name:<13} {safe(value)}")
    if (cache := WeightCache.of_config(config)) is not None:
        emit(f"{'weight cache':<13} {safe(cache.describe())}")
    if check:  # the kernels need the memory that the cache would take
        config = replace(config, kv_blocks=_BLOCKS, kv_cache_memory=None)
    with open_engine(config, quiet=True) as engine:
        for name, value in engine.core.describe().items():
            if not (check and name == "KV cache"):
                emit(f"{name:<13} {safe(value)}")
        return 0 if not check or show_kernels(engine) else 1
