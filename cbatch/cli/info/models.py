"""The table of the models on this machine."""

from __future__ import annotations

from datetime import datetime

from cbatch.base.units import format_bytes
from cbatch.cli.common.config_file import display_path
from cbatch.cli.common.console import emit, safe
from cbatch.cli.common.local_models import LocalModel, gguf_folders, hub_cache, local_models


def show_models() -> None:
    """Prints name, kind, size and date of each model; if there are none, where they were looked for."""
    models = local_models()
    if not models:
        folders = ", ".join(display_path(folder) for folder in gguf_folders())
        emit(
            f"There are no models in the hub's cache ({display_path(hub_cache())}), and no GGUF files in {folders}. "
            "A model is downloaded when it is first used, for example by cbatch chat -m Qwen/Qwen3-0.6B."
        )
        return
    rows = [("model", "kind", "size", "date"), *map(_row, models)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, kind, size, date in rows:
        emit(f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {size:>{widths[2]}}  {date}".rstrip())


def _row(model: LocalModel) -> tuple[str, str, str, str]:
    date = datetime.fromtimestamp(model.modified_at).date().isoformat()
    return safe(model.name), model.kind, format_bytes(model.size_bytes), date
