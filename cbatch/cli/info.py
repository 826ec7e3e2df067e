"""`cbatch info`: shows what to paste into a bug report."""

from __future__ import annotations

import platform
from typing import Any, Literal

import click

from cbatch import __version__
from cbatch.cli.common.console import emit, safe
from cbatch.cli.common.loading import describe, open_engine
from cbatch.cli.common.options import engine_config, engine_options, model_options


@click.command("info")
@model_options
@engine_options()
def info(**values: Any) -> Literal[0]:
    """Show versions, devices, the model, and the size of its KV cache."""
    import torch
    import transformers

    from cbatch.engine import describe_gpus

    emit(f"cbatch        {__version__}")
    emit(f"python        {platform.python_version()} on {platform.platform()}")
    emit(f"torch         {torch.__version__}, {torch.get_num_threads()} threads")
    emit(f"transformers  {transformers.__version__}")
    for name, value in describe_gpus().items():
        emit(f"{name:<13} {safe(value)}")
    with open_engine(engine_config(values), quiet=True) as engine:
        for name, value in describe(engine).items():
            emit(f"{name:<13} {safe(value)}")
    return 0
