"""Prompts from the columns of a row: what makes them, and the simplest of it, a text with {column} in it."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Protocol, runtime_checkable

from cbatch.base.errors import ConfigError, RequestError


@runtime_checkable
class ColumnTemplate(Protocol):
    """Makes a prompt of the columns of a row."""

    @property
    def names(self) -> list[str]:
        """The columns that it needs."""
        ...

    def render(self, columns: Mapping[str, object]) -> str:
        """The prompt. Raises RequestError (`template_error`)."""
        ...


class PromptTemplate:
    """A text with names of columns in braces; {{ and }} stand for braces.

    Only plain names: a template reaches no attribute, item or method of a value. Raises ConfigError for anything else.
    """

    def __init__(self, text: str) -> None:
        try:
            parts = list(Formatter().parse(text))
        except ValueError as error:
            raise ConfigError(f"The template cannot be read: {error}. Write {{{{ and }}}} for braces.") from error
        self._parts: list[tuple[str, str | None]] = []
        for literal, name, form, conversion in parts:
            if name is not None and (not name or form or conversion or set(name) & set(".[]{}")):
                raise ConfigError(
                    f"The template may have only plain names of columns in braces, such as {{question}}; "
                    f"{_shown(name, form, conversion)} is not one. Write {{{{ and }}}} for braces."
                )
            self._parts.append((literal, name))

    @property
    def names(self) -> list[str]:
        """The columns without which no prompt can be made."""
        return list(dict.fromkeys(name for _, name in self._parts if name is not None))

    def render(self, columns: Mapping[str, object]) -> str:
        """The prompt for a row. Raises RequestError (`template_error`) if a column is missing or null."""
        return "".join(literal + (_value(columns, name) if name is not None else "") for literal, name in self._parts)


def _value(columns: Mapping[str, object], name: str) -> str:
    if columns.get(name) is None:
        problem = "is null" if name in columns else f"is missing; the row has {', '.join(map(str, columns)) or 'none'}"
        raise RequestError("template_error", f"the column {name!r} of the template {problem}")
    return str(columns[name])


def _shown(name: str, form: str | None, conversion: str | None) -> str:
    return f"{{{name}{'!' + conversion if conversion else ''}{':' + form if form else ''}}}"
