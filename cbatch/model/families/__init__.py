"""The families whose models have a program, one declaration each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cbatch.model.config import ConfigReader, UnsupportedConfig
from cbatch.model.config_classes import text_config
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

__all__ = ["declarations", "read_program"]


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


def _read(config: Mapping[str, Any]) -> Program:
    text = text_config(config)
    declare = declarations.get(str(text.get("model_type")))
    if declare is None:
        raise UnsupportedConfig(f"its model type {text.get('model_type')} has no declaration")
    model = Builder(ConfigReader(text))
    declare(model)
    model.config.finish()
    return model.program()
