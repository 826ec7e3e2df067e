"""Templates whose work is bounded are told from those that may run forever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cbatch.text.chat_template import render_chat
from cbatch.text.template_bounds import BOUNDS, Bounds, TooMuchWork, bounded
from tests.support.chat_templates import TEMPLATES
from tests.text.test_chat_template import DAY, MESSAGES, SPECIAL, TOOL, outcome

LOOP = "{% for m in messages %}"
HOSTILE = {
    "range": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "repeated text": "{{ 'a' * 9999999999 }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "bits": "{% set x = 9 %}" + "{% set x = x * x %}" * 50 + "{{ x }}",
    "width in a format": "{{ '%9999999999d' % 1 }}",
    "width in a format from a row": "{{ width % 1 }}",
    "width set in a loop": LOOP + "{% set x = 1 %}{% endfor %}{{ x % 2 }}",
    "width set in a tag": "{% generation %}{% set x = 1 %}{% endgeneration %}{{ x % 2 }}",
    "doubled": "{% set x = messages[0].content %}" + "{% set x = x + x %}" * 40 + "{{ x }}",
    "doubled by another": "{% set x = messages[0].content %}" + "{% set y = x ~ x %}{% set x = y ~ y %}" * 20,
    "doubled lists": "{% set x = [] %}" + "{% set x = [x, x] %}" * 40 + "{{ x }}",
    "grown in a loop": "{% set ns = namespace(x='a') %}" + LOOP + "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "grown by a variable": "{% set ns = namespace(x='a') %}"
    + LOOP + "{% set y = ns.x %}{% set z = y ~ y %}{% set ns.x = z %}{% endfor %}{{ ns.x }}",
    "grown by another name": "{% set ns = namespace(x='a') %}{% set other = ns %}"
    + LOOP + "{% set other.x = ns.x + ns.x %}{% endfor %}",
    "grown by replacing": "{% set ns = namespace(x='a') %}"
    + LOOP + "{% set ns.x = ns.x.replace('a', 'aaaa') %}{% endfor %}",
    "grown by joining": "{% set ns = namespace(x='aa') %}" + LOOP + "{% set ns.x = ns.x | join('aaaa') %}{% endfor %}",
    "grown lists": "{% set ns = namespace(x=[]) %}" + LOOP + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "grown in a condition": "{% set ns = namespace(x='a') %}"
    + LOOP + "{% set ns.x = (ns.x + ns.x) if m else ns.x %}{% endfor %}",
    "kept in each other": "{% set a = namespace(x=1) %}{% set b = namespace(x=a, y=a) %}{{ b }}",
    "kept, and grown later": "{% set a = namespace(x=1) %}{% set b = [a, a] %}{% set a.x = messages %}{{ b }}",
    "views of dictionaries": "{% set x = {} %}" + "{% set x = {1: x.items(), 2: x.items()} %}" * 30 + "{{ x }}",
    "another function": "{% set raise_exception = lipsum %}{{ raise_exception(n=9999999) }}",
    "generators": "{% set x = messages | selectattr('role') %}{{ [x, x] }}",
    "macro": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "long text to join": "{{ messages[0].content | join('" + "a" * 1000 + "') }}",
    "text to join from a row": "{{ messages[0].content | join(messages[0].content) }}",
    "centered": "{{ 'a' | center(999999999) }}",
    "centered in a map": "{{ messages | map('center', 999999999) | list }}",
    "justified": "{{ messages[0].content.ljust(999999999) }}",
    "indented": "{{ messages | tojson(indent=999999999) }}",
    "indented by a text": "{{ messages | tojson(indent='" + "a" * 1000 + "') }}",
    "formatted": "{{ '{:999999999}'.format(1) }}",
    "any function": "{{ lipsum(n=9999999) }}",
    "any argument": "{{ messages[0].content.split(*messages) }}",
    "arguments of a name": "{{ messages | tojson(**messages[0]) }}",
    "block set": "{% set x %}" + LOOP + "{{ m }}{% endfor %}{% endset %}{{ x }}",
    "many nodes": "{{ a }}" * 20_000,
    "deep": "{{ " + "(" * 100 + "a" + " ~ a)" * 100 + " }}",
    "too deep for the parser": "{{ " + "[" * 100_000,
    "no template": "{% if %}",
}  # fmt: skip


def render(template: str, messages: list[dict[str, Any]], bounds: Bounds, tools: Sequence[dict[str, Any]] = ()) -> str:
    """Renders a template that is bounded."""
    found = bounded(template)
    assert found is not None
    return render_chat(found.template, messages, tools, SPECIAL, DAY, variables={BOUNDS: bounds})


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_may_grow_without_bounds_is_not_trusted(name: str) -> None:
    """Guards every statement, filter and method that a template could use to run forever in the engine's process."""
    if bounded(HOSTILE[name]) is not None:
        with pytest.raises(TooMuchWork):
            render(HOSTILE[name], MESSAGES * 10, Bounds(1000, 2000))


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_ordinary_templates_are_trusted_and_rendered_the_same(name: str, tools: list[dict[str, Any]]) -> None:
    """Guards the speed of ordinary templates, and that counting the turns of their loops changes nothing."""
    template = TEMPLATES[name]
    expected = outcome(lambda: render_chat(template, MESSAGES, tools, SPECIAL, DAY))
    longest = 2 * (len(template) + len(str([MESSAGES, tools])))
    assert outcome(lambda: render(template, MESSAGES, Bounds(1000, longest), tools)) == expected


SIZES = [1, 30, 300]
GROWING = {
    "printed twice": LOOP + "{{ m.content }}{{ m.content }}{% endfor %}",
    "all in each turn": LOOP + "{{ messages | tojson }}{% endfor %}",
    "a loop in a loop": LOOP + "{% for n in messages %}{{ n.content }}{% endfor %}{% endfor %}",
    "letters": LOOP + "{% for c in m.content %}{{ m.content }}{% endfor %}{% endfor %}",
    "lists of splits": LOOP + "{% for c in m.content.split('a') %}{{ messages }}{% endfor %}{% endfor %}",
    "doubled": LOOP + "{% set x = m.content + m.content %}{{ x }}{{ x | upper }}{% endfor %}",
    "a counter": "{% set ns = namespace(n=0) %}" + LOOP + "{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}",
    "kept": "{% set ns = namespace(x='') %}"
    + LOOP
    + "{% set ns.x = m.content + m.content %}{{ ns.x ~ ns.x }}{% endfor %}",
    "indented": LOOP + "{{ messages | tojson(indent=8) }}{% endfor %}",
}


@pytest.mark.parametrize("name", GROWING)
def test_what_a_trusted_template_writes_is_bounded_by_its_weight(name: str) -> None:
    """Guards the promise that a turn makes no more characters than the template's weight times what goes in."""
    template, found = GROWING[name], bounded(GROWING[name])
    assert found is not None
    for size in SIZES:
        messages = [{"role": "user", "content": "a" * size} for _ in range(size // 10 + 1)]
        bounds = Bounds(10**9, 2 * (len(template) + sum(len(one["content"]) + 64 for one in messages)))
        text = render(template, messages, bounds)
        assert len(text) <= found.weight * bounds.longest * (1 + 10**9 - bounds.turns)


def test_turns_of_loops_are_counted() -> None:
    """Guards the count: of loops in loops, of generators, and with nothing counted where nothing is gone through."""
    template = (
        LOOP + "{% for n in messages | selectattr('content') %}{% endfor %}{% endfor %}{% for x in [] %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "a"}] * 3
    assert render(template, messages, Bounds(3 + 9, 1000)) == ""
    with pytest.raises(TooMuchWork):
        render(template, messages, Bounds(3 + 9 - 1, 1000))
