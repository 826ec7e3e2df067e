"""Prompts from the columns of a row: by a text with {column} in it, or by a Jinja template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import Any, Protocol, runtime_checkable

from jinja2 import StrictUndefined, Template, TemplateError, nodes
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cbatch.base.errors import ConfigError, RequestError
from cbatch.text.chat_template import sandbox


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


ROW = "row"
"""Holds all columns, for those whose names Jinja cannot say."""

_TESTED = {"default", "d", "defined", "undefined"}
"""Filters and tests that take a column which may be missing."""


class JinjaTemplate:
    """A template whose variables are the columns of a row. Raises ConfigError if it is not valid."""

    def __init__(self, text: str, name: str) -> None:
        environment = sandbox(undefined=StrictUndefined, finalize=_printed)
        try:
            self._template: Template = environment.from_string(text)
        except TemplateError as error:
            line = f", line {number}" if (number := getattr(error, "lineno", None)) else ""
            raise ConfigError(f"The template {name}{line} cannot be read: {error}.") from error
        self.names = _needed(environment, text)
        """The columns without which it is likely that no prompt can be made: what it nowhere tests to be there."""

    def render(self, columns: Mapping[str, object]) -> str:
        """The prompt for a row. Raises RequestError (`template_error`) if the template does."""
        try:
            return self._template.render({ROW: columns} | {str(name): value for name, value in columns.items()})
        except Exception as error:  # a template may raise whatever Python does
            raise RequestError("template_error", f"the template refuses the row: {error}") from error


def read_template(path: Path) -> JinjaTemplate:
    """The template in a file. Raises ConfigError if it cannot be read or is not valid."""
    try:
        return JinjaTemplate(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.reason
        raise ConfigError(f"Cannot read the template {path}: {reason}.") from error


def _printed(value: Any) -> Any:
    """What Jinja is about to print. It would print a null as the word None."""
    if value is None:
        raise TemplateError("it prints a column that is null; test it, or write {{ column or '' }}")
    return value


def _needed(environment: ImmutableSandboxedEnvironment, text: str) -> list[str]:
    tree = environment.parse(text)
    tested = {
        node.node.name
        for node in tree.find_all((nodes.Test, nodes.Filter))
        if node.name in _TESTED and isinstance(node.node, nodes.Name)
    }
    known = {ROW, *environment.globals}
    return sorted(find_undeclared_variables(tree) - tested - known)
