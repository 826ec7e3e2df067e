"""Options: fields of dataclasses that people set, each said once.

A field of `option(...)` has its type (its annotation), default, range, help and group. The command line, environment
variables, the configuration file, help, the reference in the documentation, `/set` of a chat and the checks of Python's
callers are made of it.
"""

from __future__ import annotations

import dataclasses
import json
import reprlib
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from cbatch.base.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The description of a field beside its type and default.

    help:     a sentence
    more:     what the reference says beyond that
    group:    heading under which help and the reference show it
    names:    how a command line calls it, instead of the field's name with dashes
    choices:  the words that it may be, if its type does not say so
    metavar:  what help shows for its value; by default that of its type
    low, high: the least and the largest number; `above`: `low` itself is too small
    parse:    makes the value of what is typed. Raises ValueError with a sentence
    shown:    default that help shows, if it is not the field's own default; empty for nothing
    is_file:  the value is a path, whose `~` is expanded in the configuration file
    many:     it can be given several times
    """

    help: str
    more: str = ""
    group: str = ""
    names: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    low: float | None = None
    high: float | None = None
    above: bool = False
    parse: Callable[[str], Any] | None = None
    shown: str | None = None
    is_file: bool = False
    many: bool = False


_KEY = "option"

Record = TypeVar("Record")


def option(default: Any = dataclasses.MISSING, help: str = "", *, make: Any = dataclasses.MISSING, **about: Any) -> Any:
    """A field of a dataclass that is an option.  make: a function that makes its default; about: see `Option`"""
    return dataclasses.field(default=default, default_factory=make, metadata={_KEY: Option(help=help, **about)})


@dataclass(frozen=True, slots=True)
class OptionField:
    """An option of a record.

    kinds:   the types of its value, without None; of a list those of its items
    choices: if it is one of a few words
    is_optional: whether it may be None
    """

    name: str
    default: Any
    kinds: tuple[type, ...]
    choices: tuple[str, ...]
    is_optional: bool
    is_list: bool
    about: Option


_READ: dict[Any, dict[str, OptionField]] = {}


def options_of(record: Any) -> dict[str, OptionField]:
    """The options of a record by the names of its fields, in their order."""
    if record in _READ:
        return _READ[record]
    hints = get_type_hints(record)
    found = {}
    for field in dataclasses.fields(record):
        if (about := field.metadata.get(_KEY)) is not None:
            make: Any = field.default_factory
            default = field.default if make is dataclasses.MISSING else make()
            found[field.name] = _option_field(field.name, default, hints[field.name], about)
    return _READ.setdefault(record, found)


def _option_field(name: str, default: Any, hint: Any, about: Option) -> OptionField:
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds: list[type] = []
    choices: list[str] = []
    is_list = about.many
    for part in parts:
        origin = get_origin(part)
        if origin is Literal:
            choices += get_args(part)
        elif origin is tuple:
            is_list = True
            kinds.append(get_args(part)[0])
        elif part is not type(None):
            kinds.append(origin or part)
    return OptionField(
        name, default, tuple(kinds), about.choices or tuple(choices), type(None) in parts, is_list, about
    )


def documented(record: type[Record]) -> type[Record]:
    """Adds what the options of a record say to its docstring."""
    lines = [(record.__doc__ or "").rstrip() + "\n"]
    for name, one in options_of(record).items():
        text = f"{name}: {one.about.help} {one.about.more}".rstrip()
        lines.append(textwrap.fill(text, 116, initial_indent=" " * 4, subsequent_indent=" " * 8))
    record.__doc__ = "\n".join([*lines, ""])
    return record


def differing(record: Any) -> str:
    """The text of a record with the fields that differ from their defaults, for `__repr__`."""
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    defaults = {field.name: field.default for field in dataclasses.fields(record)}
    given = [f"{name}={reprlib.repr(value)}" for name, value in values.items() if value != defaults[name]]
    return f"{type(record).__name__}({', '.join(given)})"


def parse_json(text: str, of: str = "") -> Any:
    """The JSON value of a text. Raises ValueError with a sentence.  of: whose value it is, for that"""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # refuses lone surrogates
    except (ValueError, RecursionError):
        raise ValueError(f"the value{of} is not valid JSON: {text!r}.") from None
    return value


def check_options(record: Any) -> None:
    """Raises ConfigError for values of a record that are of another type, or out of range.

    Options that are read by a function of their own are left to the record, which knows what it means.
    """
    for name, one in options_of(type(record)).items():
        _check(one, getattr(record, name))


def _check(one: OptionField, value: Any) -> None:
    about = one.about
    if (value is None and one.is_optional) or about.parse is not None or one.is_list:
        return
    if one.choices and one.kinds in ((), (str,)):
        if value not in one.choices:
            words = f"{', '.join(one.choices[:-1])} or {one.choices[-1]}"
            raise ConfigError(f"There is no {one.name.replace('_', ' ')} {value!r}; choose {words}.")
    elif one.kinds == (bool,):
        if not isinstance(value, bool):
            raise ConfigError(f"{one.name} must be True or False, not {value!r}.")
    elif one.kinds == (int,):
        if not isinstance(value, int) or isinstance(value, bool) or (about.low is not None and value < about.low):
            least = "" if about.low is None else f" of at least {about.low:g}"
            raise ConfigError(f"{one.name} must be a whole number{least}, not {value!r}.")
    elif one.kinds == (str,) and not isinstance(value, str):
        example = ', such as "4GiB" or "90%"' if about.metavar == "SIZE" else ""
        raise ConfigError(f"{one.name} must be a text{example}, not {value!r}.")
