"""Each declared format: its template is recognized, and its replies come apart, however they are cut."""

from __future__ import annotations

import json
import random
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cbatch
from cbatch.base.config import REPLY_FORMATS, EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.base.params import Constraint
from cbatch.sample.structured.call_rules import ToolCallGrammar
from cbatch.text.replies.formats import find_format, reply_formats
from cbatch.text.replies.stream import NO_TEXT, NOT_CLOSED, OutputStream
from tests.support.replies import LOOK_TOOLS, REPLIES
from tests.support.tool_calls import ParsedOutput, parse, streamed

each = pytest.mark.parametrize("name", REPLIES)
THINKING = [name for name, reply in REPLIES.items() if reply.reasoning]
CALLING = [name for name, reply in REPLIES.items() if reply.calls]
FORCIBLE = [name for name in CALLING if (calls := reply_formats()[name].calls) is not None and calls.is_forcible]


def test_every_format_has_a_reply() -> None:
    """Guards a declaration that nothing tests, and a name that the option does not take."""
    assert set(REPLIES) == set(reply_formats()) == set(REPLY_FORMATS) - {"auto"}
    page = (Path(__file__).parents[2] / "docs" / "replies.md").read_text()
    assert all(f"| `{name}` | " in page for name in REPLIES)
    assert Path(cbatch.__file__).with_name("text").joinpath("reply_formats", "seed.toml").read_text() in page
    unforcible = {name for name in CALLING if name not in FORCIBLE}
    assert (
        set(re.findall(r"`([\w.-]+)`", page.partition("in all formats but ")[2].partition(" Where")[0])) == unforcible
    )
    with pytest.raises(ConfigError, match=r"There is no reply format 'qwen'; choose auto, .*qwen3"):
        EngineConfig(reply_format="qwen")


@each
def test_a_template_shows_its_format(name: str) -> None:
    """Guards against reading a family as another one that its template resembles."""
    made, reply = find_format(REPLIES[name].shown), REPLIES[name]
    assert made.name == name
    assert (made.reasoning is not None) == (reply.reasoning is not None)
    assert made.describe() and made.calls == reply_formats()[name].calls


@each
def test_replies_come_apart(name: str) -> None:
    """Guards every piece of every format: markup in the text, and arguments of the wrong type."""
    reply = REPLIES[name]
    made = find_format(reply.shown)
    expected = ParsedOutput(reply.text, reply.reasoning, reply.calls)
    assert parse(made, reply.written, tools=LOOK_TOOLS) == expected
    assert streamed(OutputStream(made, tools=LOOK_TOOLS), list(reply.written)) == expected
    for at in range(len(reply.written)):
        assert streamed(OutputStream(made, tools=LOOK_TOOLS), [reply.written[:at], reply.written[at:]]) == expected


@each
def test_a_reply_that_is_cut_off_shows_no_markup(name: str) -> None:
    """Guards whoever reads an output that `max_tokens` ends, at whatever character: no half of a call, no tag."""
    reply = REPLIES[name]
    made = find_format(reply.shown)
    for at in range(len(reply.written)):
        cut = parse(made, reply.written[:at], tools=LOOK_TOOLS, reason="length")
        assert streamed(OutputStream(made, tools=LOOK_TOOLS), list(reply.written[:at]), "length") == cut
        assert reply.text.startswith(cut.text.strip()) and (reply.reasoning or "").startswith(cut.reasoning or "")
        assert cut.tool_calls == reply.calls[: len(cut.tool_calls)] and cut.note is None


@each
def test_without_tools_no_calls_are_looked_for(name: str) -> None:
    """Guards the reasoning and the text of a plain question, and against calls that nobody can run."""
    reply = REPLIES[name]
    answer = parse(find_format(reply.shown), reply.written)
    assert (answer.tool_calls, answer.reasoning) == ((), reply.reasoning)
    assert answer.text.strip().startswith(reply.text)


@pytest.mark.parametrize("name", THINKING)
def test_a_call_inside_reasoning_is_reasoning(name: str) -> None:
    """Guards against running what a model only thinks about."""
    reply = REPLIES[name]
    made = find_format(reply.shown)
    assert made.reasoning is not None and reply.reasoning is not None
    opening, middle, rest = reply.written.partition(reply.reasoning)
    call = REPLIES["qwen3"].written.rpartition("<tool_call>")[2]
    answer = parse(made, f"{opening}hm <tool_call>{call} so{rest}", tools=LOOK_TOOLS)
    assert (answer.text, answer.tool_calls) == (reply.text, reply.calls)
    assert answer.reasoning == f"hm <tool_call>{call} so" and middle


@pytest.mark.parametrize("name", THINKING)
def test_reasoning_that_is_not_closed_is_said(name: str) -> None:
    """Guards an answer that is taken for reasoning because the model forgot the tag that its template wants."""
    reply = REPLIES[name]
    made = find_format(reply.shown)
    assert reply.reasoning is not None
    begun = reply.written[: reply.written.index(reply.reasoning)] + "hm, yes"
    assert parse(made, begun) == ParsedOutput("", "hm, yes", (), NO_TEXT)
    assert parse(made, begun, reason="length") == ParsedOutput("", "hm, yes", ())
    for parts in (["hm, yes"], list("hm, yes")):
        stream = OutputStream(made, is_thinking=True)
        assert "".join(stream.push(part).reasoning for part in parts) == "hm, yes"
        end = stream.finish("stop")
        assert (end.delta.text, end.delta.reasoning, end.note, end.is_all_text) == ("hm, yes", "", NOT_CLOSED, True)
    assert parse(made, "hm, yes", is_thinking=True, reason="length") == ParsedOutput("", "hm, yes", ())
    assert parse(made, "", is_thinking=True).note is None


@pytest.mark.parametrize("name", FORCIBLE)
def test_forced_calls_are_read_back(name: str) -> None:
    """Guards the grammar of each format: whatever a model draws is calls of its tools, with arguments that fit."""
    llguidance = pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
    functions = [(one["function"]["name"], one["function"]["parameters"]) for one in LOOK_TOOLS]
    asked = {"form": name, "is_repeated": True, "is_led": False, "functions": functions}
    grammar, made = ToolCallGrammar(Constraint("tool_call", json.dumps(asked))).to_lark(), reply_formats()[name]
    tokenizer = llguidance.LLTokenizer("byte")
    for seed in range(4):
        draw, matcher, written = random.Random(seed), llguidance.LLMatcher(tokenizer, grammar, log_level=0), bytearray()
        assert not matcher.is_error(), matcher.get_error()
        while not (matcher.is_accepting() and draw.random() < 0.6) and len(written) < 3000:
            allowed = [byte for byte, mask in enumerate(matcher.compute_logit_bias()[:256]) if mask]
            if not allowed:
                break
            written.append(draw.choice([byte for byte in allowed if 32 <= byte < 127] or allowed))
            matcher.consume_token(written[-1])
        answer = parse(made, written.decode(), tools=LOOK_TOOLS)
        assert answer.tool_calls and not answer.text.strip(), written
        assert {call.name for call in answer.tool_calls} <= {"look", "now"}
        for call in answer.tool_calls:
            given = json.loads(call.arguments)
            assert (given == {}) if call.name == "now" else (len(given.pop("place")) <= 8)
            assert given.pop("floor", 0) in range(100) and given.pop("deep", True) in (True, False) and not given


def fragments(name: str) -> list[str]:
    """The tags of a format and what stands between them in its reply."""
    return [one for one in re.split(r"(<[^<>]*>|\[/?[A-Z_ ]+\]|◁[^▷]*▷|\n)", REPLIES[name].written) if one]


@st.composite
def garbled(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A format, and a text of its fragments in any order, in parts."""
    name = draw(st.sampled_from(sorted(REPLIES)))
    some = st.sampled_from(fragments(name)) | st.text(max_size=3)
    whole = st.builds(lambda at, rest: REPLIES[name].written[:at] + rest, st.integers(0, 400), some)
    text = draw(st.lists(some, max_size=12).map("".join) | whole)
    places = draw(st.lists(st.integers(0, len(text)), max_size=6))
    return name, [text[start:end] for start, end in pairwise([0, *sorted(places), len(text)])]


@settings(max_examples=400, deadline=None)
@given(garbled(), st.booleans(), st.sampled_from([None, LOOK_TOOLS]), st.sampled_from(["stop", "length", None]))
def test_any_text_is_the_same_however_it_is_cut(
    written: tuple[str, list[str]], is_thinking: bool, tools: Any, reason: Any
) -> None:
    """Guards against text that depends on where tokens end, and against an error for what a model writes."""
    name, parts = written
    made, text = reply_formats()[name], "".join(parts)
    whole = parse(made, text, is_thinking=is_thinking, tools=tools, reason=reason)
    for cut in (parts, list(text)):
        assert streamed(OutputStream(made, is_thinking=is_thinking, tools=tools), cut, reason) == whole
    assert all(isinstance(json.loads(call.arguments), dict) for call in whole.tool_calls)


@each
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_long_outputs_take_time_in_proportion(name: str, reason: Any) -> None:
    """Guards a run against minutes for one output that repeats a piece of markup."""
    made, start = reply_formats()[name], time.process_time()
    for part in dict.fromkeys([*fragments(name), REPLIES[name].written]):
        stream = OutputStream(made, tools=LOOK_TOOLS)
        for _ in range(200):
            stream.push(10 * part)
        stream.finish(reason)
    assert time.process_time() - start < 5


CHANNELS = [
    ("<|channel|>final<|message|>Hi\n", "Hi\n", None, 0),
    ('<|channel|>final <|constrain|>json<|message|>{"a": 1}', '{"a": 1}', None, 0),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>", "", "a\nb", 0),
    ("<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>Hi<|return|>", "Hi", "a", 0),
    (" to=functions.now<|channel|>commentary json<|message|>{}<|call|>", "", None, 1),
    ("<|channel|>commentary to=now<|message|>{}", "", None, 1),
    ("<|channel|>commentary to=functions.now code<|message|>print(1)<|call|>", "print(1)", None, 0),
    ("<|channel|>analysis<|message|>a <|end", "", "a <|end", 0),
    ("Hi there, <b>", "Hi there, <b>", None, 0),
    ("to=you, " * 40, "to=you, " * 40, None, 0),
]


@pytest.mark.parametrize(("written", "text", "reasoning", "num_calls"), CHANNELS)
def test_channels(written: str, text: str, reasoning: str | None, num_calls: int) -> None:
    """Guards the headers that gpt-oss writes: a recipient in either place, types of content, several of a channel."""
    answer = parse(reply_formats()["harmony"], written, tools=LOOK_TOOLS, reason=None)
    assert (answer.text, answer.reasoning, len(answer.tool_calls)) == (text, reasoning, num_calls)


@pytest.mark.parametrize(
    ("name", "written", "text", "reasoning"),
    [
        ("command-a", "<|START_TEXT|>Hi<|END_TEXT|>", "Hi", None),
        ("granite3", "<think>a</think><response>\nHi\n</response>", "Hi", "a"),
        ("granite3", "So: <response>x</response>", "So: <response>x</response>", None),
        ("glm", "</think>Hi", "Hi", None),
        ("glm", "Hi</think>", "Hi</think>", None),
        ("kimi-vl", "Hi <think>x</think>", "Hi <think>x</think>", None),
        ("llama4", "[1] Hi", "[1] Hi", None),
        ("firefunction", "Use functools[x]", "Use functools[x]", None),
        ("functionary-v3.2", "", "", None),
        ("functionary-v3.2", "Hi", "Hi", None),
    ],
)
def test_only_the_tags_of_a_format_count(name: str, written: str, text: str, reasoning: str | None) -> None:
    """Guards text that looks like markup, and the tags around a text."""
    answer = parse(reply_formats()[name], written, tools=LOOK_TOOLS)
    assert (answer.text, answer.reasoning, answer.tool_calls) == (text, reasoning, ())


PYTHON = [
    ("f(a=1, b=[true, None], c={'d': -1.5})", '{"a": 1, "b": [true, null], "c": {"d": -1.5}}'),
    ("f()", "{}"),
    *((call, None) for call in ("f(1)", "f(**a)", "f(a=g())", "f(a=open)", "f(a=b'x')", "f(a={1})", "(f)(a=1)()", "1")),
    ("f(a=" + "[" * 9999 + "]" * 9999 + ")", None),
    ("f(a=" + "-" * 99999 + "1)", None),
]


@pytest.mark.parametrize(("call", "arguments"), PYTHON)
def test_calls_of_python_are_literals(call: str, arguments: str | None) -> None:
    """Guards against running or repairing what a model writes: only names, and literals as keyword arguments."""
    answer = parse(reply_formats()["llama4"], f"[{call}]", tools=LOOK_TOOLS)
    assert [one.arguments for one in answer.tool_calls] == ([] if arguments is None else [arguments])
    assert answer.text == ("" if arguments is not None else f"[{call}]")


def test_special_tokens_decide_what_the_template_does_not_show() -> None:
    """Guards models whose template leaves calls and reasoning out."""
    made = find_format("{{ messages }}", ["<|im_end|>", "<|tool_call_start|>", "</think>"])
    assert (made.name, made.reasoning and made.reasoning.opening) == ("lfm2", "<think>")
    assert find_format("<tool_call>", ["<|tool_call_start|>"]).name == "qwen3"


@settings(deadline=None)
@given(garbled(), st.data(), st.sampled_from([None, LOOK_TOOLS]))
def test_a_continued_reply_is_the_same_however_it_is_cut(
    written: tuple[str, list[str]], data: st.DataObject, tools: Any
) -> None:
    """Guards a reply that goes on after its beginning, which may end inside a tag."""
    name, parts = written
    made, at = reply_formats()[name], data.draw(st.integers(0, len(parts)))
    prefix, rest = "".join(parts[:at]), "".join(parts[at:])
    whole = streamed(OutputStream(made, tools=tools, prefix=prefix), [rest], None)
    assert streamed(OutputStream(made, tools=tools, prefix=prefix), list(rest), None) == whole
