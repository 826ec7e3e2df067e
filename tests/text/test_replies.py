"""A model's output comes apart into reasoning, text and tool calls, and nothing of it is lost."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cbatch.base.errors import RequestError
from cbatch.base.outputs import ToolCall
from cbatch.requests.rows import check_tools
from cbatch.text.replies.calls import MAX_INVALID_CALLS
from cbatch.text.replies.declaration import Reasoning, ReplyFormat
from cbatch.text.replies.formats import find_format, reply_formats
from cbatch.text.replies.stream import OutputStream, ParsedDelta
from tests.support.tool_calls import ParsedOutput, parse, streamed

QWEN3 = (
    "{% if tools %}Answer with <tool_call>\n{'name': ..., 'arguments': ...}\n</tool_call>{% endif %}"
    "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)
R1 = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}<｜Assistant｜><think>\n"
MISTRAL_OLD = "[INST]{{ messages[0].content }}[/INST]{{ '[TOOL_CALLS] [' }}{% for c in calls %}{{ c }}{% endfor %}]"
LLAMA32 = (
    """{{ 'Respond as {"name": function name, "parameters": dictionary of its arguments}.' }}"""
    """{{ '{"name": "' + call.name + '", ' }}{{ '"parameters": ' }}{{ call.arguments | tojson }}"""
)

THOUGHT = "<think>\nhm\n</think>\n\n"
THINKING = find_format(QWEN3)
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string"},
                "floor": {"type": "integer"},
                "deep": {"type": ["boolean", "null"]},
                "tags": {"type": "array"},
                "any": {"anyOf": [{"type": "integer"}]},
            },
        },
    },
}


def parse_calls(template_or_tag: str, text: str) -> ParsedOutput:
    return parse(find_format(template_or_tag), text, tools=[LOOK])


def call_text(**arguments: Any) -> str:
    return json.dumps({"name": "look", "arguments": arguments})


def tags_of(made: ReplyFormat, *, with_calls: bool = True) -> list[str]:
    """All tags that are looked for."""
    tags = [made.reasoning.opening, made.reasoning.closing] if made.reasoning is not None else []
    return tags + (list(made.calls.tags) if made.calls is not None and with_calls else [])


@pytest.mark.parametrize(
    ("template", "name", "opening"),
    [
        ("", "none", None),
        (QWEN3, "qwen3", "<think>"),
        (R1, "think", "<think>"),
        ("{{ x.split('</think>')[-1] }}", "think", "<think>"),
        ("<thinking></thinking>", "think", "<thinking>"),
        ("<reasoning></reasoning> <think></think>", "think", "<reasoning>"),
        ("[THINK]x[/THINK][TOOL_CALLS]name[ARGS]", "mistral", "[THINK]"),
        (MISTRAL_OLD, "mistral-list", None),
        (LLAMA32, "llama", None),
        (LLAMA32.replace('"', '\\"'), "llama", None),
        ("{{ '<|python_tag|>' + call.name }}", "llama", None),
        ("""{{ '"name": ' }} and much else {{ '"parameters": ' }}""", "none", None),
    ],
)
def test_template_shows_the_format(template: str, name: str, opening: str | None) -> None:
    """Guards against tags that a model never writes, and those that a decoder would drop before they are looked for."""
    made = find_format(template)
    assert (made.name, made.reasoning and made.reasoning.opening) == (name, opening)
    assert all(tag in made.markup(with_calls=True) for tag in tags_of(made))
    assert not any(tag in made.markup(with_calls=False) for tag in (made.calls.tags if made.calls else ()))


@pytest.mark.parametrize(
    ("text", "is_thinking", "reasoning", "rest"),
    [
        ("<think>\nhm\n</think>\n\nHi\n", False, "hm", "Hi\n"),
        ("\n <think> hm </think>Hi", False, " hm ", "Hi"),
        ("hm\n</think>\n\nHi", True, "hm", "Hi"),
        ("<think>\nhm\n</think>\n\nHi", True, "hm", "Hi"),
        ("<think>\n\n</think>\n\nHi", False, None, "Hi"),
        ("</think>\n\nHi", True, None, "Hi"),
        ("\n Hi\n", False, None, "\n Hi\n"),
        ("<think>\nhm, and", False, "hm, and", ""),
        ("hm, and </thi", True, "hm, and </thi", ""),
        ("<thi", False, None, "<thi"),
        ("Hi</think> there", False, None, "Hi</think> there"),
        ("<think>a</think>b <think>c</think>", False, "a", "b <think>c</think>"),
        ("<think>a <think> b</think>c", False, "a <think> b", "c"),
    ],
)
def test_reasoning(text: str, is_thinking: bool, reasoning: str | None, rest: str) -> None:
    """Guards what counts as reasoning: one block at the beginning, also one cut off, and nothing later."""
    assert parse(THINKING, text, is_thinking=is_thinking, reason=None) == ParsedOutput(rest, reasoning, ())


CALL_A, NOW = ToolCall("look", '{"a": 1}'), ToolCall("now", "{}")
HERE = ToolCall("look", '{"place": "é</tool_call>"}')
CALLS: list[tuple[str, str, str, tuple[ToolCall, ...]]] = [
    (
        QWEN3,
        f"I look.\n<tool_call>\n{call_text(place='é</tool_call>')}\n</tool_call>\n"
        '<tool_call>{"name": "now"}</tool_call>\nDone.',
        "I look.\nDone.",
        (HERE, NOW),
    ),
    (QWEN3, f"<tool_call>{call_text(a=1)}", "", (CALL_A,)),
    (QWEN3, f"<tool_call>\n{call_text(a=1)}\n", "", (CALL_A,)),
    (QWEN3, '<tool_call>[{"arguments": {"a": 1}, "name": "look"}]</tool_call>', "", (CALL_A,)),
    (QWEN3, '<tool_call>{"name": "look", "arguments": "{\\"a\\": 1}"}</tool_call>', "", (CALL_A,)),
    (QWEN3, '<tool_call>{"name": "look", "parameters": {"a": 1}}</tool_call>', "", (CALL_A,)),
    (QWEN3, f"<tool_call>{{oops</tool_call>\n<tool_call>{call_text(a=1)}", "<tool_call>{oops</tool_call>", (CALL_A,)),
    (QWEN3, f"\n I look. \n<tool_call>{call_text(a=1)}</tool_call>\n", "\n I look.", (CALL_A,)),
    (QWEN3, f"\n <tool_call>{call_text(a=1)}</tool_call>", "", (CALL_A,)),
    (
        QWEN3,
        "<tool_call><function=other><parameter=floor>many</parameter></function></tool_call>",
        "",
        (ToolCall("other", '{"floor": "many"}'),),
    ),
    (
        QWEN3,
        "<tool_call><function=look><parameter=floor>many</parameter></function></tool_call>",
        "",
        (ToolCall("look", '{"floor": "many"}'),),
    ),
    (
        MISTRAL_OLD,
        'I look. [TOOL_CALLS] [{"name": "look", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]',
        "I look.",
        (CALL_A, NOW),
    ),
    (MISTRAL_OLD, '[TOOL_CALLS]look[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}', "", (CALL_A, NOW)),
    (MISTRAL_OLD, '[TOOL_CALLS]look[CALL_ID]9f2bTq1xZ[ARGS]{"a": 1}[TOOL_CALLS]now{}', "", (CALL_A, NOW)),
    (MISTRAL_OLD, "\n I look. \n[TOOL_CALLS]now[ARGS]{}\n", "\n I look.", (NOW,)),
    (LLAMA32, '\n{"name": "look", "parameters": {"a": 1}} ', "", (CALL_A,)),
    (LLAMA32, '<|python_tag|>\n{"name": "look", "parameters": {"a": 1}} ', "", (CALL_A,)),
    (LLAMA32, '\n I look.\n<|python_tag|>{"name": "look", "parameters": {"a": 1}}', "\n I look.", (CALL_A,)),
]
"""A template, an output, its text, and its calls."""


@pytest.mark.parametrize(("template", "output", "text", "calls"), CALLS)
def test_calls(template: str, output: str, text: str, calls: tuple[ToolCall, ...]) -> None:
    """Guards each way to write calls: closing tags that the stop took, lists, JSON within JSON, and text around."""
    assert parse_calls(template, output) == ParsedOutput(text, None, calls)
    if template == QWEN3:
        assert parse_calls(QWEN3, THOUGHT + output) == ParsedOutput(text.lstrip("\n"), "hm", calls)


BROKEN = [
    "{'name': 'look'}",
    '{"name": "look", "arguments": {"a": 1}',
    '{"name": "look", "arguments": {"a": 1}} and more',
    '{"arguments": {"a": 1}}',
    '{"name": "", "arguments": {}}',
    '{"name": "\\ud800", "arguments": {}}',
    '{"name": "look", "arguments": [1]}',
    '{"name": "look", "arguments": {"a": NaN}}',
    '{"name": "look", "arguments": {"a": 1e999}}',
    '[{"name": "look"}, {"name": null}]',
    "[]",
    "look",
    "",
    "[" * 100_000,
    "<function=look><parameter=place>here</function>",
    "<function=look>here</function>",
]
NO_CALLS = [
    *((QWEN3, f"I look.\n<tool_call>{block}</tool_call>\n") for block in BROKEN),
    *((QWEN3, f" <tool_call>{block}") for block in BROKEN),
    (MISTRAL_OLD, "[TOOL_CALLS]"),
    (MISTRAL_OLD, "[TOOL_CALLS]look"),
    (MISTRAL_OLD, "[TOOL_CALLS]look[ARGS]{"),
    (MISTRAL_OLD, "[TOOL_CALLS] [1]"),
    (MISTRAL_OLD, "[TOOL_CALLS][ARGS]{}"),
    (LLAMA32, '{"name": "Ann", "age": 5}'),
    (LLAMA32, '["look"]'),
    (LLAMA32, 'So: {"name": "look", "parameters": {}}'),
    (LLAMA32, '{"name": "look", "parameters": {}}; {"name": "look", "parameters": {}}'),
    (LLAMA32, '<|python_tag|>look.call(place="here")'),
]


@pytest.mark.parametrize(("template", "text"), NO_CALLS)
def test_what_is_no_call_stays_text(template: str, text: str) -> None:
    """Guards a broken call against being lost or repaired, and JSON that was asked for as an answer."""
    assert parse_calls(template, text) == ParsedOutput(text, None, ())


def test_endless_repetition_is_given_up() -> None:
    """Guards the run against minutes spent on an output that says nothing but the tag; good calls have no limit."""
    call = f"<tool_call>{call_text()}</tool_call>"
    text = "<tool_call>" * MAX_INVALID_CALLS + call
    assert parse_calls(QWEN3, text) == ParsedOutput(text, None, ())
    assert len(parse_calls(QWEN3, text.removeprefix("<tool_call>")).tool_calls) == 1
    assert len(parse_calls(QWEN3, call * (2 * MAX_INVALID_CALLS)).tool_calls) == 2 * MAX_INVALID_CALLS


def test_qwen_coder_calls() -> None:
    """Guards the types of parameters that are written as text: those of the schema, and strings without one."""
    text = (
        "I look.\n\n<tool_call>\n<function=look>\n<parameter=place>\n 5\n</function>\n\n</parameter>\n"
        "<parameter=floor>\n5\n</parameter>\n<parameter=deep>\nTrue\n</parameter>\n<parameter=tags>[1, 2]</parameter>\n"
        "<parameter=any>\n7\n</parameter>\n<parameter=new>\n8\n</parameter>\n</function>\n</tool_call>"
    )
    answer = parse_calls(QWEN3, text)
    assert (answer.text, answer.tool_calls[0].name) == ("I look.", "look")
    expected = {"place": " 5\n</function>\n", "floor": 5, "deep": True, "tags": [1, 2], "any": "7", "new": "8"}
    assert json.loads(answer.tool_calls[0].arguments) == expected


SOME_FORMATS = [
    find_format(template)
    for template in (
        "",
        QWEN3,
        R1,
        MISTRAL_OLD,
        LLAMA32,
        "[THINK][/THINK][TOOL_CALLS]",
        "</think><|python_tag|>",
    )
] + [ReplyFormat("test", Reasoning("((a", "))a"), reply_formats()["qwen3"].calls)]
PIECES = [
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"),
    *('{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {"a": "\\ud800"}}', '[{"name": "f"}]', "{", "}"),
    *("<function=f>", "<parameter=a>", "</parameter>", "</function>", "\n", " ", "</thi", "f", "1e999", "NaN", '"'),
    *("<|python_tag|>", "<th", "<tool_ca", "[TOOL_C", "<|pyth", "((", "a", "))"),
]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=12).map("".join)
formats = st.sampled_from(SOME_FORMATS)


@given(formats, texts, st.booleans())
def test_every_output_can_be_parsed(parser: ReplyFormat, text: str, is_thinking: bool) -> None:
    """Guards a run against any output, a file against bad JSON, and each visible character; without tags, all of it."""
    answer = parse(parser, text, is_thinking=is_thinking, tools=[LOOK], reason=None)
    for call in answer.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
        assert (call.name + call.arguments).encode()
    without = parse(parser, text, is_thinking=is_thinking, reason=None)
    assert (without.reasoning, without.tool_calls) == (answer.reasoning, ())
    assert answer.tool_calls or answer == without
    kept, left = "".join(((without.reasoning or "") + without.text).split()), "".join(text.split())
    assert left.endswith("".join(without.text.split()))
    assert len(left) - len(kept) <= sum(map(len, tags_of(parser, with_calls=False)))
    if not is_thinking and not any(tag in text for tag in (*tags_of(parser), "{")):
        assert answer == ParsedOutput(text, None, ())


@st.composite
def parts_of_texts(draw: st.DrawFn) -> list[str]:
    """A text, cut at random places or after each character; a part may be empty."""
    text = draw(texts)
    places = range(len(text)) if draw(st.booleans()) else draw(st.lists(st.integers(0, len(text)), max_size=8))
    return [text[start:end] for start, end in pairwise([0, *sorted(places), len(text)])]


some_tools = st.sampled_from([None, [LOOK]])


@settings(max_examples=300, deadline=None)
@given(formats, parts_of_texts(), st.booleans(), some_tools, st.sampled_from(["stop", "length", None]))
def test_stream_gives_what_parse_gives(
    parser: ReplyFormat, parts: list[str], is_thinking: bool, tools: list[Any] | None, reason: Any
) -> None:
    """Guards streams against other text, reasoning or calls than the finished result, wherever its tokens end."""
    whole = parse(parser, "".join(parts), is_thinking=is_thinking, tools=tools, reason=reason)
    assert streamed(OutputStream(parser, is_thinking=is_thinking, tools=tools), parts, reason) == whole


def endings(parser: ReplyFormat) -> list[str]:
    """How an output may go on: with plain text, with the rest of a tag, or with what follows reasoning."""
    calls = ['{"name": "f", "parameters": {}}', "f{}"]
    rests = ["", *(tag[start:] for tag in tags_of(parser) for start in range(len(tag)))]
    return [rest + after for rest in rests for after in ("", "x", "y", "\nx", *calls)]


def common_beginning(strings: list[str]) -> str:
    low, high = min(strings), max(strings)
    return next((low[:end] for end in range(len(low), 0, -1) if high.startswith(low[:end])), "")


@settings(deadline=None)
@given(formats, parts_of_texts(), st.booleans(), some_tools)
def test_stream_shows_all_that_is_decided(
    parser: ReplyFormat, parts: list[str], is_thinking: bool, tools: list[Any] | None
) -> None:
    """Guards the reader against waiting for text that no ending of the output can change any more."""
    text = "".join(parts)
    if tools and parser.calls:
        assume(not any(tag in text for tag in parser.calls.tags))
        assume(not parser.calls.bare or parser.calls.bare not in text)
    stream = OutputStream(parser, is_thinking=is_thinking, tools=tools)
    shown = [stream.push(part) for part in parts]
    results = [
        parse(parser, text + ending, is_thinking=is_thinking, tools=tools, reason=None) for ending in endings(parser)
    ]
    assert "".join(delta.text for delta in shown) == common_beginning([result.text for result in results])
    reasoning = common_beginning([result.reasoning or "" for result in results])
    assert "".join(delta.reasoning for delta in shown) == reasoning


OLD = call_text(a=1)
TEXTS: list[tuple[str, Any, str, list[str], list[str], int]] = [
    ("", [LOOK], "", [" ", "<think>", "<tool_call>"], [" ", "<think>", "<tool_call>", ""], 0),
    (QWEN3, None, "", ["\n", "Hi <thi", "nk>", "<tool_call>\n"], ["", "\nHi <thi", "nk>", "<tool_call>\n", ""], 0),
    (QWEN3, None, "", ["<", "thi", "s"], ["", "", "<this", ""], 0),
    (QWEN3, None, "", ["\n", "<thi"], ["", "", "\n<thi"], 0),
    (QWEN3, [LOOK], "", ["\n", "I look", ".\n", "<tool", "s>"], ["", "\nI look", ".", "", "\n<tools>", ""], 0),
    (QWEN3, [LOOK], "", ["{", '"a"'], ["{", '"a"', ""], 0),
    (QWEN3, [LOOK], "", ["Say <tool_call>", "x", " "], ["Say", "", "", " <tool_call>x "], 0),
    (QWEN3, [LOOK], "", ["Ok ", f"<tool_call>{call_text()}</tool_call>", "So "], ["Ok", "", "", "\nSo"], 1),
    (QWEN3, [LOOK], "", [" ", f"<tool_call>{call_text()}</tool_call>", "So "], ["", "", "", "So"], 1),
    (MISTRAL_OLD, [LOOK], "", ["Ok", " [", "TOOL_CALLS", "]look{}", " "], ["Ok", "", "", "", "", ""], 1),
    (LLAMA32, [LOOK], "", [" ", '{"a"', ": 1} "], ["", "", "", ' {"a": 1} '], 0),
    (LLAMA32, [LOOK], "", [" ", '{"name": "look", "arguments": {}}', "\n"], ["", "", "", ""], 1),
    (LLAMA32, [LOOK], "", ["So: ", '{"a": 1}', "<|pyt"], ["So:", ' {"a": 1}', "", "<|pyt"], 0),
    (QWEN3, [LOOK], "Hi ", ["you"], ["you", ""], 0),
    (QWEN3, [LOOK], "Hi ", [" ", "you"], ["", " you", ""], 0),
    (QWEN3, [LOOK], "Hi ", [f"<tool_call>{call_text()}"], ["", ""], 1),
    (QWEN3, [LOOK], "Hi <tool", [f"_call>{call_text()}</tool_call>", "So"], ["", "", "\nSo"], 1),
    (QWEN3, [LOOK], f"<tool_call>{call_text()}", ["</tool_call> So ", "on"], ["", "", "So on"], 0),
    (QWEN3, [LOOK], f"<tool_call>{call_text()}</tool_call>So", [f" <tool_call>{call_text()}"], ["", ""], 1),
    (QWEN3, [LOOK], f"<tool_call>{OLD}", [f"? <tool_call>{call_text()}"], ["", f"<tool_call>{OLD}?"], 1),
    (R1, [LOOK], "<thi", ["nk></think>", "<", "b>"], ["", "<", "b>", ""], 0),
    (QWEN3, [LOOK], "<thi", ["s"], ["s", ""], 0),
    (LLAMA32, [LOOK], "{", ['"a": ', "1}"], ["", "", '"a": 1}'], 0),
]
"""A template, tools, the beginning that was given, the parts that come, what they show and the end, new calls."""


@pytest.mark.parametrize(("template", "tools", "prefix", "parts", "shown", "num_calls"), TEXTS)
def test_text_comes_as_it_is_written(
    template: str, tools: Any, prefix: str, parts: list[str], shown: list[str], num_calls: int
) -> None:
    """Guards each kind of output as its reader sees it come, and beginnings and calls against coming again."""
    stream = OutputStream(find_format(template), tools=tools, prefix=prefix)
    deltas = [stream.push(part) for part in parts]
    last, calls, *_ = stream.finish()
    assert [*deltas, last] == [ParsedDelta(text) for text in shown]
    assert calls == (ToolCall("look", "{}"),) * num_calls


@pytest.mark.parametrize(
    ("is_thinking", "parts", "shown"),
    [
        (False, ["\n<", "think>\n", " hm", "\n"], ["", "", " hm", "", ""]),
        (True, ["\n", " ", "\nhm", " ", "\n", "so\n</", "th"], ["", "", " \nhm", " ", "", "\nso", "", "\n</th"]),
        (True, [" \n\n", "</think>", "\n"], ["", "", "", ""]),
        (True, ["\n ", "<thi"], ["", "", " <thi"]),
    ],
)
def test_reasoning_comes_as_it_is_written(is_thinking: bool, parts: list[str], shown: list[str]) -> None:
    """Guards the screen against reasoning that is nothing but white space, and against tags."""
    stream = OutputStream(THINKING, is_thinking=is_thinking)
    assert [*map(stream.push, parts), stream.finish(None)[0]] == [ParsedDelta("", text) for text in shown]


@settings(max_examples=300, deadline=None)
@given(formats, parts_of_texts(), st.data(), st.booleans(), some_tools)
def test_stream_of_a_continued_output_gives_what_is_new(
    parser: ReplyFormat, parts: list[str], data: st.DataObject, is_thinking: bool, tools: list[Any] | None
) -> None:
    """Guards a continued output against giving its beginning or a call again, and against losing a part of the rest."""
    num_before = data.draw(st.integers(0, len(parts)))
    prefix, rest = "".join(parts[:num_before]), parts[num_before:]
    text = prefix + "".join(rest)
    before, whole = (parse(parser, part, is_thinking=is_thinking, tools=tools, reason=None) for part in (prefix, text))
    new, at_once = (
        streamed(OutputStream(parser, is_thinking=is_thinking, tools=tools, prefix=prefix), some, None)
        for some in (rest, ["".join(rest)])
    )
    assert new == at_once
    goes_on = whole.tool_calls[: len(before.tool_calls)] == before.tool_calls
    assert new.tool_calls == whole.tool_calls[len(before.tool_calls) if goes_on else 0 :]
    if parser.reasoning is not None:  # half of a tag that was shown as text cannot be taken back
        opening, closing = parser.reasoning.opening, parser.reasoning.closing
        head = text[: len(text) - len(text.lstrip())] + opening
        assume(not (text.startswith(head) and 0 < len(prefix) < len(head)))
        assume(closing not in text[max(0, len(prefix) - len(closing) + 1) : len(prefix) + len(closing) - 1])
    assert (before.reasoning or "") + (new.reasoning or "") == (whole.reasoning or "")
    assert whole.tool_calls or before.tool_calls or whole.text.startswith(before.text)
    if whole.text.startswith(before.text):
        assert before.text + new.text == whole.text


@pytest.mark.parametrize(
    ("template", "tools", "part"),
    [
        (QWEN3, None, "\n \n"),
        (QWEN3, None, "<think>"),
        (QWEN3, [LOOK], "<tool_"),
        (QWEN3, [LOOK], "\n \n"),
        (QWEN3, [LOOK], "<tool_call>"),
        (LLAMA32, [LOOK], "{"),
    ],
)
def test_long_outputs_take_time_in_proportion(template: str, tools: list[Any] | None, part: str) -> None:
    """Guards long outputs against a time that grows with the square of their length, which is minutes for these."""
    stream = OutputStream(find_format(template), tools=tools)
    start = time.process_time()
    for _ in range(10_000):
        stream.push(200 * part)
        assert time.process_time() - start < 5
    stream.finish()
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, "must be a list"),
        ({"type": "function"}, "must be a list"),
        ([LOOK, "look"], "Tool 2 must be an object"),
        ([{"type": "function", "name": "look"}], "Tool 1 must be an object"),
        ([{"type": "function", "function": {"description": "looks"}}], "tool 1 must have a name"),
        ([{"type": "function", "function": {"name": "look", "parameters": []}}], "parameters of tool 1"),
    ],
)
def test_wrong_tools_are_said(value: Any, sentence: str) -> None:
    """Guards templates against what is no tool, and the person against a template's own words about it."""
    with pytest.raises(RequestError, match=sentence) as caught:
        check_tools(value)
    assert caught.value.code == "invalid_row"


def test_tools_pass() -> None:
    """Guards what OpenAI takes: no tools, and a function that has no parameters or does not say them."""
    bare = [{"type": "function", "function": {"name": "now", **rest}} for rest in ({}, {"parameters": None})]
    assert check_tools([]) == [] and check_tools([LOOK, *bare]) == [LOOK, *bare]
    text = "<tool_call><function=now><parameter=a>1</parameter></function></tool_call>"
    for tool in bare:
        assert parse(reply_formats()["qwen3"], text, tools=[tool]).tool_calls == (ToolCall("now", '{"a": "1"}'),)
