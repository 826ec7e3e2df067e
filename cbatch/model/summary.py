"""Which model lies in a folder or a GGUF file, and what computes it, by its settings alone; no weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cbatch.base.errors import CbatchError
from cbatch.base.hub import gguf_paths, is_gguf
from cbatch.model.config import UnsupportedConfig, read_model_config
from cbatch.model.config_classes import text_config
from cbatch.model.families import read_program
from cbatch.model.formats.gguf_config import read_config
from cbatch.model.formats.gguf_file import read_gguf
from cbatch.model.formats.quantized import settings_of, without_quantization


class ModelSummary(NamedTuple):
    """
    family:  the `model_type` of its config.json; empty if that cannot be read
    context: most tokens of a sequence; None if the settings do not say it
    path:    `fast`; or `transformers` and why, which may refuse it once it is loaded; or `refused` and why
    """

    family: str
    context: int | None
    path: str


def summarize(place: Path) -> ModelSummary:
    """The model in a folder or a GGUF file. Never raises for what is wrong with the files."""
    config: Mapping[str, Any] = {}
    try:
        config = (
            read_config(read_gguf(gguf_paths(str(place), None))) if is_gguf(place.name) else read_model_config(place)
        )
        text = text_config(config)
        family = str(text.get("model_type", ""))
        read_program(without_quantization(config) if settings_of(config) is not None else config)
        path = "fast"
    except UnsupportedConfig as error:
        path = f"{'refused' if is_gguf(place.name) else 'transformers'}: {error}"
    except (CbatchError, OSError) as error:
        return ModelSummary("", None, f"refused: {error}")
    context = text.get("max_position_embeddings")
    return ModelSummary(family, context if isinstance(context, int) else None, path)
