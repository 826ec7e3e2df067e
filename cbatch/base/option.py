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
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from cbatch.base.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The description of a field.

    help:     a sentence
    more:     what the reference says beyond that
    group:    heading under which help and the reference show it
    names:    how a command line calls it, instead of the field's name with dashes
    choices:  the words that it may be, besides those that its type says
    metavar:  what help shows for its value; by default that of its type
    low, high: the least and the largest number; `above`: `low` itself is too small
    parse:    makes the value of what is typed. Raises ValueError with a sentence
    shown:    default that help shows, if it is not the field's own default; empty for nothing
    is_file:  the value is a path, whose `~` is expanded in the configuration file
    many:     it can be given several times

    Of the field itself, as `options_of` gives them:
    name, default
    kinds:    the types of its value, without None and words; of a list those of its items
    is_optional: whether it may be None
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
    name: str = ""
    default: Any = None
    kinds: tuple[type, ...] = ()
    is_optional: bool = False


_KEY = "option"

Record = TypeVar("Record")


def option(default: Any = dataclasses.MISSING, help: str = "", *, make: Any = dataclasses.MISSING, **about: Any) -> Any:
    """A field of a dataclass that is an option.  make: a function that makes its default; about: see `Option`"""
    return dataclasses.field(default=default, default_factory=make, metadata={_KEY: Option(help=help, **about)})


_READ: dict[Any, dict[str, Option]] = {}


def options_of(record: Any) -> dict[str, Option]:
    """The options of a record by the names of its fields, in their order."""
    if record in _READ:
        return _READ[record]
    hints = get_type_hints(record)
    found = {}
    for field in dataclasses.fields(record):
        if (about := field.metadata.get(_KEY)) is not None:
            make: Any = field.default_factory
            default = field.default if make is dataclasses.MISSING else make()
            found[field.name] = _completed(about, field.name, default, hints[field.name])
    return _READ.setdefault(record, found)


def _completed(about: Option, name: str, default: Any, hint: Any) -> Option:
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    lists = [part for part in parts if get_origin(part) is tuple]
    words = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    others = [part for part in parts if get_origin(part) not in (tuple, Literal) and part is not type(None)]
    return replace(
        about,
        name=name,
        default=default,
        kinds=(*(get_args(part)[0] for part in lists), *(get_origin(part) or part for part in others)),
        choices=about.choices or tuple(words),
        is_optional=type(None) in parts,
        many=about.many or bool(lists),
    )


def documented(record: type[Record]) -> type[Record]:
    """Adds what the options of a record say to its docstring."""
    lines = [(record.__doc__ or "").rstrip() + "\n"]
    for name, one in options_of(record).items():
        text = f"{name}: {one.help} {one.more}".rstrip()
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
    """Raises ConfigError for values of a record that are of another type, or out of range."""
    for name, one in options_of(type(record)).items():
        value = getattr(record, name)
        if not one.many and not (value is None and one.is_optional):
            _check(one, value)


def _check(one: Option, value: Any) -> None:
    if one.choices and one.kinds in ((), (str,)):
        if value not in one.choices:
            words = f"{', '.join(one.choices[:-1])} or {one.choices[-1]}"
            raise ConfigError(f"There is no {one.name.replace('_', ' ')} {value!r}; choose {words}.")
    elif one.kinds == (bool,):
        if not isinstance(value, bool):
            raise ConfigError(f"{one.name} must be True or False, not {value!r}.")
    elif one.kinds == (int,):
        is_whole = isinstance(value, int) and not isinstance(value, bool) and (one.low is None or value >= one.low)
        if not is_whole and value not in one.choices:
            words = f"{', '.join(one.choices)} or " if one.choices else ""
            least = "" if one.low is None else f" of at least {one.low:g}"
            raise ConfigError(f"{one.name} must be {words}a whole number{least}, not {value!r}.")
    elif one.kinds == (str,) and not isinstance(value, str):
        example = ', such as "4GiB" or "90%"' if one.metavar == "SIZE" else ""
        raise ConfigError(f"{one.name} must be a text{example}, not {value!r}.")
