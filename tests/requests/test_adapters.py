"""Which LoRA adapter a row asks for: by a field, by the model of an OpenAI request, and what its key says of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cbatch.base.params import SamplingParams
from cbatch.base.request import RequestDefaults
from cbatch.batch.line_processor import LineProcessor
from cbatch.batch.lines import Line
from cbatch.requests.input_processor import InputProcessor, ModelInfo
from cbatch.requests.recorded_outputs import content_key
from cbatch.schedule.limits import SequenceLimits

ADAPTERS = {"sql": "f1", "chat": "f2"}
LIMITS = SequenceLimits(1 << 20, 1 << 20)
ROW = {"id": "a", "prompt_token_ids": [1, 2]}


def call(**body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": [1, 2], **body}}


def request(fields: dict[str, Any], adapters: dict[str, str] = ADAPTERS, **params: Any) -> Any:
    """Turns a line into a request, or the completion of one that is refused."""
    model = ModelInfo(
        tokenizer=None,
        default_params=SamplingParams(),
        limits=LIMITS,
        fingerprint="model",
        compile=lambda params, tools, choice: None,
        adapters=adapters,
    )
    lines = LineProcessor(InputProcessor(model, RequestDefaults(params=params)))
    return lines.process(Line(4, json.dumps(fields).encode()))


@pytest.mark.parametrize(
    ("fields", "default", "expected"),
    [
        (ROW, "", ""),
        (ROW, "chat", "chat"),
        (ROW | {"lora": "sql"}, "chat", "sql"),
        (ROW | {"lora": ""}, "chat", ""),
        (ROW | {"lora": None}, "chat", "chat"),
        (ROW | {"model": "sql"}, "", ""),
        (call(model="sql"), "chat", "sql"),
        (call(model="gpt-4o"), "chat", "chat"),
        (call(model="gpt-4o", lora="sql"), "", "sql"),
        (call(model="sql", lora="chat"), "", "chat"),
        (call(model="sql", lora=""), "", ""),
    ],
)
def test_which_adapter_is_asked_for(fields: dict[str, Any], default: str, expected: str) -> None:
    """Guards the order: the field, the model of an OpenAI request if an adapter has that name, the default."""
    made = request(fields, lora=default)
    assert made.params.lora == expected and made.adapter == ADAPTERS.get(expected, "")


@pytest.mark.parametrize(
    ("name", "adapters", "sentence"),
    [
        ("sqI", ADAPTERS, "there is no LoRA adapter 'sqI': there are sql, chat"),
        ("sqI", {}, "there is no LoRA adapter 'sqI': none is loaded; --lora NAME=PATH loads one"),
        (3, ADAPTERS, "lora must be the name of an adapter, not 3."),
    ],
)
def test_an_unknown_adapter_is_an_error_row(name: Any, adapters: dict[str, str], sentence: str) -> None:
    """Guards misspelt names, wrong types, and engines without adapters, whose rows would silently be the base's."""
    error = request(ROW | {"lora": name}, adapters).error
    assert (error.code, str(error)) == ("invalid_row", f"line 5: {sentence}")


@pytest.mark.parametrize("plain", [ROW, call()])
def test_keys_have_the_weights_and_not_the_name(plain: dict[str, Any]) -> None:
    """Guards `--resume`, the cache of answers and `verify`: other weights are another answer, another name is not."""
    adapted, renamed = (call(lora=name) if "body" in plain else ROW | {"lora": name} for name in ("sql", "new"))
    base, first, other = request(plain), request(adapted), request(adapted, {"sql": "f3"})
    same = request(renamed, {"new": "f1"})
    made = base, first, same, other
    assert base.key == request(plain, {}).key
    for keys in ([one.key for one in made], [content_key("model", LIMITS, one) for one in made]):
        assert keys[1] == keys[2] and len({*keys}) == 3
