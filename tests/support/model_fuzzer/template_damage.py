"""Chat templates that are put together from pieces of Jinja, of which many are too much for any machine."""

from __future__ import annotations

from tests.support.model_fuzzer.documents import Generator, pick

_NUMBERS = ["0", "1", "2", "-1", "3", "10", "1000", "100000", "10**7", "10**9", "10**30", "2**2**2**5", "'x'", "none"]
_VALUES = [
    "messages", "messages[0]", "messages[-1].content", "messages[9].content", "bos_token", "tools", "undefined_name",
    "add_generation_prompt", "'text'", "'\\u001b[31m'", "messages|length", "'%1000000000d' % 1", "'a' * 10**9",
    "[1, 2]", "{'a': messages}", "range(10)", "range(10**8)", "namespace", "dict", "cycler('a')", "joiner(',')",
    "loop", "loop.index", "self", "strftime_now", "raise_exception", "''.__class__", "messages.append", "ns.x",
    "caller",
    "x", "lipsum(n=3)", "lipsum(n=10**6)", "messages[0].__init__.__globals__", "'{:>1000000000}'.format('a')",
    "'a'.ljust(10**9)", "'a'.zfill(10**9)", "'\\ud800'", "1/0", "10**10**8", "strftime_now('%' * 99999)",
    "strftime_now('\\u0000')", "strftime_now('%Y-%m-%d')", "strftime_now(5)",
]  # fmt: skip
_FILTERS = [
    "tojson", "tojson(indent={n})", "tojson(separators=[{n}])", "length", "list", "join", "join('x' * {n})", "trim",
    "upper", "title", "center({n})", "indent({n})", "wordwrap({n})", "batch({n})|list", "slice({n})|list", "round({n})",
    "format({n})", "replace('', 'x' * {n})", "replace('e', 'eeeeeeeeeeeeeeeeeeeee')", "sum", "sort", "unique|list",
    "string", "int", "float", "default({n})", "first", "last", "map('upper')|list", "select|list", "groupby('role')",
    "selectattr('role', 'equalto', 'user')|list", "random", "reverse", "reverse|list", "pprint", "urlize", "xmlattr",
    "filesizeformat", "escape", "safe", "striptags", "wordcount", "truncate({n})", "dictsort", "items|list",
    "attr('x')",
    "no_such_filter", "map(attribute='content')|join", "urlencode", "forceescape", "map('center', {n})|list",
]  # fmt: skip
_TESTS = ["messages|length == 1", "messages|length == 3", "messages[0].role == 'user'", "bos_token", "tools", "true",
          "false", "x is defined", "x is no_such_test", "messages is mapping", "loop.first", "add_generation_prompt",
          "messages[0].content == 'hello'", "ns.x > 3"]  # fmt: skip
_ITEMS = ["messages", "range(3)", "range(10**6)", "range(10**9)", "messages[0]", "'text'", "tools", "5", "none",
          "messages * 1000", "range(10) if x else messages", "messages|batch(1)", "lipsum"]  # fmt: skip
_WHOLE = [
    "{% macro m(x) %}{{ m(x) }}{{ m(x) }}{% endmacro %}{{ m(1) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='ab') %}{% for m in messages %}{% set ns.x = ns.x * 9999 %}{% endfor %}{{ ns.x }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "{% include 'chat_template.jinja' %}",
    "{% extends 'x' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% block a %}{{ self.a() }}{% endblock %}",
    "{% generation %}{% for i in range(10**9) %}{% endfor %}{% endgeneration %}",
    "{% call(x) m() %}{% endcall %}",
    "{% filter center(10**9) %}x{% endfilter %}",
    "{% autoescape true %}{{ messages }}{% endautoescape %}",
    "{% raw %}{{ messages }}{% endraw %}",
    "{% break %}",
    "{% for m in messages %}{% continue %}{% endfor %}{{ m }}",
    "{{ raise_exception('\\u001b[31mred\\u0007' * 999) }}",
    "{{ raise_exception(messages) }}",
    "{{ raise_exception() }}",
    "{{ messages" + "|list" * 3000 + " }}",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{{ " + "[" * 300 + "1" + "]" * 300 + " }}",
    "{{ " + "not " * 5000 + "1 }}",
    "{{ 1" + " + 1" * 20_000 + " }}",
    "{% if x %}" * 3000 + "{% endif %}" * 3000,
    "{% for m in messages %}" * 90 + "x" + "{% endfor %}" * 90,
    "{% set x = 1 %}" * 25_000,
    "x" * 2_000_000,
    "{{ '" + "y" * 900_000 + "' }}",
    "{% for m in messages",
    "{{ messages }",
    "{{ }}",
    "{# never closed",
    "{% endfor %}",
    "{{ 9" + "9" * 6000 + " }}",
    "{% set messages = messages + messages %}" * 40 + "{{ messages|length }}",
    "{% set _ = messages.append(1) %}",
    "{% set loop = 1 %}{{ loop }}",
    "{% macro " + "m" * 70_000 + "() %}{% endmacro %}",
    "\x00{{ messages[0].content }}\x1b[31m",
    "{% if messages|length == 3 %}{% for i in range(10**9) %}{% endfor %}{% endif %}hi",
    "{% if messages|length == 1 %}{{ 'a' * 10**10 }}{% endif %}hi",
    "{% if messages|length == 1 %}{% for a in range(5000) %}{{ 'a' * 9999 }}{% endfor %}{% endif %}hi",
]  # fmt: skip


def random_template(generator: Generator, original: str) -> str:
    match int(generator.integers(4)):
        case 0:
            return str(pick(generator, _WHOLE))
        case 1:
            place = int(generator.integers(len(original)))
            return original[:place] + _piece(generator, 2) + original[place:]
        case 2:
            return original.replace("{% for m in messages %}", "{% for m in messages %}" + _piece(generator, 2))
        case _:
            return "".join(_piece(generator, 3) for _ in range(int(generator.integers(1, 5))))


def _expression(generator: Generator) -> str:
    text = pick(generator, _VALUES)
    for _ in range(int(generator.integers(3))):
        text += "|" + pick(generator, _FILTERS).replace("{n}", pick(generator, _NUMBERS))
    if generator.random() < 0.2:
        operator = pick(generator, ["+", "*", "**", "~", "%", "//", "/", "==", "in", "and"])
        text = f"{text} {operator} {pick(generator, _VALUES + _NUMBERS)}"
    return str(text)


def _piece(generator: Generator, depth: int) -> str:
    inner = _piece(generator, depth - 1) if depth else "."
    match int(generator.integers(8)):
        case 0 | 1:
            return "{{ " + _expression(generator) + " }}"
        case 2:
            return "{% for m in " + str(pick(generator, _ITEMS)) + " %}" + inner + "{% endfor %}"
        case 3:
            return "{% if " + str(pick(generator, _TESTS)) + " %}" + inner + "{% endif %}"
        case 4:
            return "{% set x = " + _expression(generator) + " %}" + inner
        case 5:
            start = "{% set ns = namespace(x=" + str(pick(generator, _VALUES)) + ") %}"
            return start + "{% for m in messages %}{% set ns.x = " + _expression(generator) + " %}{% endfor %}" + inner
        case 6:
            return "{% macro m(x) %}" + inner + "{% endmacro %}{{ m(" + str(pick(generator, _VALUES)) + ") }}"
        case _:
            return str(pick(generator, ["<|im_start|>", "<|im_end|>\n", "text", "\u202e", "\ud83d", "é" * 100])) + inner
