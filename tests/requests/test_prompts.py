"""The forms in which programs give prompts, conversations and parameters: each is read or refused with a sentence."""

from __future__ import annotations

import array
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from cbatch import Completion, Engine, RequestError, SamplingParams
from cbatch.base.request import Request
from cbatch.requests.prompts import list_conversations, list_prompts, read_prompt

USER = {"role": "user", "content": "Hi"}
ROW = {"messages": [USER]}
WANTED = "The prompts must be a text, token ids, a row such as {'messages': [...]}, or a list of these, not "
FEW: dict[str, Any] = {"max_tokens": 3}


def label(value: object) -> str:
    """Names a case in the same way in every process, which `str` of sets and generators does not."""
    return value[:40] if isinstance(value, str) else type(value).__name__


class Column:
    """A column of pandas, as far as it matters: a collection that is no sequence, with `tolist`."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __contains__(self, key: object) -> bool:
        return key in range(len(self.values))  # of pandas: whether it is in the index

    def tolist(self) -> list[Any]:
        return list(self.values)


class Table(Column):
    """A data frame, as far as it matters: its items are the names of its columns."""

    def iterrows(self) -> Iterator[Any]:
        raise NotImplementedError


def read(prompt: Any, **fields: Any) -> Request:
    return read_prompt(prompt, 3, fields)


def asked(row: Request) -> Any:
    """The prompt of a row without an error."""
    assert row.error is None and row.index == 3
    (found,) = (one for one in (row.text, row.messages, row.prompt_ids) if one)
    return found


@pytest.mark.parametrize(
    ("prompts", "read_as"),
    [
        ("Hi", "Hi"),
        ([7, 8], [7, 8]),
        ((7, 8), [7, 8]),
        (array.array("i", [7, 8]), [7, 8]),
        (np.array([7, 8], np.uint16), [7, 8]),
        (torch.tensor([7, 8]), [7, 8]),
        (Column(7, 8), [7, 8]),
        ({"prompt": "Hi", "max_tokens": 3}, "Hi"),
        ({"prompt_token_ids": np.array([7, 8])}, [7, 8]),
        ({"messages": (MappingProxyType(USER),)}, [USER]),
        ("a\ud800b", "a\ufffdb"),
        ({"messages": [{"role": "user", "content": "\udfff"}]}, [{"role": "user", "content": "\ufffd"}]),
        ({"messages": [{"role": "user", "content": ({"type": "text", "text": "Hi"},)}]}, [USER]),
    ],
    ids=label,
)
def test_a_single_prompt(prompts: Any, read_as: Any) -> None:
    """Guards each form of one prompt: the result is one completion, not a list of them."""
    values, is_single = list_prompts(prompts)
    assert is_single and len(values) == 1
    found = asked(read(values[0]))
    assert found == read_as and (found[0] != 7 or all(type(token_id) is int for token_id in found))


@pytest.mark.parametrize(
    ("prompts", "read_as"),
    [
        ([], []),
        (["Hi"], ["Hi"]),
        (("Hi", [7]), ["Hi", [7]]),
        ({"a": "Hi"}.values(), ["Hi"]),
        (np.array(["Hi", "Ho"]), ["Hi", "Ho"]),
        (np.array([[7, 8], [9, 9]]), [[7, 8], [9, 9]]),
        ([torch.tensor([7]), torch.tensor([9])], [[7], [9]]),
        (Column("Hi", "Ho"), ["Hi", "Ho"]),
        ([[USER], {"prompt": "Ho"}, ROW], [[USER], "Ho", [USER]]),
    ],
    ids=label,
)
def test_several_prompts(prompts: Any, read_as: list[Any]) -> None:
    """Guards lists of one, collections that are no sequences, and arrays of arrays, which have an `__index__`."""
    values, is_single = list_prompts(prompts)
    assert not is_single and [asked(read(value)) for value in values] == read_as
    for mask in ([True, False], np.array([True, False]), torch.tensor([True, False])):
        assert list_prompts(mask) == ([True, False], False), "a mask is no prompt of the ids 0 and 1"


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, f"{WANTED}NoneType."),
        (5, f"{WANTED}int."),
        (b"Hi", f"{WANTED}bytes."),
        ({"Hi", "Ho"}, f"{WANTED}set."),
        (np.array(7), f"{WANTED}ndarray."),
        ((text for text in ["Hi"]), f"{WANTED}generator; engine.map takes an iterable."),
        (Table("question", "answer"), f"{WANTED}Table; give one of its columns, or its rows."),
        (
            [USER, USER],
            "These are the messages of one conversation: give them to engine.chat, or as {'messages': [...]}.",
        ),
    ],
    ids=label,
)
def test_what_is_no_prompt_raises(prompts: Any, message: str, engine: Engine) -> None:
    """Guards against bytes taken as token ids, sets without an order, names of columns, and `engine.chat(row)`."""
    calls: list[Callable[[Any], object]] = [engine.generate, engine.stream, engine.astream, engine.score]
    for call in calls:
        with pytest.raises(RequestError) as caught:
            call(prompts)
        assert caught.value.code == "invalid_row" and str(caught.value) == message
    for wrong in (ROW, USER, *[prompts] * (not isinstance(prompts, list))):
        with pytest.raises(RequestError, match=r"^A conversation is a list of messages such as .*, not \w+[.;]"):
            engine.chat(wrong)


ONE = "a prompt must be a text, token ids or a row such as {'messages': [...]}, not "


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, f"{ONE}NoneType"),
        (1.5, f"{ONE}float"),
        (b"Hi", f"{ONE}bytes"),
        ((text for text in ["Hi"]), f"{ONE}generator"),
        ("", "prompt is empty"),
        ([], "prompt_token_ids must be a list of at least one whole number"),
        ([7, 1.5], "prompt_token_ids must be a list of at least one whole number"),
        ([7, True], "prompt_token_ids must be a list of at least one whole number"),
        (np.array([1.5]), "prompt_token_ids must be a list of at least one whole number"),
        ({}, "the row has none of messages, prompt, prompt_token_ids"),
        ({"prompt": "a", "messages": [USER]}, "the row has both messages and prompt"),
        ({"prompt": 5}, "prompt must be a string, not a number"),
        ({"prompt": [5, 6]}, "prompt must be a string, not a list; token ids go into prompt_token_ids"),
        ([USER, "Hi"], "message 2 must be an object with a role and content"),
        ({5: "a", "prompt": "Hi"}, "the names of a row's fields are texts, not int"),
        ({"prompt": "Hi", "score": float("nan")}, "the row cannot be written as JSON: Out of range float values"),
        ({"prompt": "Hi", "when": object()}, "the row cannot be written as JSON: Object of type object is not JSON"),
        ({"prompt": "Hi", "max_token": 5}, "unknown parameter 'max_token'; did you mean 'max_tokens'?"),
    ],
    ids=label,
)
def test_one_wrong_prompt_fails_alone(prompt: Any, message: str, engine: Engine) -> None:
    """Guards the prompts around a wrong one: it has an error that says what is wrong, and they have their texts."""
    before, wrong, after = engine.generate(["Hi", prompt, [7, 8]], FEW)
    assert before.error is None and after.error is None and len(before.token_ids) == len(after.token_ids) == 3
    assert wrong.error is not None and str(wrong.error).startswith(message) and wrong.finish_reason == "error"
    assert wrong.error.code == ("unknown_parameter" if "max_token'" in message else "invalid_row")
    assert (wrong.index, wrong.choices[0].text, wrong.usage.total_tokens) == (1, "", 0)
    with pytest.raises(RequestError, match=r"prompt|row|parameter|message"):
        wrong.raise_for_error()


def test_numbers_of_numpy_in_a_row(engine: Engine) -> None:
    """Guards rows and params of data frames: neither JSON nor parameters take their numbers as they are."""
    params = {"max_tokens": np.int32(4), "ignore_eos": np.bool_(True), "stop": np.array(["a", "b"])}
    others = {"id": np.int64(9), "scores": np.array([0.5, 1.5]), "level": torch.tensor(2)}
    row, expected = (
        read({"prompt": "Hi", **params, **others}),
        {"max_tokens": 4, "ignore_eos": True, "stop": ["a", "b"]},
    )
    assert row.error is None and row.id == 9 and row.given == expected
    assert row.extra == {"scores": [0.5, 1.5], "level": 2}
    completion = engine.generate("Hi", expected)
    assert completion.error is None and engine.generate("Hi", params) == engine.generate("Hi", [params]) == completion
    for wrong in ({"logits_all": torch.tensor([1, 2])}, {"structured_outputs": {None: 5}}):
        with pytest.raises(RequestError, match="is not available"):
            engine.generate("Hi", wrong)
        assert engine.generate("Hi", [wrong]).error is not None


def test_a_row_with_objects_is_refused_whole(engine: Engine) -> None:
    """Guards the row of output and copies of it: an error has no columns that JSON or a pickle cannot hold."""
    endless: dict[str, Any] = {}
    endless["more"] = endless
    for wrong in ({"when": object()}, {"when": {1, 2}, "prompt": 5}, {"grammar": lambda: None, 5: {}}, endless):
        completion = engine.generate({"prompt": "Hi", "id": "a"} | wrong, FEW)
        assert completion.error is not None and completion.error.code == "invalid_row"
        assert json.loads(json.dumps(completion.to_dict()))["error"]
        assert pickle.loads(pickle.dumps(completion)) == completion
    assert "nested too deeply" in str(completion.error)


def test_results_and_their_prompts_are_apart(engine: Engine) -> None:
    """Guards rows that are used again, and the memory and the pickles of programs that keep many results."""
    row: dict[str, Any] = {"prompt_token_ids": [7] * 200, "tags": ["a"]}
    completion = engine.generate(row, FEW)
    assert completion.extra == {"tags": ["a"]} and len(pickle.dumps(completion)) < 1500
    completion.to_dict()["extra"]["tags"].append("b")
    assert row == {"prompt_token_ids": [7] * 200, "tags": ["a"]} and engine.generate(row, FEW) == completion


@pytest.mark.parametrize(
    ("conversations", "read_as", "is_one"),
    [
        ("Hi", [[USER]], True),
        ([USER], [[USER]], True),
        ([MappingProxyType(USER)], [[USER]], True),
        ([[USER], [USER, USER]], [[USER], [USER, USER]], False),
        (([USER],), [[USER]], False),
        (Column([USER], "Hi"), [[USER], [USER]], False),
        ([], [], False),
    ],
    ids=label,
)
def test_conversations(conversations: Any, read_as: list[Any], is_one: bool) -> None:
    """Guards each form of one and of several conversations, and which of them gives a list."""
    values, is_single = list_conversations(conversations)
    assert is_single == is_one and [asked(read(value)) for value in values] == read_as


@pytest.mark.parametrize(
    ("conversations", "message"),
    [
        ([USER, "Hi"], "message 2 must be an object with a role and content"),
        ([[]], "messages must be a list of at least one message"),
        ([[7, 8]], "message 1 must be an object with a role and content"),
        ([[USER], ROW], "messages must be a list of at least one message"),
        ([{"role": "user", "content": 5}], "content of message 1 must be text, not a number"),
    ],
    ids=label,
)
def test_a_wrong_conversation_is_an_error(conversations: Any, message: str, engine: Engine) -> None:
    """Guards chat against token ids and rows, and its messages against those of other forms of prompts."""
    found = engine.chat(conversations, FEW)
    last = found if isinstance(found, Completion) else found[-1]
    assert str(last.error) == message


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (5, "params must be SamplingParams, a mapping, or a list of these, not int."),
        ("max_tokens=5", "params must be SamplingParams, a mapping, or a list of these, not str."),
        (SamplingParams, "params must be SamplingParams, a mapping, or a list of these, not type."),
        ([5, FEW], "params[0] must be SamplingParams, a mapping or None, not int."),
        ([FEW, [FEW]], "params[1] must be SamplingParams, a mapping or None, not list."),
        ([FEW], "There are 2 prompts and 1 sampling parameters; give one for each prompt."),
        ([FEW] * 1001, "There are 2 prompts and 1,001 sampling parameters; give one for each prompt."),
        ({"max_token": 5}, "There is no sampling parameter 'max_token'; did you mean 'max_tokens'?"),
        ({"temperature": -1}, "temperature must be a number of at least 0 and at most 1000, not -1."),
    ],
    ids=label,
)
def test_wrong_params_for_all_raise(params: Any, message: str, engine: Engine) -> None:
    """Guards against parameters that are ignored, and calls whose prompts all fail for the same reason."""
    calls: list[Callable[[Any, Any], object]] = [engine.generate, engine.stream, engine.chat]
    for call in calls:
        with pytest.raises(RequestError) as caught:
            call(["Hi", "Ho"], params)
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("params", "code", "message"),
    [
        ({"max_token": 5}, "unknown_parameter", "There is no sampling parameter 'max_token'; did you mean"),
        ({"temperature": -1}, "invalid_row", "temperature must be a number"),
        ({"stop_token_ids": [10**6]}, "invalid_row", "stop_token_ids: 1000000 is not in"),
    ],
    ids=label,
)
def test_params_of_one_prompt(params: Mapping[str, Any], code: str, message: str, engine: Engine) -> None:
    """Guards the other prompts of the call, and the order: the row, its own params, then the model's."""
    asked = [FEW, params, SamplingParams(max_tokens=4, n=2)]
    first, wrong, last = engine.generate(["Hi", "Hi", {"prompt": "Hi", "max_tokens": 2}], asked)
    assert wrong.error is not None and wrong.error.code == code and str(wrong.error).startswith(message)
    assert [len(first.token_ids), len(last.token_ids), len(last.choices)] == [3, 2, 2]


def test_seeds(engine: Engine) -> None:
    """Guards repeatable samples, those of equal prompts, and new ones if asked for."""
    warm = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}

    def texts(seed: int | None, prompts: Any = ("Hi",) * 3, params: Any = warm) -> list[str]:
        return [completion.text for completion in engine.generate(prompts, warm | params, seed=seed)]

    assert texts(5) == texts(5) and len({*texts(5), *texts(6)}) == 6
    assert not {*texts(None)} & {*texts(None)}
    for_all = {text for seed in (5, None) for text in texts(seed, params={"seed": 7})}
    rows = [{"prompt": "Hi", "seed": 7} for _ in range(2)]
    same = {*for_all, *texts(None, rows), *texts(5, rows)}
    named = {texts(5, [*others, {"prompt": "Hi", "id": "a"}])[-1] for others in ([], ["x", "y"])}
    assert len(same) == len(named) == 1, "the seed of a row with an id depends on its place"
