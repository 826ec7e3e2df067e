"""Finds the declaration of a model by its `model_type`."""

from __future__ import annotations

from collections.abc import Callable

from cbatch.model.families.builder import Builder

Declaration = Callable[[Builder], None]

_declarations: dict[str, Declaration] = {}


def family(*kinds: str) -> Callable[[Declaration], Declaration]:
    """Registers a declaration for the models of these types."""

    def register(declaration: Declaration) -> Declaration:
        _declarations.update(dict.fromkeys(kinds, declaration))
        return declaration

    return register


def declaration_of(kind: str) -> Declaration | None:
    return _declarations.get(kind)


def declared_kinds() -> list[str]:
    """Every `model_type` that has a declaration."""
    return sorted(_declarations)
