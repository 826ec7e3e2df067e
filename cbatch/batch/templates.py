"""Prompts from the columns of a row, by a text with {column} in it or a Jinja template; and rows from Python as lines.

Lines of JSON, so that they are read, keyed and resumed exactly like the rows of a file.
"""

from __future__ import annotations

import base64
import json
import math
import os.path
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import date, time
from itertools import dropwhile
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

from cbatch.base.errors import ConfigError, RequestError, invalid_row, reason_of
from cbatch.batch.lines import Line, place_of
from cbatch.media.pictures import as_given, is_base64
from cbatch.requests.prompts import plain, row_fields

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

ROW = "row"
"""Holds all columns in a Jinja template, for those whose names Jinja cannot say."""

_TESTED = {"default", "d", "defined", "undefined"}
"""Filters and tests that take a column which may be missing."""


def read_template(given: str, *, may_be_constant: bool = False) -> ColumnTemplate:
    """The template that a command line names: a text, or `@FILE`; `@@` begins a text with `@`. Raises ConfigError."""
    is_jinja = given.endswith(JinjaTemplate.ENDINGS)
    if given.startswith("@") and not given.startswith("@@"):
        path = Path(given[1:]).expanduser()
        template = JinjaTemplate(path) if is_jinja else PromptTemplate(_file_text(path))
    elif is_jinja or os.path.isfile(given):  # noqa: PTH113 (Path.is_file raises for a long text)
        raise ConfigError(f"The template is the name of a file; @ in front of it reads that: --template @{given}")
    else:
        template = PromptTemplate(given.removeprefix("@"))
    if template.constant_behind is None and not may_be_constant:
        problem = "The template uses no column, so all rows would get the same prompt; --constant-template allows that."
        raise ConfigError(f"{problem} Columns stand in single braces, such as {{text}}; in a .jinja file in two.")
    return template


def _file_text(path: Path) -> str:
    """A text without the newline at its end. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read the template {path}: {reason_of(error)}.") from error


class PromptTemplate:
    """A text with names of columns in braces, {image:photo} for that of an image; {{ and }} stand for braces.

    Only plain names: a template reaches no attribute, item or method of a value. Raises ConfigError for anything else.

    names: the columns without which no prompt can be made; `images` are those of them that hold images
    constant_behind: characters of its own text behind the first column; None if it uses none
    """

    def __init__(self, text: str) -> None:
        try:
            parts = list(Formatter().parse(text))
        except ValueError as error:
            raise ConfigError(f"The template cannot be read: {error}. Write {{{{ and }}}} for braces.") from error
        for _, name, form, conversion in parts:
            column = (form if form and name == "image" else name) or ""
            if name is not None and (not name or (form and column != form) or conversion or set(column) & set(".[]{}")):
                shown = f"{{{name}{'!' + conversion if conversion else ''}{':' + form if form else ''}}}"
                raise ConfigError(
                    "The template may have only plain names of columns in braces, such as {question}; "
                    f"{shown} is not one. Write {{{{ and }}}} for braces."
                )
        self._parts = [(literal, form or name, bool(form)) for literal, name, form, _ in parts]
        self.names = list(dict.fromkeys(name for _, name, _ in self._parts if name is not None))
        self.images = {name for _, name, is_image in self._parts if name is not None and is_image}
        behind = list(dropwhile(lambda part: part[1] is None, self._parts))[1:]
        self.constant_behind = sum(len(literal) for literal, _, _ in behind) if self.names else None

    def fields(self, shown: Mapping[str, object], columns: Mapping[str, object]) -> dict[str, Any]:
        """The prompt of a row, or its message if there are images, of its columns as text and in the types of JSON.

        Raises RequestError (`template_error`) if a column is missing or null.
        """
        content = [{"type": "text", "text": ""}]
        for literal, name, is_image in self._parts:
            content[-1]["text"] += literal + ("" if name is None or is_image else str(_value(shown, name)))
            if name is not None and is_image:
                content += [{"type": "image", "image": _value(columns, name)}, {"type": "text", "text": ""}]
        if not self.images:
            return {"prompt": content[0]["text"]}
        return {"messages": [{"role": "user", "content": [part for part in content if part.get("text") != ""]}]}


def _value(columns: Mapping[str, object], name: str) -> Any:
    if columns.get(name) is None:
        problem = "is null" if name in columns else f"is missing; the row has {', '.join(map(str, columns)) or 'none'}"
        raise RequestError("template_error", f"the column {name!r} of the template {problem}")
    return columns[name]


class JinjaTemplate:
    """A Jinja template whose variables are the columns of a row. Names of files with one have one of the ENDINGS.

    names: the columns without which it is likely that no prompt can be made: what it nowhere tests to be there
    constant_behind: characters of its own text behind the first column, without what stands in loops and conditions;
                     None if it uses nothing of a row
    """

    ENDINGS = (".jinja", ".jinja2", ".j2")

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be read or holds no valid template."""
        from jinja2 import StrictUndefined, TemplateError

        from cbatch.text.chat_template import sandbox

        text = _file_text(path)
        environment = sandbox(undefined=StrictUndefined, finalize=_printed, keep_trailing_newline=True)
        try:
            self._template = environment.from_string(text)
        except TemplateError as error:
            line = f", line {number}" if (number := getattr(error, "lineno", None)) else ""
            raise ConfigError(f"The template {path}{line} cannot be read: {error}.") from error
        self.names, self.constant_behind = _describe(environment, text)

    def render(self, columns: Mapping[str, object]) -> str:
        """The prompt for a row. Raises RequestError (`template_error`) if the template does."""
        try:
            return self._template.render({ROW: columns} | {str(name): value for name, value in columns.items()})
        except Exception as error:  # a template may raise whatever Python does
            raise RequestError("template_error", f"the template refuses the row: {error}") from error


ColumnTemplate = PromptTemplate | JinjaTemplate


def carried(columns: dict[str, Any], template: object) -> dict[str, Any]:
    """The columns of a row, as results repeat them: without the bytes of images."""
    names = {"images", *(template.images if isinstance(template, PromptTemplate) else ())}
    return columns | {name: _without_bytes(columns[name]) for name in names & columns.keys()}


def _without_bytes(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_without_bytes, value)]
    if isinstance(value, dict) and "bytes" in value:
        return {**value, "bytes": None}
    return None if is_base64(value) else value


def _printed(value: Any) -> Any:
    if value is None:
        from jinja2 import TemplateError

        raise TemplateError("it prints a column that is null; test it, or write {{ column or '' }}")
    return value


def _describe(environment: ImmutableSandboxedEnvironment, text: str) -> tuple[list[str], int | None]:
    """`names` and `constant_behind` of a template."""
    from jinja2 import nodes
    from jinja2.meta import find_undeclared_variables

    tree = environment.parse(text)
    tested = {
        node.node.name
        for node in tree.find_all((nodes.Test, nodes.Filter))
        if node.name in _TESTED and isinstance(node.node, nodes.Name)
    }
    used = find_undeclared_variables(tree) - environment.globals.keys()
    parts = [part for node in tree.body for part in (node.nodes if isinstance(node, nodes.Output) else [node])]
    while parts and all(name.ctx != "load" for name in nodes.Template([parts[0]]).find_all(nodes.Name)):
        del parts[0]
    behind = sum(len(part.data) for part in parts if isinstance(part, nodes.TemplateData))
    return sorted(used - tested - {ROW}), behind if used else None


RowTemplate = ColumnTemplate | Callable[[Any], object]
"""Makes the prompt of a row: a text with names of columns, or a function of the row."""


def lines_of(rows: Iterable[object], template: RowTemplate | None = None, unit: str = "line") -> Iterator[Line]:
    """The line of a JSONL file for each row. Never raises for a row: whatever is wrong with it is the line's `error`.

    Without a template, a row is a text, token ids, a list of messages, or a dictionary as in a file. With one, it is
    whatever the template takes, and its columns may have any names: the line is `{"columns": ..., "row": ...}`, with
    the columns as data, and the row that the template has made.
    """
    return (_line_of(index, row, template, unit) for index, row in enumerate(rows))


def _line_of(index: int, row: object, template: RowTemplate | None, unit: str) -> Line:
    if template is None:
        try:
            return Line.of(index, json.dumps(row_fields(row)).encode())
        except Exception as error:
            return _failed(index, unit, error, _identity(row))
    columns = _identity(row)
    try:
        columns = as_data(row) if isinstance(row, Mapping) else {}
        made = _templated(row, columns, template)
        return Line.of(index, json.dumps({"columns": carried(columns, template), "row": made}).encode())
    except Exception as error:
        return _failed(index, unit, error, {"columns": columns, "row": {}}, {"columns": {}, "row": {}})


def _templated(row: object, columns: Mapping[str, Any], template: RowTemplate) -> dict[str, Any]:
    """The fields of the row that a template makes. Raises RequestError.

    columns: those of `row` as data
    """
    if isinstance(template, ColumnTemplate):
        shown = row_fields(row) if not isinstance(row, Mapping) else {str(name): value for name, value in row.items()}
        shown |= {name: None for name, value in columns.items() if value is None}  # such as NaN, which is no text
        if isinstance(template, JinjaTemplate):
            return {"prompt": plain(template.render(shown))}
        return {name: plain(value) for name, value in template.fields(shown, columns or shown).items()}
    try:
        made = template(row)
    except Exception as error:
        raise RequestError("template_error", f"the template raised {error!r}") from error
    return row_fields(made)


def as_data(value: Any) -> Any:
    """A value in the types of JSON: what is missing, infinite or not a number as null, other things as text.

    Many writers store text without saying that it is text, so bytes are text if they are UTF-8, and else base64.
    """
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            return value.decode()
        return base64.b64encode(value).decode()
    if hasattr(value, "getexif"):
        return as_given(value)
    if isinstance(value, Mapping):
        return {str(plain(name)): as_data(item) for name, item in value.items()}
    if isinstance(value, date | time):
        return None if _is_missing(value) else value.isoformat()
    if getattr(getattr(value, "dtype", None), "kind", "") in ("m", "M"):  # numpy's `item` may be bare nanoseconds
        if _is_missing(value):
            return None
        return str(value) if getattr(value, "ndim", 0) == 0 else [as_data(item) for item in value]
    value = plain(value)
    if isinstance(value, list | tuple):
        return [as_data(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(as_data, value), key=repr)
    if value is None or isinstance(value, str | bool | int):
        return value
    if _is_missing(value):
        return None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return plain(re.sub(" at 0x[0-9a-f]+", "", str(value)))  # an address would give each run another key


def _is_missing(value: Any) -> bool:
    """Whether it is NaN, NaT, or the NA of pandas, whose comparisons have no truth value."""
    try:
        return bool(value != value)
    except TypeError:
        return True
    except ValueError:  # several values
        return False


def _identity(row: object) -> dict[str, Any]:
    identity = plain(row.get("id")) if isinstance(row, Mapping) else None
    return {"id": identity} if isinstance(identity, str | int | float) else {}


def _failed(index: int, unit: str, error: Exception, *known: dict[str, Any]) -> Line:
    """The line of a row that cannot be read, with the first of `known` that JSON can hold."""
    if not isinstance(error, RequestError):
        error = invalid_row(f"the row cannot be written as JSON: {error}")
    reason = RequestError(error.code, f"{place_of(index, unit)}: {error}")
    for fields in known:
        with suppress(ValueError):  # a number may have too many digits
            return Line(index, json.dumps(fields).encode(), error=reason)
    return Line(index, b"{}", error=reason)
