"""`cbatch models`: lists the models on this machine, with what computes them and whether they fit."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import click
from huggingface_hub import constants

from cbatch.base.errors import ConfigError
from cbatch.base.units import format_bytes
from cbatch.cli.common.configured_command import ConfiguredCommand, display_path
from cbatch.cli.common.console import emit, safe
from cbatch.cli.common.local_models import LocalModel, gguf_folders, local_models, models_below


@click.command("models", cls=ConfiguredCommand)
@click.argument("folder", required=False, metavar="[FOLDER]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array instead of lines.")
def models(folder: str | None, as_json: bool) -> Literal[0]:
    """List the models in FOLDER, or in the hub's cache and where llama.cpp and LM Studio keep theirs.

    A model is fast if cbatch has a program for it; transformers computes the others. It fits if its files are smaller
    than the free memory of the device that `--device auto` chooses.
    """
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"There is no folder {folder}.")
    found = models_below(Path(folder)) if folder is not None else local_models()
    if as_json:
        emit(json.dumps(_described(found), indent=2))
    elif found:
        _show(_described(found))
    elif folder is not None:
        emit(f"There are no models in {folder}: neither folders with a config.json and safetensors, nor GGUF files.")
    else:
        cache, *folders = (display_path(one) for one in (Path(constants.HF_HUB_CACHE), *gguf_folders()))
        emit(
            f"There are no models in the hub's cache ({cache}), and no GGUF files in {', '.join(folders)}. "
            "A model is downloaded when it is first used, for example by cbatch chat -m Qwen/Qwen3-0.6B."
        )
    return 0


def _described(found: list[LocalModel]) -> list[dict[str, Any]]:
    from cbatch.model.summary import summarize
    from cbatch.runtime.device import choose_device
    from cbatch.runtime.memory import device_memory

    free = device_memory(choose_device("auto")).free() if found else 0
    rows = []
    for one in found:
        about = summarize(one.place)._asdict()
        date = datetime.fromtimestamp(one.modified_at).date().isoformat()
        about |= {"size_bytes": one.size_bytes, "fits": one.size_bytes < free, "date": date}
        rows.append({"model": one.name, "kind": one.kind, **about})
    return rows


def _show(rows: list[dict[str, Any]]) -> None:
    lines: list[tuple[str, ...]] = [("model", "family", "context", "size", "fits", "date", "path")]
    for row in rows:
        context, fits = "" if row["context"] is None else f"{row['context']:,}", "yes" if row["fits"] else "no"
        shown = (row["model"], row["family"], context, format_bytes(row["size_bytes"]), fits, row["date"], row["path"])
        lines.append(tuple(map(safe, shown)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(line, "<<>><<<", widths, strict=True)
        emit("  ".join(f"{cell:{side}{width}}" for cell, side, width in cells).rstrip())
