"""Renders chat templates, which are Jinja programs of models' authors, as transformers 5.23 does, without it.

Without it, because importing it takes a second, and because it replaces functions that it is given by their names:
a template would get no date but the clock's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""What a message's reasoning may be called. Templates read the first; some of older models, the second."""


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    today: date,
) -> str:
    """A conversation as the text that a model was trained on, up to where the assistant's turn begins.

    tools:          functions that the model may ask for; a template is told of none where there are none
    special_tokens: by their names, such as `bos_token`
    today:          the date that `strftime_now` writes down

    Raises whatever the template raises, and what Jinja does where it is none.
    """
    return _compile(template).render(
        **special_tokens,
        messages=[_prepare(message) for message in messages],
        tools=list(tools) or None,
        documents=None,
        add_generation_prompt=True,
        strftime_now=today.strftime,
    )


def _prepare(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without keys that hold nothing, which templates would print as None, and with reasoning under both names."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[key] for key in REASONING_KEYS if key in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


@lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, dict=_Dict(), namespace=_Namespace)
    return environment.from_string(template)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter would write `<`, `>` and `&` as escapes, for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant said, for training; here its body is only printed."""

    tags = {"generation"}  # noqa: RUF012  that is how Jinja has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A block of its own, not the bare body: what is set within it must not be seen behind it.
        return nodes.CallBlock(self.call_method("_print"), [], [], body).set_lineno(line)

    def _print(self, caller: Macro) -> str:
        return caller()


class _Dict:
    """`dict` in templates. The type itself would be a way out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` in templates, without names that Python keeps for itself."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}, which begins with an underscore")
