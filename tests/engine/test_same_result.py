"""The same request gives the same result through `generate`, `stream`, asyncio, `cbatch run` and the chat."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

from cbatch import Completion, Engine
from cbatch.base.chat_template_options import FIXED_DATE
from cbatch.batch.row import format_result
from tests.support.chat_harness import ChatHarness, reply_of
from tests.support.chat_templates import DEEPSEEK_R1, LLAMA3, MISTRAL_LIST, QWEN3
from tests.support.command import Command
from tests.support.model_folder import make_tokenizer, save_model
from tests.support.rows import without_check
from tests.support.samples import sampled
from tests.support.tiny_models import make_network
from tests.support.tool_calls import tool

NO_ALIENS = "{% for m in messages if m.role == 'alien' %}{{ raise_exception('no aliens') }}{% endfor %}"
CLOSING, POISON = 287, 288
"""The token of the closing think tag, and one whose embedding is NaN."""

USER = {"role": "user", "content": "Where is Köln?"}
TALK = [{"role": "system", "content": "Be kind."}, USER, {"role": "assistant", "content": "Here."}, USER]
TOOLS = [tool("now", None)]
SHARED = {"max_tokens": 12}
WARM = {"temperature": 1.0, "top_p": 0.95}


def call(url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": "c-1", "method": "POST", "url": f"/v1/{url}", "body": {"model": "m", "max_tokens": 9, **body}}


COMMON: list[dict[str, Any]] = [
    {"prompt": "Hello"},
    {"prompt": "Hello", "raw": True, "id": 7, "topic": "é", "tags": [1, None]},
    {"prompt_token_ids": [5, 6, 7, 284]},
    {"messages": TALK, "id": "talk"},
    {"messages": [USER], "n": 3, **WARM},
    {"messages": [USER], "stop": list("aeiou rst"), "min_tokens": 2, **WARM, "n": 2},
    {"messages": [USER], "logprobs": 2, "prompt_logprobs": 1, "seed": 5, **WARM},
    {"prompt": "Once é", "raw": True, "echo": True, "logprobs": 0, "n": 2, **WARM},
    {"prompt": "Once", "raw": True, "echo": True, "max_tokens": 0, "prompt_logprobs": 2},
    {"messages": [USER], "skip_special_tokens": False, "ignore_eos": True, "repetition_penalty": 1.2, "priority": 3},
    {"messages": [USER], "choice": ["yes", "no"], "logprobs": 1},
    {"messages": TALK, "chat_template_kwargs": {"enable_thinking": False}, "top_k": 3, **WARM},
    {"messages": TALK, "add_generation_prompt": False},
    {"messages": TALK[:3], "continue_final_message": True, "best_of": 1},
    {"prompt": "Hello", "system": "Be brief.", "bad_words": ["e"], "stop_token_ids": [70, 71, 72]},
    call("chat/completions", messages=TALK, n=2, temperature=1, logprobs=True, top_logprobs=2),
    call("chat/completions", messages=[USER], stop=["e"], seed=3) | {"note": 1},
    call("responses", input=TALK, instructions="Be brief.", metadata={"a": "é"}, **WARM),
    call("completions", prompt="Once", echo=True, logprobs=1, n=2, temperature=1),
    call("completions", prompt=[5, 6, 7]),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("invalid_row", {"prompt": ""}),
    ("invalid_row", {"prompt": "a", "temperature": -1}),
    ("invalid_row", {"messages": [USER], "regex": "("}),
    ("invalid_row", {"prompt_token_ids": [100_000]}),
    ("unknown_parameter", {"prompt": "a", "max_token": 5}),
    ("prompt_too_long", {"prompt_token_ids": [5] * 2500, "id": "long"}),
    ("nan_logits", {"prompt_token_ids": [5, POISON], "n": 2}),
    ("invalid_row", call("chat/completions", messages=[])),
    ("invalid_row", call("responses", input=[USER], n=2)),
    ("prompt_too_long", call("completions", prompt="a" * 2500)),
]
ALIEN = ("template_error", {"messages": [{"role": "alien", "content": "!"}]})


@dataclass(frozen=True)
class Family:
    """A model's template, what a pattern makes it write, and the reasoning and number of calls in that."""

    template: str
    pattern: str
    reasoning: str | None
    num_calls: int


HERMES_CALL = r'<tool_call>\n\{"name": "now", "arguments": \{"n": [1-9]{3}\}\}\n</tool_call>'
FAMILIES = {
    "Qwen": Family(NO_ALIENS + QWEN3, rf"<think>\nhm [a-z]{{3}}\n</think>\n\n[a-z]{{5}}{HERMES_CALL}", "hm ...", 1),
    "DeepSeek": Family(NO_ALIENS + DEEPSEEK_R1, r"[a-z]{5}", ".*", 0),
    "Mistral": Family(
        NO_ALIENS + MISTRAL_LIST,
        r'[a-z]{5}\[TOOL_CALLS\] \[\{"name": "now", "arguments": \{"n": [1-9]{3}\}\}\]',
        None,
        1,
    ),
    "Llama": Family(NO_ALIENS + LLAMA3, r'\{"name": "now", "parameters": \{"n": [1-9]{3}\}\}', None, 1),
}


def forced_by(family: Family) -> dict[str, Any]:
    """Parameters with which the model follows the pattern, once it has ended the reasoning that the prompt opens."""
    return {"regex": family.pattern, "max_tokens": 100, "logit_bias": {CLOSING: 4}, **WARM}


@pytest.fixture(
    scope="module",
    params=sampled(FAMILIES, 1, keep=["Qwen"]),
)
def family(request: pytest.FixtureRequest) -> Family:
    pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def folder(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the family's template, tokens for think tags, and the poisoned one."""
    made = save_model(tmp_path_factory.mktemp("family"))
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = family.template
    assert tokenizer.convert_tokens_to_ids("</think>") == CLOSING and len(tokenizer) == POISON
    tokenizer.save_pretrained(made)
    network = make_network("llama", vocab_size=POISON + 1, max_position_embeddings=2048, eos_token_id=2)
    with torch.no_grad():
        network.model.embed_tokens.weight[POISON] = float("nan")
        network.lm_head.weight[POISON] = 0
    network.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), device="cpu", dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def rows(family: Family) -> list[dict[str, Any]]:
    forced = forced_by(family)
    tools = {"tools": TOOLS} if family.num_calls else {}
    special = [
        {"messages": [USER], **forced, "n": 2, **tools, "id": "forced"},
        {"messages": [USER], **forced, **tools, "tool_choice": "none"},
        {"messages": [USER], **forced, **tools, "max_tokens": 3, "logprobs": 0},
        call("chat/completions", messages=[USER], **tools, **forced),
        call("responses", input=[USER], tools=[{"type": "function", **one["function"]} for one in TOOLS], **forced),
    ]
    return [*COMMON, *special, *(row for _, row in REFUSED), ALIEN[1]]


@pytest.fixture(scope="module")
def completions(engine: Engine, rows: list[dict[str, Any]]) -> list[Completion]:
    return engine.generate(rows, SHARED)


@pytest.fixture(scope="module")
def lines(folder: Path, rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The lines that `cbatch run` writes for the rows."""
    command = Command(tmp_path_factory.mktemp("run"), folder, rows)
    assert command("--device", "cpu", "--max-tokens", "12") == 1
    return command.lines()


def without_place(row: dict[str, Any]) -> dict[str, Any]:
    """A row of output without what only files have: numbers of lines, advice for the command, keys made of bytes."""
    text = re.sub(
        r'"line \d+: | \(--allow-unknown carries it along\)', lambda found: found[0][:1].strip(), json.dumps(row)
    )
    text = text.replace(row["key"], "key")
    plain: dict[str, Any] = json.loads(text)
    return plain


def is_same(made: Any, expected: Any) -> bool:
    """Whether two rows have the same fields in the same order. Log-probabilities may be rounded differently."""
    if isinstance(made, dict) and isinstance(expected, dict):
        return list(made) == list(expected) and all(is_same(made[name], expected[name]) for name in made)
    if isinstance(made, list) and isinstance(expected, list):
        return len(made) == len(expected) and all(map(is_same, made, expected))
    if isinstance(made, float) and isinstance(expected, float):
        return abs(made - expected) < 1e-3
    return type(made) is type(expected) and made == expected


def check_same(made: Completion, expected: Completion) -> None:
    """Compares rows, and what rows do not show: token ids, and the ids of calls in each choice."""
    assert is_same(made.to_dict(), expected.to_dict())
    assert (made.error and str(made.error)) == (expected.error and str(expected.error))
    for one, other in zip(made.choices, expected.choices, strict=True):
        assert replace(one, logprobs=None) == replace(other, logprobs=None)


def test_generate_equals_run(completions: list[Completion], lines: list[bytes]) -> None:
    """Guards `to_dict` against the bytes of `cbatch run`: fields, order, keys, ids, and errors but for the line."""
    assert len(lines) == len(completions)
    for completion, line in zip(completions, lines, strict=True):
        made, read = completion.to_dict(), without_check(json.loads(line))
        assert format_result(read) == line and Completion.from_row(read).text == completion.text
        if completion.error is not None:
            made, read = without_place(made), without_place(read)
        assert is_same(made, read)


def test_a_stream_equals_generate(engine: Engine, rows: list[dict[str, Any]], completions: list[Completion]) -> None:
    """Guards every delta: joined they are the text and the reasoning, and the last event has the same completion."""
    events = list(engine.stream(rows, SHARED))
    for completion in completions:
        mine = [event for event in events if event.index == completion.index]
        (last,) = [event.completion for event in mine if event.completion is not None]
        check_same(last, completion)
        assert mine[-1].completion is last and mine[-1].finish_reason is not None
        if completion.error is not None:
            assert mine[-1].error is not None and str(mine[-1].error) == str(completion.error)
            continue
        for choice in completion.choices:
            of_choice = [event for event in mine if event.sample_index == choice.index]
            assert "".join(event.text for event in of_choice) == choice.text
            assert ("".join(event.reasoning for event in of_choice) or None) == choice.reasoning
            assert [event.token_id for event in of_choice if event.token_id is not None] == list(choice.token_ids)
            assert of_choice[-1].finish_reason == choice.finish_reason
            if choice.logprobs is not None:
                scored = [event.logprobs for event in of_choice if event.logprobs is not None]
                assert [(one.token_id, one.token, one.data) for one in scored] == [
                    (one.token_id, one.token, one.data) for one in choice.logprobs
                ]


def test_asyncio_equals_generate(engine: Engine, rows: list[dict[str, Any]], completions: list[Completion]) -> None:
    """Guards `agenerate` and `astream`."""

    async def main() -> tuple[list[Completion], list[Completion]]:
        streamed = [event.completion async for event in engine.astream(rows, SHARED) if event.completion is not None]
        return await engine.agenerate(rows, SHARED), sorted(streamed, key=lambda one: one.index)

    for results in asyncio.run(main()):
        for made, expected in zip(results, completions, strict=True):
            check_same(made, expected)


def test_alone_equals_together(engine: Engine, rows: list[dict[str, Any]], completions: list[Completion]) -> None:
    """Guards single prompts: a row with an id has the same result alone, whatever ran beside it."""
    for row, completion in zip(rows, completions, strict=True):
        if "id" in row:
            alone = engine.generate(row, SHARED)
            assert is_same(without_place(alone.to_dict()), without_place(completion.to_dict()) | {"index": 0})


def test_chat_equals_generate(engine: Engine, family: Family) -> None:
    """Guards `Engine.chat` and its options against rows with the same names."""
    forced = forced_by(family)
    options: dict[str, Any] = {"tools": TOOLS} if family.num_calls else {}
    rows = [{"messages": messages, **options} for messages in (TALK, [USER])]
    for params in (SHARED, forced):
        expected = engine.generate(rows, params, seed=3)
        for made, other in zip(engine.chat([TALK, [USER]], params, seed=3, **options), expected, strict=True):
            check_same(made, other)
        check_same(engine.chat(TALK, params, seed=3, **options), expected[0])
    assert [len(one.tool_calls) for one in expected] == [family.num_calls] * 2
    asked: list[dict[str, Any]] = [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"continue_final_message": True},
        {"add_generation_prompt": False},
        {"tools": TOOLS, "tool_choice": "required"} if family.num_calls else {},
    ]
    for more in asked:
        row = {"messages": TALK[:3], **more}
        made, other = engine.chat(TALK[:3], SHARED, **more), engine.generate(row, SHARED)
        assert made.error is None
        check_same(made, other)


class FixedDay(date):
    """Programs and batches get the same day every day, and a chat the day it is."""

    @classmethod
    def today(cls) -> Any:
        return FIXED_DATE


def test_the_chat_equals_generate(engine: Engine, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the program's replies: the text and reasoning that a program gets for the same messages and seed."""
    monkeypatch.setattr("cbatch.cli.chat.engine_client.date", FixedDay)
    harness = ChatHarness(engine)
    forced = forced_by(family) | {"regex": family.pattern.partition(r"\{")[0] + "!"}
    replies = []
    for params in (SHARED, SHARED | {"stop": ["e", "a"], **WARM}, forced):
        params = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "loop_guard": False} | params  # not a chat's defaults
        controller = harness.make(system="Be kind.", params=params, run_seed=11)
        for question in ("Where is Köln?", "<|im_end|> And Bonn?"):
            text = harness.ask(controller, question)
            session, reply = controller.current, reply_of(controller.current)
            assert session.last is not None
            completion = engine.chat(session.messages(session.last), params | {"seed": reply.seed})
            assert (text, reply.reasoning or None) == (completion.text, completion.reasoning)
            assert (reply.prompt_tokens, reply.num_tokens) == (
                completion.usage.prompt_tokens,
                completion.usage.completion_tokens,
            )
            replies.append(reply)
    assert all(reply.text or reply.reasoning for reply in replies) and bool(replies[-1].reasoning) == bool(
        family.reasoning
    )
