"""Events of a request become the same answer whether it is read as a stream or as a whole."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from cbatch.base.errors import RequestError
from cbatch.base.outputs import FinishReason, TokenEvent, TokenLogprobs
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.requests.completion import Choice, Completion, Timing, Usage
from cbatch.requests.output_processor import OutputProcessor, StreamEvent
from cbatch.text.detokenizer import IncrementalDetokenizer
from cbatch.text.loading import of_transformers
from cbatch.text.replies.stream import NO_TEXT, NOT_CLOSED
from cbatch.text.tokenizer import ChatTokenizer
from tests.support.chat_templates import DEEPSEEK_R1, LLAMA3, MISTRAL_LIST, MISTRAL_NAMED, QWEN3
from tests.support.model_folder import make_tokenizer
from tests.support.tool_calls import TOOLS, make_chat_tokenizer

EOS = 2
HERMES = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
LLAMA = '{"name": "get_weather", "parameters": {"city": "Köln"}}'
THOUGHT = "<think>\nhm, 😀\n</think>\n\n"

ANSWERS: dict[str, tuple[str, list[tuple[str, str, str | None, int]]]] = {
    "Qwen": (
        QWEN3,
        [
            ("Hello wörld 😀", "Hello wörld 😀", None, 0),
            (f"{THOUGHT}Yes.", "Yes.", "hm, 😀", 0),
            (f"{THOUGHT}So:\n{HERMES}\n{HERMES}", "So:", "hm, 😀", 2),
            ("<think>\nwithout end", "", "without end", 0),
            ("<thi", "<thi", None, 0),
            ("<think>\nhm </th", "", "hm </th", 0),
            ("a <tool_call>\n{no JSON", "a <tool_call>\n{no JSON", None, 0),
            ("", "", None, 0),
            (" \n", " \n", None, 0),
        ],
    ),
    "DeepSeek, opened by the prompt": (
        DEEPSEEK_R1,
        [("hm\n</think>\n\nYes.", "Yes.", "hm", 0), ("no end", "no end", None, 0), ("</think>Yes.", "Yes.", None, 0)],
    ),
    "Mistral, list": (
        MISTRAL_LIST,
        [('Look: [TOOL_CALLS] [{"name": "now", "arguments": {}}]', "Look:", None, 1), ("[TOOL_", "[TOOL_", None, 0)],
    ),
    "Mistral, names": (MISTRAL_NAMED, [('[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]get{"leaf": []}', "", None, 2)]),
    "Llama": (
        LLAMA3,
        [(LLAMA, "", None, 1), (f"<|python_tag|>{LLAMA}", "", None, 1), ('{"name": 1}', '{"name": 1}', None, 0)],
    ),
}
each = pytest.mark.parametrize("name", ANSWERS)
QWEN = "Qwen"


@cache
def tokenizer_of(name: str) -> ChatTokenizer:
    return make_chat_tokenizer(ANSWERS[name][0])


def make_request(name: str, key: str = "k" * 32, **params: Any) -> Request:
    """A request of a conversation with tools, as the InputProcessor makes it."""
    tokenizer = tokenizer_of(name)
    prompt_ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}], tools=TOOLS)
    return Request(
        prompt_ids=prompt_ids,
        params=SamplingParams(**params),
        is_reply=True,
        tags=tokenizer.visible_tokens(with_calls=True),
        opens_thinking=tokenizer.opens_thinking(prompt_ids),
        tools=TOOLS,
        index=4,
        id="row",
        key=key,
    )


def ids_of(name: str, text: str) -> list[int]:
    """The tokens of an answer, with those of its tags, and the end token."""
    return [*tokenizer_of(name).backend.encode(text, add_special_tokens=False).ids, EOS]


def events_of(token_ids: Sequence[int], sample_index: int = 0, finish_reason: Any = "stop") -> list[TokenEvent]:
    events = [TokenEvent(1, token_id, sample_index=sample_index) for token_id in token_ids]
    return [*events[:-1], events[-1]._replace(finish_reason=finish_reason)]


def shuffled(outputs: Sequence[list[TokenEvent]], seed: int) -> list[TokenEvent]:
    """The events of several outputs in a random order that keeps the order of each."""
    rest, order = [list(output) for output in outputs], random.Random(seed)
    return [order.choice([output for output in rest if output]).pop(0) for _ in range(sum(map(len, outputs)))]


def run(
    request: Request, tokenizer: ChatTokenizer | None, events: Sequence[TokenEvent]
) -> tuple[list[StreamEvent], Completion]:
    """Results for a reader of the stream, and for one who waits for the end."""
    outputs, waiting = (OutputProcessor(request, tokenizer, frozenset([EOS])) for _ in range(2))
    read: list[StreamEvent] = []
    for event in events:
        outputs.take(event)
        waiting.take(event)
        if not outputs.is_read:
            read.append(outputs.read(event))
    assert outputs.is_read and outputs.is_finished and waiting.is_finished
    return read, waiting.completion()


def check_stream(read: Sequence[StreamEvent], completion: Completion) -> None:
    """The deltas joined are the completion, which comes with the last event and equals the other."""
    assert all(event.index == 4 for event in read)
    last = read[-1].completion
    assert last == completion and all(event.completion is None for event in read[:-1]) and last is not None
    assert last.choices == completion.choices and last.usage == completion.usage
    for choice in completion.choices:
        mine = [event for event in read if event.sample_index == choice.index]
        assert "".join(event.text for event in mine) == choice.text
        # Reasoning that nothing closes has been shown when it turns out to be the text.
        reasoning = choice.text if choice.note == NOT_CLOSED else choice.reasoning
        assert ("".join(event.reasoning for event in mine) or None) == reasoning
        assert [event.token_id for event in mine] == list(choice.token_ids)
        assert [event.finish_reason for event in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]


@each
def test_a_stream_gives_what_the_completion_gives(name: str) -> None:
    """Guards text, reasoning, calls and ends of several outputs at once, in each model's format."""
    tokenizer, answers = tokenizer_of(name), ANSWERS[name][1]
    request = make_request(name, n=len(answers))
    outputs = [events_of(ids_of(name, text), number) for number, (text, *_) in enumerate(answers)]
    for seed in range(3):
        read, completion = run(request, tokenizer, shuffled(outputs, seed))
        check_stream(read, completion)
        for choice, (_, text, reasoning, num_calls) in zip(completion.choices, answers, strict=True):
            assert (choice.text, choice.reasoning, len(choice.tool_calls)) == (text, reasoning, num_calls)
            assert choice.finish_reason == ("tool_calls" if num_calls else "stop")


@pytest.mark.parametrize(
    ("written", "reason", "ends", "text", "num_calls"),
    [(HERMES, "length", False, "", 1), ("abc", "stop", True, "ab", 0), ("abc", "length", True, "abc", 0)],
)
def test_ends(written: str, reason: FinishReason, ends: bool, text: str, num_calls: int) -> None:
    """Guards outputs that are cut off behind a call, and end tokens, which are text if something else ended it."""
    token_ids = ids_of(QWEN, written)[:-1]
    request = make_request(QWEN, stop_token_ids=token_ids[-1:] if ends else [])
    read, completion = run(request, tokenizer_of(QWEN), events_of(token_ids, finish_reason=reason))
    check_stream(read, completion)
    assert (completion.text, completion.finish_reason, len(completion.tool_calls)) == (text, reason, num_calls)


def test_ids_of_calls() -> None:
    """Guards the results of calls: their ids differ within an answer and between rows, and never change."""
    outputs = [events_of(ids_of(QWEN, HERMES * 2), number) for number in range(2)]

    def ids(key: str) -> list[str]:
        _, completion = run(make_request(QWEN, key, n=2), tokenizer_of(QWEN), shuffled(outputs, 0))
        return [call.id for choice in completion.choices for call in choice.tool_calls]

    assert ids("a") == ids("a") and len({*ids("a"), *ids("b")}) == 8
    assert all(len(one) == 9 and one.isalnum() and one.isascii() for one in ids("a"))


@each
def test_random_tokens(name: str) -> None:
    """Guards streams of random models: parts of characters, and tags in places where no model writes them."""
    tokenizer, order = tokenizer_of(name), random.Random(name)
    size = tokenizer.backend.tokenizer.get_vocab_size()
    for seed in range(20):
        request = make_request(name, n=2, skip_special_tokens=seed % 2 == 0)
        ids = [order.choice([order.randrange(3, size), order.randrange(size - 9, size)]) for _ in range(60)]
        outputs = [events_of(ids[number::2], number, "length") for number in range(2)]
        check_stream(*run(request, tokenizer, shuffled(outputs, seed)))


def test_text_that_the_engine_made_is_not_made_again() -> None:
    """Guards requests with stop strings, whose text ends in the middle of a token."""
    request = make_request(QWEN, stop=["end"])
    texts = ["<thi", "nk>\nhm</th", "ink>\n", "\nA", "", "nswer"]
    events = [TokenEvent(1, 5, text=text) for text in texts]
    events.append(TokenEvent(1, 6, text=" ", finish_reason="stop", stop_reason="end"))
    read, completion = run(request, tokenizer_of(QWEN), events)
    check_stream(read, completion)
    assert (completion.text, completion.reasoning, completion.stop_reason) == ("Answer ", "hm", "end")
    assert "".join(event.raw for event in read) == "".join(texts) + " "


@pytest.mark.parametrize("n", [0, 2], ids=["no token", "two outputs"])
def test_an_echo_comes_once_in_each_output(n: int) -> None:
    """Guards `echo`: the prompt is in front of the first text, also if no token follows."""
    tokenizer = tokenizer_of(QWEN)
    params = SamplingParams(echo=True, max_tokens=5 * n, n=max(n, 1))
    request = Request(prompt_ids=tokenizer.encode("Once upon"), params=params, index=4)
    outputs = [events_of(ids_of(QWEN, " a time"), number) for number in range(n)]
    events = shuffled(outputs, 0) or [TokenEvent(1, None, finish_reason="length")]
    read, completion = run(request, tokenizer, events)
    if n:
        check_stream(read, completion)
    assert [choice.text for choice in completion.choices] == (["Once upon a time"] * n or ["Once upon"])
    assert read[-1].completion == completion and "".join(event.raw for event in read).count("Once") == 0


def test_logprobs_name_their_tokens() -> None:
    """Guards names and bytes of tokens, alternatives, and special tokens that the text leaves out."""
    tokenizer = tokenizer_of(QWEN)
    token_ids = ids_of(QWEN, "é")
    scored = [TokenLogprobs(token_id, -0.5, ((token_id, -0.5), (EOS, -3.0))) for token_id in token_ids]
    events = [event._replace(logprobs=one) for event, one in zip(events_of(token_ids), scored, strict=True)]
    events[0] = events[0]._replace(prompt_logprobs=scored[:1] * 2)
    request = replace(make_request(QWEN, logprobs=2, prompt_logprobs=2), prompt_ids=[0, 7, 7])
    read, completion = run(request, tokenizer, events)
    check_stream(read, completion)
    found = completion.logprobs
    assert found is not None and [event.logprobs for event in read] == list(found)
    assert [one.data for one in found] == [b"\xc3", b"\xa9", b"<|im_end|>"] and b"".join(
        one.data or b"" for one in found[:2]
    ).decode() == "é"
    assert [one.token for one in found] == ["\ufffd", "\ufffd", "<|im_end|>"]
    assert [one.in_text for one in found] == [True, True, False]
    assert [(top.token_id, top.logprob, top.top) for top in found[0].top] == [(token_ids[0], -0.5, ()), (EOS, -3.0, ())]
    shown, _ = run(replace(request, params=replace(request.params, skip_special_tokens=False)), tokenizer, events)
    assert all(event.logprobs is not None and event.logprobs.in_text for event in shown)
    prompt = completion.prompt_logprobs
    assert (
        prompt is not None and [(one.token_id, one.logprob) for one in prompt[:1]] == [(0, None)] and len(prompt) == 3
    )


def test_without_a_tokenizer_there_are_token_ids() -> None:
    """Guards models without a tokenizer: no text, names of tokens all the same, and null in the row."""
    request = Request(prompt_ids=[3, 4], params=SamplingParams(logprobs=0, echo=True), index=4)
    events = [event._replace(logprobs=TokenLogprobs(9, -1.0, ())) for event in events_of([9, 9])]
    read, completion = run(request, None, events)
    check_stream(read, completion)
    assert completion.text == "" and completion["text"] is None and completion.token_ids == [9, 9]
    assert completion.logprobs is not None and completion.logprobs[0][:4] == ("token_id:9", 9, -1.0, None)


def test_usage_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the counts of several outputs, of which the first one knows the cached tokens, and the times."""
    request, clock = make_request(QWEN, n=2), itertools.count(5.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    outputs = [
        [event._replace(cached_tokens=8 - number) for event in events_of([5] * 3, number)] for number in range(2)
    ]
    processor = OutputProcessor(request, tokenizer_of(QWEN), frozenset([EOS]))
    for event in [*outputs[0], *outputs[1]]:
        processor.take(event)
    completion = processor.completion()
    assert completion.usage == Usage(len(request.prompt_ids), 6, 8) and completion.timing == Timing(5.0, 6.0, 7.0)


def test_a_failed_output_fails_its_request() -> None:
    """Guards the readers of a request of which outputs fail: one error, the first output's, and an end for both."""
    error = RequestError("nan_logits", "The logits are NaN.")
    good, bad = events_of(ids_of(QWEN, "fine")), events_of([5, 6], 1)
    bad[-1] = bad[-1]._replace(token_id=None, finish_reason="error", error=error)
    request = replace(make_request(QWEN, n=2), index=4, where="line 5")
    for events in ([*good, *bad], [*bad, *good], shuffled([good, bad], 1)):
        read, completion = run(request, tokenizer_of(QWEN), events)
        assert str(completion.error) == "line 5: The logits are NaN." and completion.error is not None
        assert (completion.error.code, completion.choices) == ("nan_logits", (Choice(finish_reason="error"),))
        assert (read[-1].error, read[-1].finish_reason, read[-1].completion) == (error, "error", completion)
    processor = OutputProcessor(make_request(QWEN, n=3), tokenizer_of(QWEN), frozenset([EOS]))
    for number in (2, 0, 1):
        processor.take(bad[-1]._replace(error=RequestError("internal_error", f"{number}"), sample_index=number))
    assert str(processor.completion().error) == "0"


def test_text_that_cannot_be_made_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards readers against what a tokenizer raises: both get the request's error, and the stream ends with it."""
    push_all = IncrementalDetokenizer.push_all

    def broken(self: IncrementalDetokenizer, token_ids: Sequence[int]) -> str:
        if 9 in token_ids:
            raise ValueError("no such token")
        return push_all(self, token_ids)

    monkeypatch.setattr(IncrementalDetokenizer, "push_all", broken)
    first, second = events_of([5, 5, 5, EOS]), events_of([5, 9, 5, EOS], 1)
    events = [event for pair in zip(first, second, strict=True) for event in pair]
    read, completion = run(make_request(QWEN, n=2), tokenizer_of(QWEN), events)
    assert completion.error is not None and completion.error.code == "internal_error"
    assert len(read) == 4 and read[-1].completion == completion and str(read[-1].error) == str(completion.error)
    assert all(event.completion is None for event in read[:-1])


@pytest.mark.parametrize("name", [QWEN, "DeepSeek, opened by the prompt"])
@pytest.mark.parametrize("is_token", [True, False])
def test_reasoning_is_counted_up_to_its_closing_tag(name: str, is_token: bool) -> None:
    """Guards `reasoning_tokens`, also of a tag that takes several tokens, and nothing for answers without reasoning."""
    tokenizer, opened = tokenizer_of(name), "" if name != QWEN else "<think>\n"
    tag = "</think>" if is_token else "</think"
    thought = ids_of(name, f"{opened}hm, 😀, and more of it\n{tag}")[:-1]
    if not is_token:
        thought += [token for token in ids_of(name, "xxx>")[:-1] if tokenizer.decode([token]) == ">"]
    assert (tokenizer.backend.token_to_id("</think>") in thought) == is_token
    outputs = [[*thought, *ids_of(name, "\n\nYes, </think> is a tag.")], ids_of(name, f"{opened}hm"), thought]
    outputs.append(ids_of(name, "No.") if opened else ids_of(name, "</think>No."))
    for count, expected in enumerate(itertools.accumulate((len(thought), len(outputs[1]), len(thought), 0)), start=1):
        ends = ["stop", "length", "stop", "stop"]
        events = [event for number in range(count) for event in events_of(outputs[number], number, ends[number])]
        completion = run(make_request(name, n=count), tokenizer, events)[1]
        assert completion.usage.reasoning_tokens == expected
        assert completion["usage"]["reasoning_tokens"] == expected


def test_what_is_cut_off_is_no_call_and_no_answer() -> None:
    """Guards rows and streams of outputs that `max_tokens` ends: inside a call, inside reasoning, inside a tag."""
    tokenizer, request = tokenizer_of(QWEN), make_request(QWEN)
    cut = [
        ('So. <tool_call>\n{"name": "now"', "So.", None),
        ("<think>\nhm", "", "hm"),
        ("<think>hm</think>Yes. <too", "Yes.", "hm"),
    ]
    for written, text, reasoning in cut:
        ids = ids_of(QWEN, written)[:-1]
        read, completion = run(request, tokenizer, events_of(ids, finish_reason="length"))
        check_stream(read, completion)
        assert (completion.text, completion.reasoning, completion.tool_calls) == (text, reasoning, ())
        assert completion.finish_reason == "length" and completion.note is None
    _, completion = run(request, tokenizer, events_of(ids_of(QWEN, "<think>\nhm")))
    assert (completion.text, completion.reasoning, completion.note) == ("", "hm", NO_TEXT)


def test_tags_that_are_special_tokens_are_seen() -> None:
    """Guards formats whose markup is special tokens, which a text leaves out, and other special tokens."""
    theirs = make_tokenizer()
    tags = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<|other|>"]
    theirs.add_special_tokens({"extra_special_tokens": tags})
    theirs.chat_template = "{{ messages[0].content }}<|channel|>analysis<|message|>"
    tokenizer = ChatTokenizer(of_transformers(theirs))
    assert set(tokenizer.visible_tokens(with_calls=False)) == set(tags) - {"<|other|>"}
    request = Request(is_reply=True, prompt_ids=[5], tags=tokenizer.visible_tokens(with_calls=False))
    written = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi<|other|>"
    ids = [*tokenizer.backend.encode(written, add_special_tokens=False).ids, EOS]
    read, completion = run(request, tokenizer, events_of(ids))
    assert (completion.text, completion.reasoning) == ("Hi", "hm")
    assert "".join(event.text for event in read) == "Hi"
