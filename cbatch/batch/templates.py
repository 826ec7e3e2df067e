"""Prompts from the columns of a row: by a text with {column} in it, or by a Jinja template in the sandbox of chats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

from cbatch.base.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

ROW = "row"
"""Holds all columns in a Jinja template, for those whose names Jinja cannot say."""

_TESTED = {"default", "d", "defined", "undefined"}
"""Filters and tests that take a column which may be missing."""


class PromptTemplate:
    """A text with names of columns in braces; {{ and }} stand for braces.

    Only plain names: a template reaches no attribute, item or method of a value. Raises ConfigError for anything else.

    names: the columns without which no prompt can be made
    """

    def __init__(self, text: str) -> None:
        try:
            parts = list(Formatter().parse(text))
        except ValueError as error:
            raise ConfigError(f"The template cannot be read: {error}. Write {{{{ and }}}} for braces.") from error
        for _, name, form, conversion in parts:
            if name is not None and (not name or form or conversion or set(name) & set(".[]{}")):
                shown = f"{{{name}{'!' + conversion if conversion else ''}{':' + form if form else ''}}}"
                raise ConfigError(
                    "The template may have only plain names of columns in braces, such as {question}; "
                    f"{shown} is not one. Write {{{{ and }}}} for braces."
                )
        self._parts = [(literal, name) for literal, name, _, _ in parts]
        self.names = list(dict.fromkeys(name for _, name in self._parts if name is not None))

    def render(self, columns: Mapping[str, object]) -> str:
        """The prompt for a row. Raises RequestError (`template_error`) if a column is missing or null."""
        return "".join(literal + (_value(columns, name) if name is not None else "") for literal, name in self._parts)


def _value(columns: Mapping[str, object], name: str) -> str:
    if columns.get(name) is None:
        problem = "is null" if name in columns else f"is missing; the row has {', '.join(map(str, columns)) or 'none'}"
        raise RequestError("template_error", f"the column {name!r} of the template {problem}")
    return str(columns[name])


class JinjaTemplate:
    """A Jinja template whose variables are the columns of a row.

    names: the columns without which it is likely that no prompt can be made: what it nowhere tests to be there
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be read or holds no valid template."""
        from jinja2 import StrictUndefined, TemplateError

        from cbatch.text.chat_template import sandbox

        try:
            text = path.read_text(encoding="utf-8")
            environment = sandbox(undefined=StrictUndefined, finalize=_printed)
            self._template = environment.from_string(text)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error.reason
            raise ConfigError(f"Cannot read the template {path}: {reason}.") from error
        except TemplateError as error:
            line = f", line {number}" if (number := getattr(error, "lineno", None)) else ""
            raise ConfigError(f"The template {path}{line} cannot be read: {error}.") from error
        self.names = _needed(environment, text)

    def render(self, columns: Mapping[str, object]) -> str:
        """The prompt for a row. Raises RequestError (`template_error`) if the template does."""
        try:
            return self._template.render({ROW: columns} | {str(name): value for name, value in columns.items()})
        except Exception as error:  # a template may raise whatever Python does
            raise RequestError("template_error", f"the template refuses the row: {error}") from error


ColumnTemplate = PromptTemplate | JinjaTemplate


def _printed(value: Any) -> Any:
    """The value that Jinja is about to print. It would print a null as the word None."""
    if value is None:
        from jinja2 import TemplateError

        raise TemplateError("it prints a column that is null; test it, or write {{ column or '' }}")
    return value


def _needed(environment: ImmutableSandboxedEnvironment, text: str) -> list[str]:
    from jinja2 import nodes
    from jinja2.meta import find_undeclared_variables

    tree = environment.parse(text)
    tested = {
        node.node.name
        for node in tree.find_all((nodes.Test, nodes.Filter))
        if node.name in _TESTED and isinstance(node.node, nodes.Name)
    }
    return sorted(find_undeclared_variables(tree) - tested - {ROW, *environment.globals})
