"""Templates run in a process of their own, with bounds for each conversation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cbatch.base.errors import ModelError
from cbatch.isolate.worker import WorkerFailed
from cbatch.text import template_renderer
from cbatch.text.chat_template import render_chat
from cbatch.text.template_renderer import TemplateRenderer
from tests.support.chat_templates import TEMPLATES
from tests.text.test_chat_template import DAY, MESSAGES, SPECIAL, TOOL, VARIABLES

ONE_MESSAGE = "{% if messages | length == 1 %}"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}"
FILLS = "{% set x = 'a' * 4000000000 %}"
WRITES = "{{ 'a' * 3000000 }}"
ENDS = "{% endif %}{{ messages[0].content }}"


@pytest.fixture(scope="module")
def worker() -> Iterator[TemplateRenderer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_renderer, "LIMITS", template_renderer.LIMITS._replace(cpu_seconds=0.3))
        made = TemplateRenderer()
    yield made
    made.sandbox.close()


def render(worker: TemplateRenderer, template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    given = {"tools": [], "special_tokens": SPECIAL, "today": DAY, "variables": variables}
    return worker.render(template, messages, **given)


@pytest.mark.parametrize(
    ("when", "what", "reason"),
    [
        (ONE_MESSAGE, LOOPS, "it does not end within 0.3 s"),
        ("{% if bos_token %}", FILLS, "it takes too much memory"),
        ("{% generation %}{% if true %}", WRITES, "it writes too much"),
    ],
    ids=["loops", "fills memory", "writes 3 MB"],
)
def test_a_template_that_is_bad_for_real_conversations_harms_only_them(
    worker: TemplateRenderer, what: str, reason: str, when: str
) -> None:
    """Guards the run against a template that passes the trial at load: its row fails, and the next is rendered."""
    template = when + what + ENDS + ("{% endgeneration %}" if "generation" in when else "")
    with pytest.raises(WorkerFailed, match=reason):
        render(worker, template, MESSAGES[:1])
    good = ONE_MESSAGE + what + ENDS
    assert render(worker, good, [{"role": "user", "content": "é\ud800"}, *MESSAGES]) == "é\ud800"


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        ("{{ messages | tojson(indent=width) }}", MESSAGES),
        ("{% for m in messages %}{{ messages | tojson }}{% endfor %}", [{"role": "user", "content": "a" * 100}] * 5000),
    ],
    ids=["a width from a row", "an ordinary template and a large row"],
)
def test_rows_are_bounded_too(worker: TemplateRenderer, template: str, messages: list[dict[str, Any]]) -> None:
    """Guards against native code that gets a width from a row, and work that grows with the square of one."""
    with pytest.raises(WorkerFailed, match=r"writes too much|does not end|too much memory"):  # as fast as it writes
        render(worker, template, messages, width=99_999_999)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_other_process_gives_the_same_text(worker: TemplateRenderer, name: str) -> None:
    """Guards what goes through the pipe: tools, variables, the date and options."""
    given: dict[str, Any] = {"tools": [TOOL], "special_tokens": SPECIAL, "today": DAY, "variables": VARIABLES}
    expected = render_chat(TEMPLATES[name], MESSAGES[:2], **given)
    assert worker.render(TEMPLATES[name], MESSAGES[:2], **given) == expected


def test_an_enormous_template_is_refused_before_it_is_read() -> None:
    """Guards the search for the reply format, which goes through the template in this process."""
    with pytest.raises(ModelError, match="too large"):
        TemplateRenderer().try_out("a" * 50_000_000)


WITH_TOOLS = "{% if tools and messages[2].role == 'tool' and messages[1].tool_calls %}" + LOOPS + "{% endif %}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    ["{{ 'x' * 10 ** 10 }}", WITH_TOOLS, "{%if a%}{%endif%}" * 60_000],
    ids=["memory", "loops with tools", "many tags"],
)
def test_a_template_that_never_ends_is_refused_at_load(worker: TemplateRenderer, template: str) -> None:
    """Guards the engine against a template that hangs, or eats all memory, with every first message."""
    with pytest.raises(ModelError, match=r"chat template cannot be used: it (does not end|takes too much memory)"):
        worker.try_out(template)


def test_other_templates_pass_their_trial(worker: TemplateRenderer) -> None:
    """Guards against refusing a model for what only its rows can decide; a refusal keeps its words."""
    refuses = "{% macro f() %}{% endmacro %}{{ raise_exception('no system messages') }}"
    worker.try_out(refuses)
    worker.try_out("{% unknown %}")
    with pytest.raises(WorkerFailed, match=r"^no system messages$"):
        render(worker, refuses, MESSAGES)
