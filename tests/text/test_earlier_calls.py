"""Tool calls of earlier messages come out right, whatever a chat template does with them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from cbatch.base.errors import RequestError
from cbatch.isolate.worker import WorkerDied
from cbatch.text.earlier_calls import CallForm, with_calls
from cbatch.text.loading import of_transformers
from cbatch.text.tokenizer import ChatTokenizer
from tests.support.model_folder import make_tokenizer

ARGUMENTS = {"q": 'say "it\'s"', "ü": {"a": [1, True]}}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)


def call(arguments: Any, name: str | None = "123456789", function: str = "look") -> dict[str, Any]:
    function_of = {"name": function, "arguments": arguments}
    return {"type": "function", "function": function_of} | ({"id": name} if name else {})


def template(inner: str) -> str:
    """Writes each call through `inner`, and every other message as it is."""
    loop = "{% for m in messages %}{{ m.role }}:{% for c in m.tool_calls or [] %}<call>INNER</call>{% endfor %}"
    return loop.replace("INNER", inner) + "{{ m.content }}\n{% endfor %}"


def rendered(source: str, messages: list[dict[str, Any]]) -> str:
    tokenizer = ChatTokenizer(replace(of_transformers(make_tokenizer()), chat_template=source))
    return tokenizer.decode(tokenizer.encode_chat(messages), skip_special_tokens=False)


ITEMS = "{% for key, value in c.function.arguments.items() %}<{{ key }}>{{ value VALUE}}</{{ key }}>{% endfor %}"

TEMPLATES = {
    "as JSON": ("{{ c.function.arguments | tojson }}", JSON),
    "appended": ("{{ '' + c.function.arguments }}", JSON),
    "printed": ("{{ c.function.arguments }}", JSON),
    "each as JSON": (ITEMS.replace("VALUE", "| tojson"), '<q>"say \\"it\'s\\""</q><ü>{"a": [1, true]}</ü>'),
    "each printed": (ITEMS.replace("VALUE", ""), '<q>say "it\'s"</q><ü>{"a": [1, true]}</ü>'),
    "either": ("{% if c.function.arguments is string %}text{% else %}object{% endif %}", "object"),
}
"""For each way to write arguments: the template for a call, and what comes out."""


@pytest.mark.parametrize("way", TEMPLATES)
@pytest.mark.parametrize("arguments", [JSON, ARGUMENTS], ids=["text", "object"])
def test_arguments_are_shown_as_they_are(way: str, arguments: Any) -> None:
    """Guards against Python's quotes, JSON within JSON, and an error, in templates that want another form."""
    source, expected = TEMPLATES[way]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call(arguments)]},
    ]
    assert rendered(template(source), messages).endswith(f"assistant:<call>{expected}</call>\n")


def test_a_special_token_in_arguments_stays_text() -> None:
    """Guards against a control token that is written into JSON as an escape, which only parsing shows."""
    hidden = '{"a": "\\u003c|im_end|>"}'
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call(hidden)]}]
    for inner in ("{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}"):
        tokenizer = ChatTokenizer(replace(of_transformers(make_tokenizer()), chat_template=template(inner)))
        assert tokenizer.backend.token_to_id("<|im_end|>") not in tokenizer.encode_chat(messages)


SINGLE = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('too many') }}"
    "{% endif %}{{ m.content }}<{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}>"
    "{% else %}{{ m.content }};{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("source", [SINGLE, SINGLE.replace("> 1", "> 9")], ids=["refuses", "drops"])
def test_templates_of_one_call_get_one_after_the_other(source: str) -> None:
    """Guards parallel calls, of which such templates would show the first or none."""
    calls = [call("{}", "1"), call("{}", "2", "now"), call("{}", "3", "add")]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "let me see", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": name, "content": f"result {name}"} for name in ("3", "1")),
        {"role": "assistant", "content": "done"},
    ]
    assert rendered(source, messages) == "hi;let me see<look{}>result 1;<now{}><add{}>result 3;done;"


IDS = "{% if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}{{ c.id }}"


def test_ids_of_nine_letters() -> None:
    """Guards Mistral's templates, which refuse the ids of everybody else; the results keep to their calls."""
    source = template(IDS) + "{% for m in messages %}{{ m.tool_call_id }}{{ m.content }};{% endfor %}"
    for name in ("call_1", None):
        messages: list[dict[str, Any]] = [
            {"role": "assistant", "tool_calls": [call("{}", name)]},
            {"role": "tool", "content": "x"} | ({"tool_call_id": name} if name else {}),
        ]
        assert rendered(source, messages) == "assistant:<call>000000000</call>\ntool:x\n;000000000x;"
    assert "<call>abcdefghi</call>" in rendered(
        source, [{"role": "assistant", "tool_calls": [call("{}", "abcdefghi")]}]
    )


def test_a_refusal_is_that_of_the_best_form() -> None:
    """Guards the template's own sentence about a conversation that it takes in no form."""
    source = "{{ raise_exception('no ' ~ messages[-1].role) if messages[-1].role == 'odd' }}" + template(
        "{{ '' + c.function.arguments }}"
    )
    messages = [{"role": "assistant", "tool_calls": [call("{}")]}, {"role": "odd", "content": "x"}]
    with pytest.raises(RequestError, match="no odd") as caught:
        rendered(source, messages)
    assert caught.value.code == "template_error"


def test_the_form_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the speed of rows with tool calls, and a template that takes too long from being tried six times."""
    tokenizer = ChatTokenizer(replace(of_transformers(make_tokenizer()), chat_template=template("{{ c.function }}")))
    renderer, count = tokenizer._renderer, 0
    render = renderer.render

    def counting(*arguments: Any, **others: Any) -> str:
        nonlocal count
        count += 1
        return render(*arguments, **others)

    monkeypatch.setattr(renderer, "render", counting)
    messages = [{"role": "assistant", "tool_calls": [call("{}")]}]
    tokenizer.encode_chat(messages)
    first, count = count, 0
    tokenizer.encode_chat(messages)
    assert first > 1 == count
    tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert count == 2

    def dying(*_: Any, **__: Any) -> str:
        nonlocal count
        count += 1
        raise WorkerDied("it does not end", is_late=True)

    monkeypatch.setattr(renderer, "render", dying)
    count = 0
    with pytest.raises(RequestError, match="does not end"):
        tokenizer.encode_chat(messages)
    assert count == 1


def test_results_find_their_calls() -> None:
    """Guards results that have only a name or an id, or come in another order than their calls."""
    calls = [call("{}", "1"), call("{}", "2", "now"), call("{}", "3"), call("{}", None, "add")]
    given: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": "7", "content": "of nobody"},
        {"role": "tool", "name": "add", "content": "D"},
        {"role": "tool", "name": "look", "content": "A"},
        {"role": "tool", "tool_call_id": "3", "content": "C"},
        {"role": "tool", "content": "B"},
    ]
    shown = with_calls([{"role": "assistant", "tool_calls": calls}, *given])
    found = [(one.get("tool_call_id"), one.get("name"), one["content"]) for one in shown[1:]]
    ids = ("1", "look", "A"), ("2", "now", "B"), ("3", "look", "C"), ("000000003", "add", "D")
    assert found == [*ids, ("7", None, "of nobody")]
    assert [one["id"] for one in shown[0]["tool_calls"]] == ["1", "2", "3", "000000003"]


def test_empty_arguments() -> None:
    """Guards calls without arguments, which some programs write as an empty text or leave out."""
    bare = {"id": "1", "function": {"name": "now"}}
    shown = with_calls([{"role": "assistant", "tool_calls": [call(""), call("{}"), bare]}])
    assert [one["function"]["arguments"] for one in shown[0]["tool_calls"]] == [{}, {}, {}]
    shown = with_calls([{"role": "assistant", "tool_calls": [call(""), bare]}], CallForm("json"))
    assert [one["function"]["arguments"] for one in shown[0]["tool_calls"]] == ["{}", "{}"]


def test_messages_become_what_templates_want() -> None:
    """Guards arguments against being quoted twice, and everything else, and the row itself, against a change."""

    kept = [call("[1]"), call("{"), call({"a": 1}), call(None), {"function": None}, "look"]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": None},
        {"role": "assistant", "content": None, "tool_calls": [call('{"a": 1}'), *kept]},
        {"role": "assistant", "tool_calls": "odd"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": "x", "tool_calls": None},
        {"role": "tool", "tool_call_id": "123456789", "name": "look", "content": "a table"},
    ]
    before = json.dumps(messages)
    changed = with_calls(messages)
    assert json.dumps(messages) == before
    assert changed[1] == {"role": "assistant", "content": "", "tool_calls": [call({"a": 1}), *kept]}
    assert changed[2] == {"role": "assistant", "content": "", "tool_calls": "odd"}
    assert [changed[0], *changed[3:]] == [messages[0], *messages[3:]]
