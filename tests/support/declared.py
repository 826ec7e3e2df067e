"""Which types of models have a declaration, and which wrap a language model."""

from __future__ import annotations

import json

from cbatch.model.config_classes import PATH, text_config
from cbatch.model.families import declarations


def declared_kinds() -> list[str]:
    """Every `model_type` that has a declaration."""
    return sorted(declarations)


def has_declaration(kind: str) -> bool:
    """Whether models of a `model_type` have one, or wrap a language model that has."""
    return text_config({"model_type": kind}).get("model_type") in declarations


def wrappers() -> list[str]:
    """Every `model_type` whose models wrap a language model."""
    return list(json.loads(PATH.read_text(encoding="utf-8"))["wrappers"])
