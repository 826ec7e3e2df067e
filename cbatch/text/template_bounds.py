"""Tells chat templates whose work is bounded by the size of what they render from those that may run forever.

A template is a program of a model's author. The ordinary ones go through messages and tools and write them down. Those
are recognized here, by what they consist of, and can be rendered in this process; all others are rendered in one of
their own (see `template_renderer`).

Recognized templates only use statements, filters and methods whose results are at most a constant times as long as what
goes in. While they run, each value that was made longer is measured, and the turns of loops are counted.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, KeysView, Sequence, Sized, ValuesView
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import Template, nodes
from jinja2.runtime import Context, Undefined
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

from cbatch.text.chat_template import template_environment

MAX_NODES, MAX_DEPTH = 20_000, 60
"""Of a template that is looked at. Real ones have some thousands, 20 deep."""

MAX_FACTOR = 1024
"""How many times as long as its argument what a filter or method makes may get."""

MAX_GROWTH = 2
"""How many times as long as all that is rendered a value may get."""

PART_SIZE = 8
"""Characters that a part of a value counts as, since to look at it takes as long."""

_ESCAPED = 6
"""Times that JSON or HTML may make a character longer: `\\u0000`, `&quot;`."""

_NESTED = 100
"""Levels that rows and tools may have, each of which indents a line of JSON further."""

_LETTERS = 3
"""Letters of a character in another case: ΐ has three in upper case."""


class TooMuchWork(Exception):
    """A template does more than it may in this process. It may still be rendered elsewhere."""


class Bounds:
    """The work that a template may do while it is rendered.

    turns:   how many turns its loops may still take in all
    longest: most characters, numbers and objects of a value that it makes
    """

    def __init__(self, turns: int, longest: int) -> None:
        self.turns, self.longest = turns, longest

    def take(self, items: Any) -> Any:
        """The items of a loop. Raises TooMuchWork if there are more of them than turns."""
        if isinstance(items, Iterator):
            items = list(items)
        if isinstance(items, Sized):
            self.turns -= len(items)
            if self.turns < 0:
                raise TooMuchWork
        return items

    def measured(self, value: Any) -> Any:
        """The value. Raises TooMuchWork if it is too long, or has parts that cannot be measured or may grow later."""
        size, waiting = 0, [value]
        while waiting:
            part = waiting.pop()
            size += PART_SIZE
            match part:
                case str():
                    size += len(part)
                case int():
                    size += part.bit_length() >> 3
                case dict():
                    waiting += part
                    waiting += part.values()
                case list() | tuple() | KeysView() | ValuesView() | ItemsView():
                    waiting += part
                case None | float() | Undefined():
                    pass
                case _:
                    raise TooMuchWork
            if size + PART_SIZE * len(waiting) > self.longest:
                raise TooMuchWork
        return value

    def number(self, value: Any) -> Any:
        """The left side of `%`, which formats a text: `'%9999d' % 1` is not bounded."""
        if not isinstance(value, int | float):
            raise TooMuchWork
        return value


BOUNDS = "bounds of this template"
"""The variable of a `BoundedTemplate` that holds its Bounds. No template can name it."""


class BoundedTemplate(NamedTuple):
    """A template that keeps to its Bounds.

    weight: the most characters that a turn of a loop goes through, as a multiple of those of the longest value
    """

    template: Template
    weight: int


@lru_cache(maxsize=16)
def bounded(source: str) -> BoundedTemplate | None:
    """The template of a source; None if nothing is known to bound it."""
    environment = template_environment()
    environment.filters |= _GUARDS
    guard = _Guard()
    try:
        tree = guard.visit(environment.parse(source).set_environment(environment))
        code = environment.compile(tree)
    except Exception:  # also what the parser raises for what is no template: the other process will say it
        return None
    template = environment.template_class.from_code(environment, code, environment.make_globals(None))
    return BoundedTemplate(template, guard.weight)


def _filter_of(method: Callable[[Bounds, Any], Any]) -> Callable[[Context, Any], Any]:
    return pass_context(lambda context, value: method(context.parent[BOUNDS], value))


_GUARDS = {
    f"{method.__name__} of bounds": _filter_of(method) for method in (Bounds.take, Bounds.measured, Bounds.number)
}
"""Filters that no template can name."""


class _NotBoundedError(Exception):
    """A template has something that is not known to be bounded."""


class _Guard(NodeTransformer):
    """Puts calls of Bounds into a template. Raises _NotBoundedError for what they do not bound.

    weight: see `BoundedTemplate`
    """

    def __init__(self) -> None:
        self.weight = self._count = self._depth = 0

    def visit(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        factor = _factor(node)
        self.weight += factor
        self._count += 1
        self._depth += 1
        if self._count > MAX_NODES or self._depth > MAX_DEPTH or factor > MAX_FACTOR:
            raise _NotBoundedError
        is_constant = all(isinstance(part, nodes.Const) for part in node.iter_child_nodes())
        self.generic_visit(node)
        self._depth -= 1
        match node:
            case nodes.For():
                node.iter = _guarded("take", node.iter)
            case nodes.Mod():
                node.left = _guarded("number", node.left)
            case nodes.Assign() if not isinstance(node.target, nodes.Name):  # a namespace keeps only what is measured
                node.node = _guarded("measured", node.node)
            case nodes.Call(node=nodes.Name(name="namespace")):
                for pair in node.kwargs:
                    pair.value = _guarded("measured", pair.value)
            case nodes.Tuple(ctx="store"):
                pass
            case nodes.Expr() if factor > 1 and not (is_constant and isinstance(node, nodes.Literal)):
                return _guarded("measured", node)
        return node


def _guarded(method: str, node: Any) -> nodes.Filter:
    where = {"lineno": node.lineno, "environment": node.environment}
    return nodes.Filter(node, f"{method} of bounds", [], [], None, None, **where)


def _factor(node: nodes.Node) -> int:
    """How many times as long as the longest part of an expression its value may be; 1 also for anything else.

    Raises _NotBoundedError for what is not known to be bounded.
    """
    match node:
        case nodes.For(recursive=True):
            raise _NotBoundedError
        case nodes.CallBlock(call=nodes.Call(node=nodes.ExtensionAttribute()), args=[], defaults=[]):
            return 1  # the tag of ours that prints what is in it
        case nodes.Name(name=name, ctx="store") if name in _FUNCTIONS:
            raise _NotBoundedError
        case nodes.List() | nodes.Tuple() | nodes.Dict() | nodes.Concat() | nodes.Add():
            return 1 + sum(1 for _ in node.iter_child_nodes())
        case nodes.Test(name=name) if name in _TESTS:
            return 1
        case nodes.Filter(name=name, node=nodes.Expr()) if name in _FILTERS:
            return _factor_of_call(_FILTERS[name], node)
        case nodes.Call(node=nodes.ExtensionAttribute()):
            return 1
        case nodes.Call(node=nodes.Name(name=name)) if name in _FUNCTIONS:
            return _factor_of_call(_FUNCTIONS[name], node)
        case nodes.Call(node=nodes.Getattr(attr=attr)) if attr in _METHODS:
            return _factor_of_call(_METHODS[attr], node)
    if not isinstance(node, _PLAIN):
        raise _NotBoundedError
    return 1


_PLAIN = (
    nodes.Template, nodes.Output, nodes.If, nodes.For, nodes.Assign, nodes.Continue, nodes.Break, nodes.Const,
    nodes.TemplateData, nodes.Name, nodes.NSRef, nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Pair, nodes.Keyword,
    nodes.Sub, nodes.Mod, nodes.FloorDiv, nodes.And, nodes.Or, nodes.CondExpr, nodes.Not, nodes.Neg, nodes.Pos,
    nodes.Compare, nodes.Operand, nodes.ExtensionAttribute,
)  # fmt: skip
"""Nodes that make nothing longer."""

_Factor = int | Callable[[Sequence[nodes.Expr]], int]
"""How many times as long as what goes in the result of a filter or method is, perhaps by its arguments."""


def _factor_of_call(factor: _Factor, node: nodes.Filter | nodes.Call) -> int:
    if node.dyn_args is not None or node.dyn_kwargs is not None:
        raise _NotBoundedError
    return factor if isinstance(factor, int) else factor([*node.args, *(pair.value for pair in node.kwargs)])


def _constants(arguments: Sequence[nodes.Expr]) -> list[Any]:
    parts = [part for one in arguments for part in (one.items if isinstance(one, nodes.Tuple) else [one])]
    values = [part.value for part in parts if isinstance(part, nodes.Const)]
    if len(values) < len(parts) or any(isinstance(value, str) and len(value) > 30 for value in values):
        raise _NotBoundedError
    return values


def _as_json(arguments: Sequence[nodes.Expr]) -> int:
    """Each line of JSON that is indented begins with some spaces for each level."""
    numbers = [value for value in _constants(arguments) if type(value) is int]
    if any(not 0 <= one <= 8 for one in numbers):
        raise _NotBoundedError
    return _ESCAPED + (sum(numbers) * _NESTED) // 2


def _with_text(arguments: Sequence[nodes.Expr]) -> int:
    return 2 + max((len(value) for value in _constants(arguments) if isinstance(value, str)), default=0)


_FUNCTIONS: dict[str, _Factor] = {"raise_exception": 1, "strftime_now": 256, "namespace": 1}

_TESTS = frozenset(
    "defined undefined none string mapping sequence iterable number boolean true false integer float callable odd even "
    "equalto eq ne == != in lower upper sameas lt le gt ge < <= > >= greaterthan lessthan".split()
)

_FILTERS: dict[str, _Factor] = {
    **dict.fromkeys(
        "length count int float abs trim first last default d items list reverse safe selectattr rejectattr unique max "
        "min".split(), 1
    ),
    **dict.fromkeys("upper lower capitalize title".split(), _LETTERS),
    **dict.fromkeys("string escape e".split(), 2 * _ESCAPED),  # Python's form of an object may have ten for one letter
    **dict.fromkeys(("replace", "join"), _with_text),
    "tojson": _as_json,
}  # fmt: skip

_METHODS: dict[str, _Factor] = {
    **dict.fromkeys(
        "startswith endswith find rfind index count isdigit isspace strip lstrip rstrip split rsplit splitlines "
        "partition rpartition removeprefix removesuffix get items keys values".split(), 1
    ),
    **dict.fromkeys("upper lower capitalize title".split(), _LETTERS),
    "replace": _with_text,
}  # fmt: skip
