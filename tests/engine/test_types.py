"""Types that the engine takes and gives: mypy reads this module, and every call in it is made, too.

A wrong type has a comment that tells mypy to expect an error; mypy reports the comment if there is none.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, assert_type, get_args, get_origin, get_type_hints

import pytest

from cbatch import (
    CbatchError,
    Choice,
    Completion,
    Completions,
    Engine,
    EngineConfig,
    RequestError,
    SamplingParams,
    Score,
    StreamEvent,
    TokenLogprob,
    ToolCall,
)
from cbatch.base.config import EngineOptions
from cbatch.base.params import Converted, SamplingOptions


class Row(TypedDict):
    """A row whose type a program declares."""

    prompt: str
    max_tokens: int


PARAMS = SamplingParams(max_tokens=2)
USER = {"role": "user", "content": "Hi"}
WEATHER: dict[str, object] = {"type": "function", "function": {"name": "weather", "parameters": None}}


def test_one_prompt_gives_one_completion(engine: Engine) -> None:
    """Guards the overloads: programs with a type checker need no cast."""
    objects: dict[str, object] = {"prompt": "Hi"}
    mapping: Mapping[str, Any] = objects
    row: Row = {"prompt": "Hi", "max_tokens": 2}
    assert_type(engine.generate("Hi", PARAMS), Completion)
    assert_type(engine.generate([5, 6], PARAMS), Completion)
    assert_type(engine.generate(range(5, 8), PARAMS, seed=None, progress=False), Completion)
    assert_type(engine.generate({"prompt": "Hi", "max_tokens": 2}), Completion)
    assert_type(engine.generate(objects, {"max_tokens": 2, "stop": ["a"]}), Completion)
    assert_type(engine.generate(mapping, PARAMS), Completion)
    assert_type(engine.generate(row), Completion)


def test_several_prompts_give_a_list(engine: Engine) -> None:
    """Guards lists of each kind and of several, collections that are no lists, and parameters for each prompt."""
    texts: list[str] = ["Hi", "Ho"]
    objects: list[dict[str, object]] = [{"prompt": "Hi"}]
    mappings: Sequence[Mapping[str, Any]] = objects
    declared: list[Row] = [{"prompt": "Hi", "max_tokens": 2}]
    numbers: list[dict[str, float]] = [{"max_tokens": 2}] * 2
    assert_type(engine.generate(texts, PARAMS), Completions)
    assert_type(engine.generate(deque(texts), numbers[0]), Completions)
    assert_type(engine.generate([(5, 6), (7,)], numbers), Completions)
    assert_type(engine.generate(["Hi", [5, 6], {"prompt": "Hi"}], PARAMS), Completions)
    assert_type(engine.generate([{"prompt": "Hi"}, {"messages": [USER]}], (PARAMS, PARAMS)), Completions)
    assert_type(engine.generate(objects, PARAMS), Completions)
    assert_type(engine.generate(mappings, [PARAMS]), Completions)
    assert_type(engine.generate(declared), Completions)
    assert_type(engine.generate(texts, [None, {"max_tokens": 2}])[1:], list[Completion])


def test_chats(engine: Engine) -> None:
    """Guards conversations and the options of a chat."""
    messages: list[dict[str, str]] = [USER]
    objects: list[dict[str, object]] = [{"role": "user", "content": "Hi"}]
    history: Sequence[Mapping[str, Any]] = messages
    assert_type(engine.chat("Hi", PARAMS), Completion)
    assert_type(engine.chat(messages, PARAMS, chat_template_kwargs={"enable_thinking": False}), Completion)
    assert_type(engine.chat(objects, PARAMS), Completion)
    assert_type(engine.chat(history, PARAMS), Completion)
    with pytest.raises(RequestError, match="takes no tools"):
        assert_type(engine.chat(messages, tools=[WEATHER], tool_choice="auto", parallel_tool_calls=False), Completion)
    assert_type(engine.chat((messages, messages), PARAMS, seed=None), Completions)
    assert_type(engine.chat([objects], PARAMS), Completions)


def test_streams_and_asyncio(engine: Engine) -> None:
    """Guards the types of events, and those of the methods for asyncio."""
    with engine.stream(["Hi", "Ho"], PARAMS) as stream:
        for event in stream:
            assert_type(event, StreamEvent)
            assert_type(event.text, str)
            assert_type(event.completion, Completion | None)

    async def main() -> None:
        assert_type(await engine.agenerate("Hi", PARAMS), Completion)
        assert_type(await engine.agenerate(["Hi", [5]], PARAMS), Completions)
        async with engine.astream("Hi", PARAMS) as stream:
            async for event in stream:
                assert_type(event, StreamEvent)
        assert_type(await engine.achat([USER], PARAMS), Completion)
        assert_type(await engine.achat([[USER]], PARAMS, max_tokens=1), Completions)
        assert_type(await engine.ascore("Hi"), Score)
        assert_type(await engine.ascore(["Hi"], [" there"]), list[Score])
        async for done in engine.amap(["Hi"], params=PARAMS):
            assert_type(done, Completion)

    asyncio.run(main())
    objects: list[dict[str, object]] = [{"prompt": "Hi"}]
    assert_type(list(engine.map(objects, params={"max_tokens": 2})), list[Completion])


def test_scores(engine: Engine) -> None:
    """Guards the overloads of `score`."""
    texts: list[str] = ["Hi", "Ho"]
    assert_type(engine.score("Hi"), Score)
    assert_type(engine.score("Hi", " there", top=2), Score)
    assert_type(engine.score([5, 6], [7]), Score)
    assert_type(engine.score(texts), list[Score])
    assert_type(engine.score(texts, (" a", " b")), list[Score])
    assert_type(engine.score([[5], [6]], [[7], [8]]), list[Score])
    assert_type(engine.score("Hi").tokens, Sequence[TokenLogprob])


def test_completions(engine: Engine) -> None:
    """Guards what programs read of a result, and that it is a mapping."""
    completion = engine.generate("Hi", PARAMS)
    assert_type(completion.choices, tuple[Choice, ...])
    assert_type(completion.text, str)
    assert_type(completion.reasoning, str | None)
    assert_type(completion.tool_calls, tuple[ToolCall, ...])
    assert_type(completion.error, RequestError | None)
    assert_type(completion.logprobs, Sequence[TokenLogprob] | None)
    assert_type(completion.usage.total_tokens, int)
    assert_type(completion.raise_for_error(), Completion)
    assert_type(completion.to_dict(), dict[str, Any])
    mapping: Mapping[str, object] = completion
    assert mapping["text"] == completion.text


@pytest.mark.parametrize(
    ("record", "options", "apart"), [(SamplingParams, SamplingOptions, "seed"), (EngineConfig, EngineOptions, "model")]
)
def test_options_of_calls_are_the_fields_of_their_record(record: Any, options: Any, apart: str) -> None:
    """Guards a new field that a call would take, and a type checker or an editor would not know."""
    wider = {"dtype", "chat_template"}  # a torch.dtype and a path, which the record has as texts
    held, taken = get_type_hints(record), get_type_hints(options)
    assert list(taken) == [name for name in held if name != apart]
    for name in taken.keys() - wider:
        given = get_args(held[name])[0] if get_origin(held[name]) is Converted else held[name]
        assert taken[name] == given, name


def test_sampling_parameters_of_a_call(engine: Engine) -> None:
    """Guards the shortest way to write a call, and that a checker knows its types."""
    assert_type(engine.generate("Hi", max_tokens=2, stop="x"), Completion)
    assert_type(engine.generate(["Hi"], temperature=1), Completions)
    assert_type(engine.chat([USER], max_tokens=2, tools=[]), Completion)


def test_wrong_types_are_refused_in_both_ways(engine: Engine) -> None:
    """Guards users with a type checker, who see an error at once, and those without one."""
    wrong: list[Callable[[], object]] = [
        lambda: engine.generate(5),  # type: ignore[call-overload]
        lambda: engine.generate(text for text in ["Hi"]),  # type: ignore[call-overload]
        lambda: engine.generate("Hi", 5),  # type: ignore[call-overload]
        lambda: engine.generate(["Hi"], [5]),  # type: ignore[list-item]
        lambda: engine.chat(USER),  # type: ignore[call-overload]
        lambda: engine.generate("Hi", max_tokens="5"),  # type: ignore[call-overload]
        lambda: engine.chat("Hi", PARAMS, tool_choice=5),  # type: ignore[call-overload]
        lambda: engine.stream("Hi", max_token=5),  # type: ignore[call-arg]
        lambda: Engine(max_seqs="3"),  # type: ignore[arg-type]
        lambda: Engine(max_seq=3),  # type: ignore[call-arg]
    ]
    for call in wrong:
        with pytest.raises((CbatchError, TypeError)):
            call()
    assert engine.score({"prompt": "Hi"}).error is not None  # type: ignore[call-overload]
