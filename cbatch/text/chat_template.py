"""Renders chat templates, Jinja programs of the models' authors, exactly as transformers 5.23 does.

transformers itself is not used, because importing it takes a second, and because it overrides the functions that it is
given: a template would get no date but the clock's.
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

_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of a message that is to be continued. As in transformers, its space shows whether text is trimmed."""


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    today: date,
    *,
    variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """A conversation in the format that the model was trained on.

    special_tokens:         by their names, such as `bos_token`
    today:                  the date that `strftime_now` formats
    variables:              further variables of the template, none of them one of the above
    add_generation_prompt:  end with the opening of the assistant's turn
    continue_final_message: end directly behind the text of the last message, as transformers does; it must be text

    Raises whatever the template raises, what Jinja raises for an invalid template, and ValueError if the template does
    not write the text that is to be continued.
    """
    prepared = [_prepare(message) for message in messages]
    final = prepared[-1]["content"] if continue_final_message else ""
    if isinstance(final, list):  # beside images of other messages
        final = final[0]["text"]
        prepared[-1]["content"] = [{"type": "text", "text": final + _END_MARK}]
    elif continue_final_message:
        prepared[-1]["content"] = final + _END_MARK
    rendered = _compile(template).render(
        **{**special_tokens, **(variables or {})},
        messages=prepared,
        tools=list(tools) or None,
        documents=None,
        add_generation_prompt=add_generation_prompt,
        strftime_now=today.strftime,
    )
    if not continue_final_message:
        return rendered
    before, mark, after = rendered.rpartition(_END_MARK.rstrip())
    if not mark or final.strip() not in rendered:
        raise ValueError("it leaves out or changes the last message, so continue_final_message cannot be followed")
    return before if after.startswith(" ") else before.rstrip()


def _prepare(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message without keys that are None, which templates would print, and with its reasoning under two names.

    Templates read `reasoning_content`, those of some older models `thinking`.
    """
    kept = {key: value for key, value in message.items() if value is not None}
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((kept[name] for name in names if name in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def template_environment() -> ImmutableSandboxedEnvironment:
    """The environment in which chat templates are parsed and compiled."""
    return sandbox(extensions=[_GenerationTag])


@lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    return template_environment().from_string(template)


def sandbox(*, extensions: Sequence[type[Extension]] = (), **options: Any) -> ImmutableSandboxedEnvironment:
    """The environment in which templates run: they reach nothing but what they are given, and load no files.

    options: further ones of Jinja's `Environment`
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[*extensions, loopcontrols], **options
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, dict=_Dict(), namespace=_Namespace)
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter would escape `<`, `>` and `&` for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training. Here its body is only printed."""

    tags = {"generation"}  # noqa: RUF012  as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A block of its own, because variables that are set in it must not be visible after it.
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
    """`namespace` in templates, without names that begin with an underscore."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}, which begins with an underscore")
        super().__setitem__(name, value)
