"""Templates are rendered as transformers renders them, and as its newer versions do under its older ones."""

from __future__ import annotations

from datetime import date
from functools import partial
from itertools import product
from typing import Any

import pytest

from cbatch.base.chat_template_options import TemplateOptions
from cbatch.base.errors import RequestError
from cbatch.text.backend import TextTokenizer, TokenizerBackend
from cbatch.text.chat_template import render_chat
from cbatch.text.loading import of_transformers
from cbatch.text.tokenizer import ChatTokenizer
from tests.support.chat_templates import TEMPLATES
from tests.support.model_folder import TEMPLATE, make_tokenizer

DAY = date(2031, 2, 3)
MESSAGES = [{"role": "user", "content": "hé <b> & 日本"}, {"role": "assistant", "content": "a\n b"}]
TOOL = {"type": "function", "function": {"name": "look", "description": "<é>", "parameters": {"b": 1, "a": [True]}}}
SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}

SAME_IN_ALL_VERSIONS = {
    "white space": "  {% for m in messages %}\n  {{ m.content }}\n  {% endfor %}\n-{%- if true %} x {% endif %}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ 'é<&>' | tojson(ensure_ascii=true) }}",
    "json options": "{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}",
    "objects": "{{ messages[0] }} {{ tools }}",
    "tools": "{{ tools is none }} {{ tools is defined }} {% if tools %}{{ tools | tojson }}{% endif %}",
    "variables": "{{ documents is none }} {{ add_generation_prompt }} {{ bos_token }}{{ eos_token }}{{ pad_token }}",
    "loop controls": "{% for m in messages %}{% if loop.index0 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "generation": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{{ bos_token }}{% endgeneration %}{{ x }}",
    "namespace": "{% set n = namespace(a=1, self=2) %}{% set n.a = n.a + n.self %}{{ n.a }}",
    "dict": "{{ dict(a=1, b=2) }}{{ dict([('x', 1)]) }}{{ dict.fromkeys(['k'], 0) }}",
    "macro": "{% macro say(m) %}{{ m.role }}{{ eos_token }}{% endmacro %}{{ say(messages[0]) }}{{ say(messages[1]) }}",
    "filters": "{{ messages | map(attribute='role') | list }}{{ messages[1].content | trim | upper | length }}",
    "raises": "{{ raise_exception('roles must alternate') }}",
    "changes a list": "{{ messages.append(1) }}",
    "leaves the sandbox": "{{ messages.__class__ }}{{ messages.__class__.__mro__ }}",
    "is no template": "{% if %}",
    "unknown tag": "{% unknown %}",
    "missing key": "{{ messages[0].nothing.at_all }}",
}


def outcome(render: Any) -> str:
    try:
        return f"text: {render()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", SAME_IN_ALL_VERSIONS)
def test_renders_as_transformers_does(name: str, tools: list[dict[str, Any]]) -> None:
    """Guards every setting, filter, tag and variable: the same text, or the same error."""
    template, theirs = SAME_IN_ALL_VERSIONS[name], make_tokenizer()
    expected = outcome(
        lambda: theirs.apply_chat_template(
            MESSAGES, chat_template=template, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
    )
    assert outcome(lambda: render_chat(template, MESSAGES, tools, SPECIAL, DAY)) == expected


OF_JULY = {"date_string": "26 Jul"}
VARIABLES = {"enable_thinking": False, "date_string": "1 May", "nested": {"a": [1, None, "<é>"]}, "effort": "high"}


@pytest.mark.parametrize("name", [*TEMPLATES, "variables"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_variables_reach_the_template_as_in_transformers(name: str, add_generation_prompt: bool) -> None:
    """Guards `enable_thinking` and every other variable, the assistant's opening, and whole templates of families."""
    template = TEMPLATES.get(
        name, "{{ nested | default(0) | tojson }}{{ effort }}{{ add_generation_prompt }}{{ missing is defined }}"
    )
    theirs, messages = make_tokenizer(), [{"role": "user", "content": "hi"}]
    opening = {"add_generation_prompt": add_generation_prompt}
    for variables in (OF_JULY, VARIABLES):
        expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=False, **opening, **variables)
        assert expected == render_chat(template, messages, [], SPECIAL, DAY, variables=variables, **opening)


FINAL_TEXTS = [
    *("Sure, ", "Sure", "", " \n", "a\n\n", "  led by blanks", "hi", "é日本 <b>", "<think>\nI should", "a <think> b"),
    *("<think>\nhm\n</think>\n\nThe", "<think>hm</think>The", "x</think>y", "CONTINUE_FINAL_MESSAGE_TAG x"),
]
MORE = {
    "demo": TEMPLATE,
    "twice": "{% for m in messages %}{{ m.content }}|{{ m.content }}<|im_end|>{% endfor %}",
    "trimmed": "{% for m in messages %}{{ m.content.strip() }} <|im_end|>{% endfor %}",
    "without content": "{{ messages[-1].content[:3] }}",
}


@pytest.mark.parametrize("name", [*TEMPLATES, *MORE])
def test_the_last_message_is_continued_as_in_transformers(name: str) -> None:
    """Guards where the prompt ends, to the character, and which messages cannot be continued."""
    template, theirs = (TEMPLATES | MORE)[name], make_tokenizer()
    asked = {"chat_template": template, "tokenize": False, "continue_final_message": True, "date_string": "26 Jul"}
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    num_continued = 0
    for role, text in product(("assistant", "user"), FINAL_TEXTS):
        messages = [{"role": "user", "content": "hi"}, {"role": role, "content": text}]
        expected = outcome(partial(theirs.apply_chat_template, messages, **asked))
        found = outcome(partial(render_chat, template, messages, [], SPECIAL, DAY, variables=OF_JULY, **options))
        if expected.startswith("text: "):
            assert found == expected
            num_continued += 1
        else:
            assert found.startswith("ValueError: it leaves out or changes the last message"), expected
    assert (num_continued > 10) == (name != "without content")


def render(template: str, *messages: dict[str, Any]) -> str:
    return render_chat(template, messages or MESSAGES, [], SPECIAL, DAY)


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_found_under_each_name(key: str) -> None:
    """Guards against reasoning that is lost under another name, and against the word None in a prompt."""
    message = {"role": "assistant", "content": "x", key: "hm", "tool_calls": None, "name": None}
    assert render("{{ messages[0].thinking }} {{ messages[0].reasoning_content }}", message) == "hm hm"
    assert render("{{ messages[0].content }} {{ 'name' in messages[0] }}", message) == "x False"


@pytest.mark.parametrize(
    "template",
    [
        "{% set n = namespace(_a=1) %}",
        "{% set n = namespace() %}{% set n.__a = 1 %}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__class__.__base__.__subclasses__() }}",
        "{{ dict.mro() }}",
        "{{ strftime_now.__self__.__class__ }}",
        "{{ raise_exception.__globals__ }}",
    ],
)
def test_nothing_leads_out_of_the_sandbox(template: str) -> None:
    """Guards the process against a template that reaches for Python's insides, which are errors or nothing at all."""
    found = outcome(lambda: render(template))
    assert found == "text: " or found.startswith(("SecurityError", "UndefinedError"))


@pytest.mark.parametrize("make", [of_transformers, lambda theirs: plain(theirs)])
def test_a_template_is_told_the_date(make: Any) -> None:
    """Guards templates that write down the date, whoever made the tokenizer, with a date and with the fixed one."""
    theirs = make_tokenizer()
    theirs.chat_template = "{{ strftime_now('%d %b %Y') if strftime_now is defined }}"
    tokenizer = ChatTokenizer(make(theirs))
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.decode(tokenizer.encode_chat(messages)) == "26 Jul 2024"
    assert tokenizer.decode(tokenizer.encode_chat(messages, template=TemplateOptions(today=DAY))) == "03 Feb 2031"


def plain(theirs: Any) -> TextTokenizer:
    return TextTokenizer(
        TokenizerBackend(theirs.backend_tokenizer), theirs.bos_token_id, theirs.chat_template, theirs.special_tokens_map
    )


def test_a_model_with_templates_but_no_default_has_none() -> None:
    """Guards the sentence for a folder whose only template is one for tools."""
    theirs = make_tokenizer()
    theirs.chat_template = {"tool_use": "x"}
    with pytest.raises(RequestError, match="no chat template"):
        ChatTokenizer(plain(theirs)).encode_chat([{"role": "user", "content": "hi"}], tools=[TOOL])
