"""Prompts from the columns of a row by a Jinja template, in the sandbox of chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, nodes
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cbatch.base.errors import ConfigError, RequestError
from cbatch.text.chat_template import sandbox

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
