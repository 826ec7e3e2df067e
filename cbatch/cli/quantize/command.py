"""`cbatch quantize`: writes a model with rounded weights, which transformers reads too."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from cbatch.base.config import EngineConfig
from cbatch.base.quantization import WEIGHTS
from cbatch.cli.common.configured_command import ConfiguredCommand
from cbatch.cli.common.console import notice
from cbatch.cli.common.loading import print_notices


@click.command("quantize", cls=ConfiguredCommand)
@click.argument("model", metavar="MODEL")
@click.option("-o", "--output", metavar="FOLDER", required=True, help="New folder for the model.")
@click.option("--quantize", "weights", type=click.Choice(WEIGHTS), default="int4", show_default=True, help="As in run.")
@click.option("--revision", metavar="REV", help="Branch, tag or commit of a hub model.")
@click.option("--device", default="auto", show_default=True, help="Device that rounds.")
@click.option("-q", "--quiet", is_flag=True, help="Print only errors on stderr.")
def quantize(model: str, output: str, weights: str, revision: str | None, device: str, quiet: bool) -> Literal[0]:
    """Round the weights of MODEL once, and write it to FOLDER in the format of compressed-tensors.

    FOLDER holds the integers that --quantize makes of MODEL when it is loaded. cbatch and transformers read it, and
    what else knows that format.
    """
    from cbatch.model.load_plan import LoadPlan
    from cbatch.model.quantize import write_quantized

    print_notices(quiet=quiet)
    plan = LoadPlan.of(EngineConfig(model=model, revision=revision, device=device, quantize=weights))
    about = write_quantized(plan, Path(output))
    if not quiet:
        notice(about)
    return 0
