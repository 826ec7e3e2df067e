"""Tells chat templates whose work is bounded by the size of what they render from those that may run forever.

A template is a program of a model's author. The ordinary ones go through messages and tools and write them down. Those
are recognized here, by what they consist of, and can be rendered in this process; all others are rendered in one of
their own (see `template_renderer`).

Recognized templates only use statements, filters and methods whose results are at most a constant times as long as what
goes in. A variable may not grow from one turn of a loop to the next. Turns of loops are counted while a template runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jinja2 import Environment, nodes

MAX_NODES, MAX_DEPTH = 20_000, 60
"""Of a template that is looked at. Real ones have some thousands, 20 deep."""

MAX_FACTOR = 1024
"""How many times as long as all that is rendered a value may get."""

_ESCAPED = 6
"""Times that JSON or HTML may make a character longer: `\\u0000`, `&quot;`."""

_NESTED = 100
"""Levels that rows and tools may have, each of which indents a line of JSON further."""


class Growth(NamedTuple):
    """What is known of the value of an expression.

    factor:   it is at most so many times as long as all that is rendered; 0 for numbers
    is_grown: it is made longer than one that a namespace keeps, so that a loop could make it longer again and again
    is_kept:  it comes from a namespace
    """

    factor: int = 1
    is_grown: bool = False
    is_kept: bool = False

    def times(self, factor: int) -> Growth:
        return Growth(self.factor * factor, self.is_grown or (self.is_kept and factor > 1), self.is_kept)


NUMBER = Growth(0)


class _NotBoundedError(Exception):
    """A template has something that is not known to be bounded."""


def weight_of(template: str, environment: Environment) -> int | None:
    """The most characters that a turn of a loop makes, as a multiple of the size of what is rendered.

    None if nothing is known to bound the template. It is only parsed.
    """
    try:
        tree = environment.parse(template)
        count = _count(tree)
        analysis = _Analysis(kept=1)
        analysis.statements(tree.body)
        analysis = _Analysis(kept=analysis.most_kept)  # with what namespaces have been found to keep
        analysis.statements(tree.body)
    except Exception:  # also what the parser raises for what is no template: the other process will say it
        return None
    return count * analysis.largest


def _count(tree: nodes.Node) -> int:
    """Number of its nodes. Raises _NotBoundedError if they are too many or too deep."""
    count, waiting = 0, [(tree, 0)]
    while waiting:
        node, depth = waiting.pop()
        count += 1
        if count > MAX_NODES or depth > MAX_DEPTH:
            raise _NotBoundedError
        waiting.extend((child, depth + 1) for child in node.iter_child_nodes())
    return count


def _longest(values: Sequence[Growth]) -> Growth:
    """Any one of the values."""
    return Growth(
        max((one.factor for one in values), default=0),
        any(one.is_grown for one in values),
        any(one.is_kept for one in values),
    )


def _joined(values: Sequence[Growth]) -> Growth:
    """All of the values, one after the other. Even without any, it can be joined to itself."""
    return Growth(max(1, sum(one.factor for one in values)), any(one.is_grown or one.is_kept for one in values))


class _Analysis:
    """Goes through a template in its order, and keeps what is known of its variables.

    kept:      factor of the longest value that a namespace is taken to keep
    most_kept: the same, as found
    largest:   factor of the longest value
    """

    def __init__(self, kept: int) -> None:
        self.kept, self.most_kept, self.largest = kept, 1, 1
        self._variables: dict[str, Growth] = {}
        self._namespaces: set[str] = set()
        self._items: list[Growth] = []
        """What the loops around go through, the innermost last."""

    def statements(self, body: Sequence[nodes.Node]) -> None:
        for node in body:
            self._statement(node)

    def _statement(self, node: nodes.Node) -> None:
        match node:
            case nodes.Output():
                for part in node.nodes:
                    self.value(part)
            case nodes.If():
                self.value(node.test)
                self._branches([node.body, *([one] for one in node.elif_), node.else_])
            case nodes.For(recursive=False):
                self._loop(node)
            case nodes.Assign():
                self._assign(node.target, node.node)
            case nodes.CallBlock(call=nodes.Call(node=nodes.ExtensionAttribute()), args=[], defaults=[]):
                self._scope(node.body)  # the tag of ours that prints what is in it
            case nodes.Continue() | nodes.Break():
                pass
            case _:
                raise _NotBoundedError

    def _branches(self, bodies: Sequence[Sequence[nodes.Node]]) -> None:
        """One of them runs: of what they set, the longest counts."""
        before = self._variables
        ends = []
        for body in bodies:
            self._variables = dict(before)
            self.statements(body)
            ends.append(self._variables)
        names = {name for end in ends for name in end}
        self._variables = {name: _longest([end.get(name, Growth()) for end in ends]) for name in names}

    def _scope(self, body: Sequence[nodes.Node]) -> None:
        """What is set in it is not seen after it."""
        before = dict(self._variables)
        self.statements(body)
        self._variables = before

    def _loop(self, node: nodes.For) -> None:
        item = self.value(node.iter)
        before = dict(self._variables)
        for target in [node.target] if isinstance(node.target, nodes.Name) else node.target.iter_child_nodes():
            self._variables[_name_of(target)] = item
        self._items.append(item)
        if node.test is not None:
            self.value(node.test)
        self.statements(node.body)
        self._items.pop()
        self._variables = before
        self._scope(node.else_)

    def _assign(self, target: nodes.Node, source: nodes.Node) -> None:
        if isinstance(target, nodes.NSRef):
            self._keep(self.value(source))
        elif _is_namespace(source):
            for pair in source.iter_child_nodes():
                if isinstance(pair, nodes.Keyword):
                    self._keep(self.value(pair.value))
            self._namespaces.add(_name_of(target))
        else:
            self._variables[_name_of(target)] = self.value(source)
            self._namespaces.discard(_name_of(target))

    def _keep(self, value: Growth) -> None:
        """A namespace gets a value, which it still has in the next turn of a loop."""
        if value.is_grown:
            raise _NotBoundedError
        self.most_kept = max(self.most_kept, value.factor)

    def value(self, node: nodes.Node) -> Growth:
        """What is known of an expression. Raises _NotBoundedError if that is nothing."""
        found = self._value(node)
        if found.factor > MAX_FACTOR:
            raise _NotBoundedError
        self.largest = max(self.largest, found.factor)
        return found

    def _value(self, node: nodes.Node) -> Growth:
        match node:
            case nodes.Const(value=str()) | nodes.TemplateData():
                return Growth()
            case nodes.Const():
                return NUMBER
            case nodes.Name():
                return self._name(node.name)
            case nodes.Getattr(node=nodes.Name(name="loop"), attr="previtem" | "nextitem") if self._items:
                return self._items[-1]
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=attr) if self._items and attr in _LOOP:
                return NUMBER
            case nodes.Getattr(node=nodes.Name(name="loop")) if self._items:
                raise _NotBoundedError
            case nodes.Getattr() | nodes.Getitem(arg=nodes.Const()):
                return self.value(node.node)
            case nodes.Getitem(arg=nodes.Slice()):
                for bound in node.arg.iter_child_nodes():
                    self.value(bound)
                return self.value(node.node)
            case nodes.Getitem():
                self.value(node.arg)
                return self.value(node.node)
            case nodes.List() | nodes.Tuple() | nodes.Dict() | nodes.Pair() | nodes.Concat():
                return _joined([self.value(part) for part in node.iter_child_nodes()])
            case nodes.Add() | nodes.Sub() | nodes.Mod() | nodes.FloorDiv():
                return self._arithmetic(node)
            case nodes.And() | nodes.Or():
                return _longest([self.value(node.left), self.value(node.right)])
            case nodes.CondExpr():
                self.value(node.test)
                return _longest([self.value(one) for one in (node.expr1, node.expr2) if one is not None])
            case nodes.Not() | nodes.Neg() | nodes.Pos() | nodes.Compare() | nodes.Operand():
                for part in node.iter_child_nodes():
                    self.value(part)
                return NUMBER
            case nodes.Test(name=name) if name in _TESTS:
                for part in node.iter_child_nodes():
                    self.value(part)
                return NUMBER
            case nodes.Filter(name=name) if name in _FILTERS and node.node is not None:
                return self._apply(_FILTERS[name], self.value(node.node), node)
            case nodes.Call():
                return self._call(node)
        raise _NotBoundedError

    def _name(self, name: str) -> Growth:
        if name in self._namespaces:
            return Growth(self.kept, is_kept=True)
        return self._variables.get(name, Growth())

    def _arithmetic(self, node: nodes.BinExpr) -> Growth:
        """Only sums may be of texts: `'%9999d' % 1` and `'a' * 9999` are not bounded."""
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(node, nodes.Add):
            return NUMBER if NUMBER in (left, right) else _joined([left, right])
        if left != NUMBER:
            raise _NotBoundedError
        return NUMBER

    def _call(self, node: nodes.Call) -> Growth:
        match node.node:
            case nodes.Name(name="raise_exception" | "strftime_now"):
                return self._apply(2 * _ESCAPED, Growth(), node)
            case nodes.Getattr(attr=attr) if attr in _METHODS:
                return self._apply(_METHODS[attr], self.value(node.node.node), node)
        raise _NotBoundedError

    def _apply(self, factor_of: _Factor, given: Growth, node: nodes.Filter | nodes.Call) -> Growth:
        """A filter or method, and what its arguments add: they may be what comes out."""
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise _NotBoundedError
        arguments = [*node.args, *(pair.value for pair in node.kwargs)]
        given = _longest([given, *(self.value(one) for one in arguments)])
        factor = factor_of if isinstance(factor_of, int) else factor_of(arguments)
        return given.times(factor) if factor else NUMBER


_Factor = int | Callable[[Sequence[nodes.Expr]], int]
"""How many times as long as what goes in the result of a filter or method is, perhaps by its arguments; 0: a number."""

_LETTERS = 3
"""What a character may have in another case: ΐ has three letters in upper case."""


def _as_json(arguments: Sequence[nodes.Expr]) -> int:
    """Each line of JSON that is indented begins with some spaces for each level."""
    parts = [part for one in arguments for part in (one.items if isinstance(one, nodes.Tuple) else [one])]
    values = [part.value for part in parts if isinstance(part, nodes.Const)]
    numbers = [value for value in values if type(value) is int]
    if len(values) < len(parts) or any(not 0 <= one <= 8 for one in numbers) or any(map(_is_long, values)):
        raise _NotBoundedError
    return _ESCAPED + (sum(numbers) * _NESTED) // 2


def _with_text(arguments: Sequence[nodes.Expr]) -> int:
    """Replaces or joins by a text that is written in the template."""
    values = [one.value for one in arguments if isinstance(one, nodes.Const)]
    if len(values) < len(arguments) or any(map(_is_long, values)):
        raise _NotBoundedError
    return 2 + max((len(value) for value in values if isinstance(value, str)), default=0)


def _is_long(value: object) -> bool:
    return isinstance(value, str) and len(value) > 30


def _name_of(target: nodes.Node) -> str:
    """Raises _NotBoundedError for what is no name, and for names whose meaning is relied on."""
    if not isinstance(target, nodes.Name) or target.name in ("loop", "namespace", "raise_exception", "strftime_now"):
        raise _NotBoundedError
    return target.name


def _is_namespace(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == "namespace" and (
        not node.args and node.dyn_args is None and node.dyn_kwargs is None
    )  # fmt: skip


_LOOP = frozenset(("index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"))

_TESTS = frozenset(
    "defined undefined none string mapping sequence iterable number boolean true false integer float callable odd even "
    "equalto eq ne == != in lower upper sameas lt le gt ge < <= > >= greaterthan lessthan".split()
)

_FILTERS: dict[str, _Factor] = {
    **dict.fromkeys("length count int float abs".split(), 0),
    **dict.fromkeys(
        "trim first last default d items list reverse safe selectattr rejectattr unique max min".split(), 1
    ),
    **dict.fromkeys("upper lower capitalize title".split(), _LETTERS),
    **dict.fromkeys("string escape e".split(), 2 * _ESCAPED),  # Python's form of an object may have ten for one letter
    **dict.fromkeys(("replace", "join"), _with_text),
    "tojson": _as_json,
}

_METHODS: dict[str, _Factor] = {
    **dict.fromkeys("startswith endswith find rfind index count isdigit isspace".split(), 0),
    **dict.fromkeys("strip lstrip rstrip split rsplit splitlines partition rpartition removeprefix".split(), 1),
    **dict.fromkeys("removesuffix get items keys values".split(), 1),
    **dict.fromkeys("upper lower capitalize title".split(), _LETTERS),
    "replace": _with_text,
}
