"""The families whose models have a program, one declaration each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cbatch.model.config import ConfigReader, UnsupportedConfig
from cbatch.model.families import (  # noqa: F401  # which registers them
    deepseek,
    experts,
    gemma,
    gpt,
    granite,
    hybrids,
    llama,
    mixtures,
    vision,
)
from cbatch.model.families.builder import Builder
from cbatch.model.families.decoder import declarations
from cbatch.model.ops.all import Program

__all__ = ["declared_kinds", "read_program", "text_config"]


def declared_kinds() -> list[str]:
    """Every `model_type` that has a declaration."""
    return sorted(declarations)


def read_program(config: Mapping[str, Any]) -> Program:
    """The program of a model. Raises UnsupportedConfig if its family or one of its settings is not known."""
    try:
        return _read(config)
    except UnsupportedConfig:
        raise
    except KeyError as error:
        raise UnsupportedConfig(f"its config.json has no {error.args[0]}") from error
    except Exception as error:  # any error that unexpected values cause
        raise UnsupportedConfig(f"its config.json is unusual ({error})") from error


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the text model, which models of text with pictures keep in a part of theirs."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    outer = (
        "model_type", "architectures", "tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype",
        "quantization_config", "image_token_id", "image_token_index", "video_token_id", "audio_token_id",
    )  # fmt: skip
    return {**text, **{key: config[key] for key in outer if key in config}}


def _read(config: Mapping[str, Any]) -> Program:
    reader = ConfigReader(text_config(config))
    declare = declarations.get(reader.kind)
    if declare is None:
        raise UnsupportedConfig(f"its model type {reader.kind} has no declaration")
    model = Builder(reader)
    declare(model)
    unread = reader.unread()
    if unread:
        defaults = _class_defaults(reader.kind)
        odd = {key: value for key, value in unread.items() if key not in defaults or defaults[key] != value}
        if odd:
            key, value = next(iter(odd.items()))
            raise UnsupportedConfig(f"its config.json says {key} = {value!r}, which its declaration does not know")
    return model.program()


def _class_defaults(kind: str) -> dict[str, Any]:
    """Transformers' defaults of keys that a config.json does not have. It is imported for unknown keys only."""
    from transformers import CONFIG_MAPPING

    try:
        defaults: dict[str, Any] = CONFIG_MAPPING[kind]().to_dict()
    except Exception:  # no class of that name, or one without defaults
        return {}
    return defaults
