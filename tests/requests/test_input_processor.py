"""Rows become requests: defaults, chat templates, system messages, forced calls, and keys that last."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from cbatch.base.chat_template_options import TemplateOptions
from cbatch.base.errors import RequestError
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request, RequestDefaults, ToolChoice
from cbatch.batch.line_processor import LineProcessor
from cbatch.batch.lines import Line
from cbatch.requests.completion import Completion
from cbatch.requests.input_processor import InputProcessor, ModelInfo
from cbatch.requests.prompts import read_prompt
from cbatch.schedule.limits import SequenceLimits
from cbatch.text.loading import of_transformers
from cbatch.text.tokenizer import ChatTokenizer
from tests.support.chat_templates import QWEN3
from tests.support.model_folder import TEMPLATE, make_tokenizer

LONGEST = 1024
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "look"}}


def processor(
    chat_template: str | None = TEMPLATE, compiled: list[ToolChoice | None] | None = None, **defaults: Any
) -> LineProcessor:
    """Processes lines for a model that exists only as a tokenizer.

    compiled: gets the forced call of each request
    defaults: fields of RequestDefaults
    """
    tokenizer = make_tokenizer()
    tokenizer.chat_template = chat_template
    model = ModelInfo(
        tokenizer=ChatTokenizer(of_transformers(tokenizer)),
        default_params=SamplingParams(),
        limits=SequenceLimits(LONGEST, LONGEST),
        fingerprint="model",
        compile=lambda params, tools, choice: compiled.append(choice) if compiled is not None else None,
    )
    return LineProcessor(InputProcessor(model, RequestDefaults(**defaults)))


def encode(fields: dict[str, Any], chat_template: str | None = TEMPLATE, *, index: int = 0, **defaults: Any) -> Request:
    made = processor(chat_template, **defaults).process(Line(index, json.dumps(fields).encode()))
    assert isinstance(made, Request), made
    return made


def text_of(request: Request) -> str:
    return str(make_tokenizer().decode(request.prompt_ids))


def error_of(fields: dict[str, Any], chat_template: str | None = TEMPLATE, **defaults: Any) -> str:
    made = processor(chat_template, **defaults).process(Line(0, json.dumps(fields).encode()))
    assert isinstance(made, Completion) and made.error is not None and made.error.code == "invalid_row"
    return str(made.error)


GOLDEN: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "Hi", "max_tokens": 4}, "b01de0b22296692baf5fc463"),
    ({"id": "a", "prompt": "Hi", "max_new_tokens": 4, "temperature": 0.7, "seed": 5}, "953e95ad5e846a3cfd4f167f"),
    ({"id": 3, "prompt": "Hi", "raw": True, "max_completion_tokens": 2}, "9dae8879347352b82657e647"),
    ({"id": "m", "messages": [{"role": "user", "content": "Hi"}], "stop": ["x"], "max_tokens": 2, "note": {"a": 1}},
     "a80fb52cf24c055480d0ea89"),
    ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
     "n": 2, "max_tokens": 2, "logprobs": 1}, "a08aceac78804486536ad752"),
    ({"prompt_token_ids": [5, 6, 7], "max_tokens": 2, "priority": 4}, "a5073fd0dde0586060599865"),
    ({"prompt": "Hi", "regex": "[ab]{3}", "max_tokens": 4}, "68e65d812296692baf5fc463"),
    ({"prompt": "Hi", "choice": ["a", "b"]}, "d084d7de2296692baf5fc463"),
    ({"prompt": "Hi", "response_format": {"type": "json_object"}, "max_tokens": 4}, "140271b22296692baf5fc463"),
    ({"prompt": "Hi", "options": ["A", "B"], "format": "markdown", "context": "c", "model": "m", "user": "u",
     "metadata": {"k": 1}, "template": "t", "think": "hm", "documents": ["d"], "max_tokens": 2},
     "f5c9199960a355f3ed1ee754"),
    ({"prompt": "Hi", "tools": [], "tool_choice": "none", "max_tokens": 2}, "9c9010732296692baf5fc463"),
    ({"prompt": "Hi", "logit_bias": {"40": 5}, "max_tokens": 2, "echo": True, "top_k": 5, "top_p": 0.5, "temperature":
     1, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
     "4c991b0b2296692baf5fc463"),
    ({"custom_id": "c-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "gpt-4o-mini", "messages":
     [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 1.0, "user": "me", "metadata": {"a": "b"},
     "n": 1, "parallel_tool_calls": True, "modalities": ["text"]}}, "28260faf8be1e620272a4f31"),
    ({"custom_id": "c-2", "method": "POST", "url": "/v1/completions", "body": {"prompt": "two", "max_tokens": 2,
     "suffix": "", "best_of": 1, "echo": True, "logprobs": 1}, "note": 1}, "6d582c0d687ea1f2b95e916e"),
    ({"custom_id": "c-3", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [{"role": "developer",
     "content": "hi"}], "max_tokens": 3, "logprobs": True, "top_logprobs": 2}}, "b17e72e6d02212c87a9e9c0c"),
    # what asks for nothing was a column in earlier versions
    ({"prompt": "Hi", "best_of": 1, "detokenize": True, "use_beam_search": False, "extra_args": {}, "mirostat": None,
     "max_tokens": 2}, "341a06fd4685272c4583a099"),
]  # fmt: skip
"""The lines of a file, and the last two parts of their keys as they were before rows could have template options."""


@pytest.mark.parametrize("index", range(len(GOLDEN)))
def test_keys_of_finished_rows_stay(index: int) -> None:
    """Guards --resume of files that older versions have written."""
    fields, key = GOLDEN[index]
    assert encode(fields, index=index, system="Be kind.").key[8:] == key


def test_what_is_said_to_the_template_is_in_the_key() -> None:
    """Guards --resume against rows that got another prompt; what equals the default changes no key."""
    asked: dict[str, Any] = {"messages": [USER], "tools": [TOOL]}
    same: list[dict[str, Any]] = [
        {},
        {"chat_template_kwargs": {}},
        {"add_generation_prompt": True},
        {"continue_final_message": False},
        {"tool_choice": "auto"},
        {"system": ""},
    ]
    assert len({encode(asked | one, QWEN3).key for one in same}) == 1
    other: list[dict[str, Any]] = [
        {},
        {"enable_thinking": False},
        {"enable_thinking": True},
        {"chat_template_kwargs": {"a": 1}},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"system": "s"},
        {"tool_choice": "none"},
        {"tool_choice": "required"},
        {"tool_choice": NAMED},
        {"parallel_tool_calls": False},
    ]
    keys = [encode(asked | one, QWEN3).key for one in other]
    assert len({*keys}) == len(other)
    turned = {"tools": [{**TOOL, "function": dict(reversed(TOOL["function"].items()))}]}
    assert encode(asked | turned, QWEN3).key != keys[0], "a template writes a tool in its own order"
    off = TemplateOptions(kwargs={"enable_thinking": False})
    assert encode(asked, QWEN3, template=off).key == keys[1]
    raw = {"prompt": "Hi", "raw": True}
    assert encode(raw, template=off).key == encode(raw).key, "no template sees the variables"


def test_a_row_tells_the_template_more_than_the_run() -> None:
    """Guards chat_template_kwargs: variable by variable, a row's come before the run's, by any of their names."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}a={{ a }} b={{ b }} t={{ enable_thinking }}"
    run = TemplateOptions(kwargs={"a": 1, "b": 2})
    by_name = {"prompt": "Hi ", "chat_template_kwargs": {"b": 3}, "think": False}
    for row in by_name, {"prompt": "Hi ", "chat_template_kwargs": {"b": 3, "enable_thinking": False}}:
        assert text_of(encode(row, template, template=run)) == "Hi a=1 b=3 t=False"
    by_params = encode(
        {"prompt": "Hi "}, template, template=run, params={"think": True, "chat_template_kwargs": {"a": 7}}
    )
    assert text_of(by_params) == "Hi a=7 b=2 t=True"


LEVELS = "{% for m in messages %}{{ m.content }}{% endfor %} {{ reasoning_effort }}"
SWITCH = "{% for m in messages %}{{ m.content }}{% endfor %} {{ enable_thinking }}"


def test_reasoning_effort_goes_to_templates_that_know_it() -> None:
    """Guards levels, which are variables of the template; the row's own come before those of the run."""
    low, off = {"prompt": "Hi", "reasoning_effort": "low"}, {"prompt": "Hi", "reasoning_effort": "none"}
    assert text_of(encode(low, LEVELS)) == "Hi low" and text_of(encode(off, LEVELS)) == "Hi none"
    assert text_of(encode(off, SWITCH)) == "Hi False" and text_of(encode(low, LEVELS + SWITCH)) == "Hi lowHi True"
    run: dict[str, Any] = {"params": {"reasoning_effort": "high"}}
    assert text_of(encode({"prompt": "Hi"}, LEVELS, **run)) == "Hi high"
    assert text_of(encode(low, LEVELS, **run)) == "Hi low"
    own = {"prompt": "Hi", "think": False}
    assert text_of(encode(own, SWITCH + LEVELS, **run)) == "Hi FalseHi high"
    assert text_of(encode({"prompt": "Hi", "raw": True}, LEVELS, **run)) == "<|bos|>Hi"


def test_reasoning_effort_counts_in_keys_as_variables() -> None:
    """Guards files of older versions, whose keys have the variables that an effort stands for."""
    low = {"prompt": "Hi", "reasoning_effort": "low"}
    as_variables = {"prompt": "Hi", "chat_template_kwargs": {"reasoning_effort": "low", "enable_thinking": True}}
    assert encode(low, LEVELS).key == encode(as_variables, LEVELS).key != encode({"prompt": "Hi"}, LEVELS).key
    off, by_switch = {"prompt": "Hi", "reasoning_effort": "none"}, {"prompt": "Hi", "enable_thinking": False}
    assert encode(off, SWITCH).key == encode(by_switch, SWITCH).key


def test_reasoning_effort_without_levels_is_refused() -> None:
    """Guards rows, and a run whose every row would be one, against an effort that nothing follows."""
    low = {"prompt": "Hi", "reasoning_effort": "low"}
    needs = "reasoning_effort needs a chat template that has levels"
    assert error_of(low) == f"line 1: {needs}."
    assert error_of(low, SWITCH).endswith('; "none" turns the thinking of this one off, and thinking_budget bounds it.')
    for without in (low | {"raw": True}, {"prompt_token_ids": [1], "reasoning_effort": "low"}):
        assert needs in error_of(without, LEVELS)
    assert needs in error_of(low, None)
    with pytest.raises(RequestError, match=needs):
        processor(SWITCH, params={"reasoning_effort": "low"})


def test_a_message_is_continued() -> None:
    """Guards continue_final_message and add_generation_prompt."""
    messages = [USER, {"role": "assistant", "content": "Hello w"}]
    open_end = encode({"messages": messages, "continue_final_message": True})
    assert text_of(open_end).endswith("<|im_start|>assistant\nHello w")
    closed = encode({"messages": messages, "add_generation_prompt": False})
    assert text_of(closed).endswith("Hello w<|im_end|>\n")


def test_a_system_message_comes_from_the_row_first() -> None:
    """Guards ollama's `system` and a row's own message, which count more than --system; plain texts have none."""
    asked = {"prompt": "Hi", "system": "Be brief."}
    assert text_of(encode(asked, system="Be kind.")).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    own = {"messages": [{"role": "system", "content": "Be odd."}, USER]}
    assert text_of(encode(own, system="Be kind.")) == text_of(encode(own))
    for row in ({"prompt": "Hi"}, {"messages": [USER]}):
        assert text_of(encode(row, system="Be kind.")).startswith("<|im_start|>system\nBe kind.<|im_end|>")
    assert text_of(encode({"prompt": "Hi", "raw": True}, system="Be kind.")) == "<|bos|>Hi"
    assert text_of(encode({"prompt": "Hi"}, None, system="Be kind.")) == "<|bos|>Hi"


OTHER = {"type": "function", "function": {"name": "hear"}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": [USER], "continue_final_message": True, "add_generation_prompt": True}, "ask for one of them"),
    ({"messages": [USER], "continue_final_message": 1}, "must be true or false"),
    ({"messages": [{"role": "system", "content": "s"}], "system": "Be brief."}, "both system and a message"),
    ({"prompt": "Hi", "system": 3}, "system must be a string"),
    ({"prompt": "Hi", "id": "a", "custom_id": "b"}, "two names of one thing"),
    ({"prompt": "Hi", "id": 1, "custom_id": 1.0}, "two names of one thing"),
    ({"prompt": "Hi", "custom_id": [1]}, "custom_id must be a string or a number"),
    ({"tool_choice": OTHER}, "line 1: tool_choice names 'hear', which is not one of the tools"),
    ({"tool_choice": "any"}, "tool_choice must be auto, none, required or"),
    ({"tool_choice": "required", "tools": []}, "there are no tools"),
    ({"tool_choice": {"type": "allowed_tools"}}, "allowed_tools is not available"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls must be true or false"),
]


@pytest.mark.parametrize(("fields", "sentence"), WRONG)
def test_what_is_wrong_is_said(fields: dict[str, Any], sentence: str) -> None:
    """Guards wishes that contradict each other, and values that nobody would read."""
    asked = fields if "prompt" in fields or "messages" in fields else {"prompt": "a", "tools": [TOOL]} | fields
    assert sentence in error_of(asked, QWEN3)


@pytest.mark.parametrize(
    "fields",
    [{"system": "s"}, {"enable_thinking": False}, {"continue_final_message": True}, {"tools": [TOOL]}],
)
def test_a_template_that_is_not_used_cannot_be_told_anything(fields: dict[str, Any]) -> None:
    """Guards rows whose wishes nobody would read: raw, by --raw, or for a model without a chat template."""
    assert "need" in error_of({"prompt": "Hi", "raw": True, **fields})
    assert "need" in error_of({"prompt_token_ids": [5], **fields})
    assert "and --raw skips it" in error_of({"prompt": "Hi", **fields}, raw=True)
    assert "and this model has none" in error_of({"prompt": "Hi", **fields}, None)


def test_custom_id_is_the_id_of_a_row() -> None:
    """Guards rows in cbatch's own form with OpenAI's name for an id: one name, one key, one seed."""
    by_id, by_custom_id = (encode({"prompt": "Hi", name: "a"}) for name in ("id", "custom_id"))
    assert by_custom_id.id == "a" and by_custom_id.extra == {} and by_custom_id.call is None
    assert (by_id.key, by_id.seed) == (by_custom_id.key, by_custom_id.seed)
    assert encode({"prompt": "Hi", "custom_id": 4}).id == 4
    assert encode({"prompt": "Hi", "id": "a", "custom_id": "a"}).key == by_id.key


def test_a_forced_call_is_compiled() -> None:
    """Guards tool_choice in all of its forms, parallel_tool_calls, and templates that would drop the tools."""
    compiled: list[ToolChoice | None] = []
    asked = {"prompt": "a", "tools": [TOOL]}
    for choice in "auto", "none", "required", NAMED:
        encode(asked | {"tool_choice": choice}, QWEN3, compiled=compiled)
    assert compiled == [None, None, ToolChoice(), ToolChoice("look")]
    assert "takes no tools" in error_of(asked)
    assert [encode(asked | {"parallel_tool_calls": one}, QWEN3).max_calls for one in (True, False)] == [None, 1]


def request(inputs: InputProcessor, fields: dict[str, Any], params: SamplingParams | None = None) -> SamplingParams:
    """The effective parameters of a row."""
    made = inputs.process(read_prompt(fields, 0, {}), lambda: b"", params)
    assert isinstance(made, Request), made
    return made.params


def test_parameters_come_in_layers() -> None:
    """Guards the order: the model's own, those of the run, then those of the row; an object replaces the first two."""
    model = replace(processor().inputs._model, default_params=SamplingParams(temperature=0.5, top_k=7, regex="a"))
    run = InputProcessor(model, RequestDefaults(params={"top_k": 8, "max_new_tokens": 9}))
    assert request(run, {"prompt": "a"}) == SamplingParams(temperature=0.5, top_k=8, max_tokens=9, regex="a")
    row = {"prompt": "a", "top_k": 0, "choice": ["x"], "stop": None}
    form = InputProcessor(model, RequestDefaults(params={"response_format": {"type": "json_object"}}))
    assert request(form, {"prompt": "a"}).response_format and request(form, row).choice == ("x",)
    assert request(run, row) == SamplingParams(temperature=0.5, top_k=0, max_tokens=9, choice=["x"])
    whole = SamplingParams(min_p=0.5, grammar="start: /a/")
    assert request(run, {"prompt": "a"}, whole) == whole
    assert request(run, row, whole) == SamplingParams(min_p=0.5, top_k=0, choice=["x"])
    for one, other in ((1, True), (1, 1.0)):  # which are equal, and only the first is a whole number
        assert request(run, {"prompt": "a", "n": one}).n == 1
        wrong = run.process(read_prompt({"prompt": "a", "n": other}, 0, {}), lambda: b"")
        assert isinstance(wrong, Completion) and "n must be a whole number" in str(wrong.error)


def test_a_prompt_that_does_not_fit_does_not_wait_for_the_engine() -> None:
    """Guards memory: rows whose prompts are too long are finished at once, and keep none of their tokens."""
    whole, refused = (
        processor().process(Line(0, json.dumps({"prompt_token_ids": [300] * count, "max_tokens": 1}).encode()))
        for count in (LONGEST, LONGEST + 1)
    )
    assert isinstance(whole, Request) and isinstance(refused, Completion) and refused.error is not None
    assert refused.error.code == "prompt_too_long" and str(refused.error).startswith("line 1: The prompt has 1025 ")


@pytest.mark.parametrize("broken", ["encode_chat", "compile"])
def test_what_nobody_foresaw_fails_its_row_only(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the other rows against a template, a tokenizer or a compiler that raises anything."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("oops")

    inputs = processor().inputs
    good = inputs.process(read_prompt({"prompt": "a", "raw": True}, 0, {}), lambda: b"")
    if broken == "compile":
        inputs = InputProcessor(replace(inputs._model, compile=fail), RequestDefaults())
    else:
        monkeypatch.setattr(ChatTokenizer, broken, fail)
    lines = LineProcessor(inputs)
    made = lines.process(Line(4, b'{"prompt": "a", "id": "x"}'))
    assert isinstance(made, Completion) and made.error is not None and made.id == "x"
    assert (made.error.code, str(made.error)) == (
        "internal_error",
        "line 5: the prompt cannot be encoded: ZeroDivisionError('oops')",
    )
    monkeypatch.undo()
    assert made.key == lines.key(Line(4, b'{ "id": "x", "prompt": "a" }')), "the key is not that of the row"
    assert isinstance(good, Request) and good.prompt_ids == [0, 67]


def test_the_key_of_a_refused_row_comes_from_its_bytes() -> None:
    """Guards --resume: a row that is refused before it is read has no other key, and one with a wrong prompt has."""
    lines = processor()
    refused = [lines.process(Line(0, data)).key for data in (b'{"prompt": 5}', b'{"prompt":5}', b'{"prompt": 5}')]
    assert refused[0] == refused[2] != refused[1]
    read = [
        lines.process(Line(0, data)) for data in (b'{"messages": [{"role": "r", "content": ""}]}', b'{"prompt": ""}')
    ]
    assert [isinstance(one, Completion) and one.error is not None and one.error.code for one in read] == [
        "template_error",
        "invalid_row",
    ]
    assert read[0].key == lines.key(Line(0, b'{ "messages": [{"content": "", "role": "r"}]}'))
