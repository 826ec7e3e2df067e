"""Completions as Python objects, as mappings, and as the rows of `cbatch run`."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from cbatch import Choice, Completion, RequestError, Score, TokenLogprob, ToolCall, Usage
from cbatch.base.params import SamplingParams
from cbatch.base.request import ApiCall, Request
from cbatch.batch.row import format_row
from cbatch.requests.completion import Timing

TOP = TokenLogprob("b", 5, -2.0, b"b")
SCORED = [
    TokenLogprob("a", 4, -0.125, b"a", (TokenLogprob("a", 4, -0.125, b"a"), TOP)),
    TokenLogprob("\ufffd", 6, -1.5, b"\xe2", (TOP,)),
]
PROMPT = [TokenLogprob("<s>", 0, None, b"<s>", in_text=False), TokenLogprob("é", 7, -3.25, "é".encode(), (TOP,))]
CALL = ToolCall("weather", '{"city": "Zürich"}', "abc123xyz")
PLAIN = Choice(text="Hello <b>world</b>", token_ids=[4, 6, 2], stop_reason="!")
THOUGHT = Choice(text="", reasoning="hm &c", tool_calls=(CALL, replace(CALL, id="z")), finish_reason="tool_calls")
CHAT, TEXT, RESPONSE = ApiCall(True, "gpt-x"), ApiCall(False, None), ApiCall(True, "gpt-x", '{"tools": []}')
ECHO = SamplingParams(echo=True)
OWN_ROW = Request(index=3, id="q-1", extra={"topic": "x", "tags": ["a"]})
USAGE = Usage(7, 3, 4)
ERROR = RequestError("prompt_too_long", "line 4: the prompt has 9 tokens; <8> fit")


def make(row: Request = OWN_ROW, *choices: Choice, **fields: Any) -> Completion:
    fields = {"usage": USAGE, "timing": Timing(10.0, 10.5, 12.0)} | fields
    asked = {name: fields.pop(name) for name in ("columns", "params") if name in fields}
    return Completion(replace(row, key="0" * 32, **asked), choices=choices, **fields)


def openai(call: ApiCall) -> Request:
    return Request(index=3, id="c-1", call=call, extra={"store": False})


NOTED = replace(THOUGHT, text="hm", tool_calls=(), finish_reason="stop", note="It was not closed.")
SEVERAL = [replace(PLAIN, index=0, logprobs=SCORED), replace(THOUGHT, index=1, logprobs=[])]
COMPLETIONS: dict[str, Completion] = {
    "plain": make(OWN_ROW, PLAIN),
    "without an id": make(Request(index=0), Choice()),
    "calls": make(OWN_ROW, THOUGHT),
    "note": make(OWN_ROW, NOTED),
    "note of a chat": make(openai(CHAT), NOTED),
    "several": make(OWN_ROW, *SEVERAL, columns=("token_ids",), prompt_logprobs=PROMPT),
    "no tokenizer": make(OWN_ROW, replace(PLAIN, text=""), has_text=False, columns=("token_ids",)),
    "error": make(OWN_ROW, error=ERROR),
    "chat": make(openai(CHAT), *SEVERAL, columns=("token_ids",), prompt_logprobs=PROMPT),
    "text": make(openai(TEXT), replace(PLAIN, logprobs=SCORED), prompt_logprobs=PROMPT, params=ECHO),
    "response": make(openai(RESPONSE), replace(PLAIN, logprobs=SCORED), columns=("token_ids",), prompt_logprobs=PROMPT),
    "response that calls": make(openai(RESPONSE), THOUGHT),
    "failed chat": make(openai(CHAT), error=ERROR),
}
each = pytest.mark.parametrize("completion", COMPLETIONS.values(), ids=COMPLETIONS)
ATTRIBUTES = ("choices", "usage", "index", "id", "key", "extra", "text", "reasoning", "tool_calls", "finish_reason")
COPIES: list[Callable[[Completion], Completion]] = [
    lambda one: pickle.loads(pickle.dumps(one)),
    copy.copy,
    copy.deepcopy,
]


@each
def test_a_completion_is_its_row(completion: Completion) -> None:
    """Guards the mapping: it has the fields of `to_dict`, in their order, and JSON takes them."""
    row = completion.to_dict()
    assert isinstance(completion, Mapping) and list(completion) == list(row) and len(completion) == len(row)
    assert (
        dict(completion) == {**completion} == row and completion == row and list(completion.items()) == [*row.items()]
    )
    assert json.dumps(dict(completion), ensure_ascii=False).encode() + b"\n" == format_row(row)
    assert "key" in completion and completion["key"] == "0" * 32 and completion.get("colour", 5) == 5
    with pytest.raises(KeyError, match="colour"):
        completion["colour"]
    assert "ttft_s" not in completion and completion.to_dict(timings=True)["ttft_s"] == 0.5


@each
@pytest.mark.parametrize("is_read", [False, True], ids=["made", "read from a row"])
def test_a_row_may_be_changed(completion: Completion, is_read: bool) -> None:
    """Guards later callers of `to_dict` against the changes of earlier ones."""
    if is_read:
        completion = Completion.from_row(completion.to_dict())
    before = json.dumps(completion.to_dict())
    row = completion.to_dict()
    for value in [row, *row.values()]:
        if isinstance(value, dict):
            for nested in value.values():
                if isinstance(nested, list):
                    nested.append(1)
            value.update(dict.fromkeys(value), new=1)
        elif isinstance(value, list):
            value.clear()
    assert json.dumps(completion.to_dict()) == json.dumps(dict(completion)) == before and completion.extra != row


@pytest.mark.parametrize("look", [dict, lambda one: [*one.items()], lambda one: one == one])
def test_a_look_at_all_fields_makes_one_row(look: Callable[[Completion], object], monkeypatch: Any) -> None:
    """Guards `dict(completion)` against making a row for each field, of which log-probabilities may be thousands."""
    made: list[Completion] = []
    to_dict = Completion.to_dict
    monkeypatch.setattr(Completion, "to_dict", lambda self: made.append(self) or to_dict(self))
    look(make(OWN_ROW, *SEVERAL, prompt_logprobs=PROMPT))
    assert len(made) == 1


def test_equality() -> None:
    """Guards comparisons of results: with the same row they are equal, whenever and wherever they were made."""
    for name, completion in COMPLETIONS.items():
        assert [other for other in COMPLETIONS if COMPLETIONS[other] == completion] == [name]
        assert completion != {} and completion != "text"
    again = make(OWN_ROW, PLAIN, timing=Timing(1.0, 2.0, 3.0), usage=replace(USAGE, cached_tokens=0))
    assert again == COMPLETIONS["plain"]
    with pytest.raises(TypeError, match="unhashable"):
        hash(again)


@each
@pytest.mark.parametrize("make_copy", COPIES, ids=["pickle", "copy", "deepcopy"])
def test_copies(make_copy: Callable[[Completion], Completion], completion: Completion) -> None:
    """Guards multiprocessing and caches on disk: a copy has everything, also its error."""
    completion["key"]
    made = make_copy(completion)
    assert type(made) is Completion and made == completion
    assert made.to_dict(timings=True) == completion.to_dict(timings=True)
    for name in (*ATTRIBUTES, "prompt_logprobs", "timing"):
        assert getattr(made, name) == getattr(completion, name)
    error = made.error and (type(made.error), made.error.code, str(made.error))
    assert error == (completion.error and (RequestError, ERROR.code, str(ERROR)))


def comparable(tokens: Any) -> Any:
    """Tokens without their numbers, which rows do not have."""
    return tokens and [
        (one.token, one.logprob, one.data, [(top.token, top.logprob, top.data) for top in one.top]) for one in tokens
    ]


@each
@pytest.mark.parametrize("timings", [False, True])
def test_a_row_can_be_read_back(completion: Completion, timings: bool) -> None:
    """Guards results that a resumed map takes from its file: they are what was computed, in both forms of rows."""
    row = json.loads(format_row(completion.to_dict(timings=timings)))
    read = Completion.from_row(row)
    assert read.to_dict() == row and (timings or read == completion)
    for name in ("index", "id", "extra", "key"):
        assert getattr(read, name) == getattr(completion, name)
    assert (read.error and (read.error.code, str(read.error))) == (completion.error and (ERROR.code, str(ERROR)))
    if completion.error is None:
        assert read.usage == replace(USAGE, cached_tokens=4 if timings else 0)
    if completion is not COMPLETIONS["text"]:  # whose choice has the prompt's tokens in front of its own
        assert comparable(read.prompt_logprobs) == comparable(completion.prompt_logprobs)
    for found, choice in zip(read.choices, completion.choices, strict=True):
        for name in ("index", "text", "reasoning", "tool_calls", "finish_reason"):
            assert getattr(found, name) == getattr(choice, name)
        assert completion.id == "c-1" or found.stop_reason == choice.stop_reason
        assert list(found.token_ids) in ([], list(choice.token_ids))
        assert found.logprobs is None or comparable(found.logprobs) == comparable(choice.logprobs)


def test_the_sum_of_a_long_text_is_whole() -> None:
    """Guards scores of long texts against the number that stands for a token's probability of 0."""
    row = make(OWN_ROW, Choice(text="long", score=Score(-20000.0, 10000)))
    assert row["logprob"] == -20000.0 and row["mean_logprob"] == -2.0


def test_tokens_that_never_come_have_a_number() -> None:
    """Guards JSON, which has no infinity, against models that give some tokens a probability of 0."""
    never = TokenLogprob("b", 5, -math.inf, b"b")
    scored = [TokenLogprob("a", 4, -0.5, b"a", (never,)), never]
    for row in (OWN_ROW, openai(CHAT), openai(TEXT)):
        completion = make(row, replace(PLAIN, logprobs=scored), prompt_logprobs=[PROMPT[0], *scored, *[never] * 2])
        text = json.dumps(completion.to_dict(), allow_nan=False)
        assert '"top_logprobs"' in text and "-9999.0" in text and completion.logprobs == scored
    plain = make(OWN_ROW, PLAIN, prompt_logprobs=[PROMPT[0], *scored, *[never] * 2])
    assert plain["prompt_logprobs"]["sum"] == -29997.5


def test_repr_is_short_and_has_no_control_sequences() -> None:
    """Guards terminals: texts, calls and messages come from models and files."""
    nasty = "\x1b]0;owned\x07\n\r" + "x" * 500
    call = ToolCall("f\x1b[2J", nasty)
    shown = [
        make(OWN_ROW, Choice(text=nasty, reasoning=nasty, tool_calls=(call,) * 2)),
        make(OWN_ROW, error=RequestError("template_error", nasty)),
        *COMPLETIONS.values(),
    ]
    assert all(repr(one).isprintable() and len(repr(one)) < 1000 for one in shown)
    assert repr(COMPLETIONS["plain"]) == "Completion(text='Hello <b>world</b>', finish_reason='stop', tokens=7+3)"
    assert 'tool_calls=[\'weather({"city": "Zürich"})\'' in repr(COMPLETIONS["calls"])
    assert "choices=2" in repr(COMPLETIONS["several"]) and "reasoning='hm &c'" in repr(COMPLETIONS["calls"])
    assert repr(COMPLETIONS["error"]) == f"Completion(error='prompt_too_long', message={str(ERROR)!r})"


class Page(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_notebooks_show_text_as_it_is() -> None:
    """Guards notebooks against markup and scripts that a model writes, or that stand in an error."""
    script = "<script>alert('&amp;')</script>"
    choice = Choice(text=script, reasoning=script + "r", tool_calls=(ToolCall("f", f'{{"x": "{script}"}}'),))
    for completion in (make(OWN_ROW, choice, choice), make(OWN_ROW, error=RequestError("template_error", script))):
        page = Page(completion._repr_html_())
        assert script in page.text and page.tags <= {"table", "tr", "th", "td", "div", "i", "br", "code", "p", "b"}
    shown = Page(COMPLETIONS["several"]._repr_html_()).text
    assert all(part in shown for part in ("Hello <b>world</b>", "hm &c", 'weather({"city": "Zürich"})', "tool_calls"))


def test_errors() -> None:
    """Guards programs that want an exception, those that read `text` before they look, and memory: it keeps nobody."""
    completion = make(OWN_ROW, error=ERROR)
    for _ in range(2):
        with pytest.raises(RequestError) as caught:
            completion.raise_for_error()
        assert (caught.value.code, str(caught.value)) == (ERROR.code, str(ERROR))
        assert completion.error is ERROR and ERROR.__traceback__ is ERROR.__context__ is None
    assert COMPLETIONS["plain"].raise_for_error() is COMPLETIONS["plain"]
    assert completion.choices == (Choice(finish_reason="error"),) and completion.text == ""
    assert completion.reasoning is completion.stop_reason is completion.logprobs is None
    assert completion.token_ids == completion.tool_calls == ()


def test_scores() -> None:
    """Guards means, perplexities and rows that are read again; what failed has no figures."""
    tokens = [TokenLogprob("a", 4, -value, b"a") for value in (1.0, 2.0, 4.0)]
    whole, last = Score(-7.0, 3, True, tokens), Score(-4.0, 1, False)
    assert whole.perplexity == pytest.approx(math.exp(7 / 3)) and last.perplexity == pytest.approx(math.exp(4))
    assert whole.mean == pytest.approx(-7 / 3) and last.mean == -4
    failed = Score(math.nan, error=ERROR)
    assert math.isnan(failed.mean) and math.isnan(failed.perplexity)
    assert "TokenLogprob" not in repr(whole) and pickle.loads(pickle.dumps(whole)) == whole
    row = make(OWN_ROW, Choice(index=1, text="a", score=last), Choice(text="b", score=whole)).to_dict()
    assert [one["index"] for one in row["choices"]] == [1, 0] and "finish_reason" not in row
    again = Completion.from_row(row)
    assert [one.text for one in again.choices] == ["a", "b"] and again.to_dict() == row
    assert again.score == last and again.choices[1].score is not None
    assert [one.logprob for one in again.choices[1].score.tokens] == [-1, -2, -4]


@pytest.mark.parametrize("row", [OWN_ROW, openai(CHAT)], ids=["own", "chat"])
def test_reasoning_tokens_are_in_usage_if_there_are_any(row: Request) -> None:
    """Guards the names of both forms, a row that is read again, and rows without reasoning against a new field."""
    some, none = make(row, THOUGHT, usage=replace(USAGE, reasoning_tokens=2)), make(row, PLAIN)
    usage, without = (one["response"]["body"]["usage"] if "response" in one else one["usage"] for one in (some, none))
    assert usage.keys() - without.keys() == ({"reasoning_tokens"} if row is OWN_ROW else {"completion_tokens_details"})
    assert usage.get("completion_tokens_details", usage)["reasoning_tokens"] == 2
    assert Completion.from_row(some.to_dict()).usage == replace(USAGE, cached_tokens=0, reasoning_tokens=2)
    assert (some.usage + none.usage).reasoning_tokens == 2


def test_notes_stand_in_rows() -> None:
    """Guards the reader of a row against reasoning that passes for an answer, and the types of the openai package."""
    from openai.types.chat import ChatCompletion

    row, body = make(OWN_ROW, NOTED).to_dict(), make(openai(CHAT), NOTED).to_dict()["response"]["body"]
    assert row["note"] == body["choices"][0]["message"]["note"] == NOTED.note
    assert ChatCompletion.model_validate(body, strict=True).choices[0].message.content == "hm"
    assert "note" not in make(OWN_ROW, PLAIN).to_dict()
