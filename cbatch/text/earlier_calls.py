"""Tool calls in earlier messages, in the form that a chat template can write down."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from cbatch.base.errors import RequestError
from cbatch.base.strict_json import whole_json
from cbatch.isolate.worker import WorkerDied

Message = dict[str, Any]


class CallForm(NamedTuple):
    """How earlier calls are given to a template.

    arguments: `object`, for templates that go through them or write them as JSON; `json`, their text, for templates
               that append it; `texts`, an object whose values are text, for templates that write each value as it is
    is_single: whether each call gets a message of its own, with its result behind it, for templates that show one call
    new_ids:   whether calls get ids of nine digits, which Mistral's templates insist on
    """

    arguments: Literal["object", "json", "texts"]
    is_single: bool = False
    new_ids: bool = False


OBJECT = CallForm("object")
_KINDS = (OBJECT, CallForm("json"), CallForm("texts"))
_FORMS = (*_KINDS, *(kind._replace(is_single=True) for kind in _KINDS))
"""In the order in which they are tried."""

_ARGUMENTS = ({"argumentA": "valueA", "argumentB": {"argumentC": "valueC"}}, {"argumentA": "valueD"})
PROBE: list[Message] = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": one}} for one in _ARGUMENTS]},
    *({"role": "tool", "content": "a table"} for _ in _ARGUMENTS),
]
_SHOWN, _SHOWN_WRONGLY = ("valueA", "argumentC", "valueC", "valueD"), ("'argument", '\\"argument')
_SCHEMA = {"type": "object", "properties": {"argumentA": {"type": "string", "description": "which"}}}
_LOOK = {"name": "look", "description": "looks", "parameters": _SCHEMA}
PROBE_TOOL = {"type": "function", "function": _LOOK}


def call_forms(render: Callable[[list[Message]], str]) -> list[CallForm]:
    """The forms to try for a template, best first: the first in which a small conversation comes out right.

    render: renders messages with PROBE_TOOL. It may raise RequestError, which this passes on unless `is_refusal`

    Right is what shows all arguments, neither as Python writes them nor as a text of JSON within JSON.
    """
    best = next((form for form in _FORMS if _comes_out_right(render, form)), OBJECT)
    return [best, *(form for form in _FORMS if form != best), best._replace(new_ids=True)]


def _comes_out_right(render: Callable[[list[Message]], str], form: CallForm) -> bool:
    try:
        text = render(with_calls(PROBE, form))
    except RequestError as error:
        if not is_refusal(error):
            raise
        return False
    return all(part in text for part in _SHOWN) and not any(part in text for part in _SHOWN_WRONGLY)


def is_refusal(error: RequestError) -> bool:
    """Whether a template has refused messages, and may take another form of them. One that took too long may not."""
    return error.code == "template_error" and not isinstance(error.__cause__, WorkerDied)


def with_calls(messages: Sequence[Mapping[str, Any]], form: CallForm = OBJECT) -> list[Message]:
    """Copies of messages in the form that chat templates expect.

    A missing content beside tool calls becomes empty text. Calls without ids get some. Results of tools get the id and
    the name of the call that they belong to, by either, and come in the order of the calls.
    """
    copies, count = list[Message](), 0
    calls: list[tuple[Any, Any]] = []  # of the last message that has any: as they were given, and as they are now
    parts: list[Message] = []  # that message, or the messages that it has become, if nothing is behind it
    for is_result, group in groupby(map(dict, messages), lambda message: message.get("role") == "tool"):
        if is_result:
            del copies[len(copies) - len(parts) :]
            placed = [*enumerate(parts), *_linked(group, calls)]
            copies += [message for _, message in sorted(placed, key=itemgetter(0))]
            parts = []
            continue
        for message in group:
            parts, given = [], message.get("tool_calls")
            if given and message.get("role") == "assistant":
                message["content"] = "" if message.get("content") is None else message["content"]
                if isinstance(given, list):
                    made = message["tool_calls"] = [_call(call, form, count + at) for at, call in enumerate(given)]
                    calls, count = list(zip(given, made, strict=True)), count + len(made)
                    parts = [message]
                    if form.is_single:
                        more = ({"role": "assistant", "content": "", "tool_calls": [call]} for call in made[1:])
                        parts = [{**message, "tool_calls": made[:1]}, *more]
            copies += parts or [message]
    return copies


def _call(call: Any, form: CallForm, number: int) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    name = f"{number:09}" if form.new_ids or call.get("id") is None else call["id"]
    return {**call, "id": name, "function": {**function, "arguments": _arguments(function.get("arguments", {}), form)}}


def _arguments(given: Any, form: CallForm) -> Any:
    text = (given.strip() or "{}") if isinstance(given, str) else ""
    parsed = whole_json(text) if text else (given,)
    if not parsed or not isinstance(parsed[0], dict):
        return given
    if form.arguments == "json":
        return text or _json(given)
    if form.arguments == "texts":
        return {name: value if isinstance(value, str) else _json(value) for name, value in parsed[0].items()}
    return parsed[0]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _linked(results: Iterable[Message], calls: Sequence[tuple[Any, Any]]) -> list[tuple[int, Message]]:
    """Results, each with the place of its call among all calls; those of no call get the last place.

    calls: each as it was given, and as it is given to the template
    """
    waiting = [(place, *pair) for place, pair in enumerate(calls) if isinstance(pair[1], dict) and "id" in pair[1]]
    linked = list[tuple[int, Message]]()
    for result in results:
        name, function = result.get("tool_call_id"), result.get("name")
        for one in waiting:
            place, given, call = one
            called = call["function"].get("name")
            if given.get("id") == name if name is not None else function in (None, called):
                waiting.remove(one)
                own = {"name": called} if function is None and called is not None else {}
                linked.append((place, {**result, **own, "tool_call_id": call["id"]}))
                break
        else:
            linked.append((len(calls), result))
    return linked
