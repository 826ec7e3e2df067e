"""Rounds after an answer: results of tools, and further tries."""

from __future__ import annotations

import os
import re
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cbatch.api import Engine
from cbatch.base.params import derive_seed
from cbatch.base.request import Request, RequestDefaults
from cbatch.batch import rounds
from cbatch.batch.engine_driver import EngineStream
from cbatch.batch.line_processor import LineProcessor
from cbatch.batch.lines import RowOptions
from cbatch.batch.templates import lines_of
from cbatch.requests.completion import Completion
from cbatch.requests.input_processor import InputProcessor
from cbatch.validation.validation import Validation
from tests.support.command import Command
from tests.support.faults import wait_until
from tests.support.model_folder import save_model
from tests.support.tool_rounds import ADD, ADD_CALL, ROUNDS

ROWS: list[dict[str, Any]] = [{"id": f"r{number}", "prompt": f"row {number}", "max_tokens": 4} for number in range(12)]
ROWS[3]["seed"] = 5
ROWS[4]["n"] = 2
SAMPLED = {"temperature": 1.0}
NEVER = "it does not match never; it was cut off at max_tokens"


def good(text: str) -> bool:
    return re.search("[aeiou]", text) is not None


def run(engine: Engine, rows: list[dict[str, Any]] = ROWS, **options: Any) -> list[Completion]:
    return list(engine.map(rows, params=SAMPLED, **options))


def processor(engine: Engine, validation: Validation | None) -> LineProcessor:
    inputs = engine.core.input_processor(RequestDefaults(params=SAMPLED))
    return LineProcessor(inputs, RowOptions(validation=validation))


def test_tries_are_those_of_rows_alone(engine: Engine) -> None:
    """Guards the result against company: the first good one of the tries, each with its own seed, and their tokens."""
    for asked, row in zip(ROWS, run(engine, validate=good, tries=3), strict=True):
        own, tokens, is_good, texts = asked.get("seed", derive_seed(0, "id", asked["id"])), 0, False, []
        assert row.validation is not None
        for number in range(1, row.validation["tries"] + 1):
            assert not is_good, "no try follows a good one"
            seed = own if number == 1 else derive_seed(own, "try", number)
            (alone,) = run(engine, [asked | {"seed": seed}])
            texts, tokens = [choice.text for choice in alone.choices], tokens + alone.usage.completion_tokens
            is_good = all(map(good, texts))
        assert [choice.text for choice in row.choices] == texts and row.usage.completion_tokens == tokens
        assert row.validation["valid"] == is_good == (row.error is None) and (is_good or row.validation["tries"] == 3)
    tries = [row.validation["tries"] for row in run(engine, validate=good, tries=3) if row.validation]
    assert set(tries) == {1, 2, 3}, "the rows try all sorts"


def test_the_row_says_what_happened(engine: Engine) -> None:
    """Guards rows of both forms: number of tries, errors, the last answer of one that never was good."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    rows = [ROWS[0], {"custom_id": "c", "url": "/v1/chat/completions", "body": body}]
    good_one, batch_one = run(engine, rows, validate="regex=(?s).*", tries=2)
    assert good_one["validation"] == {"valid": True, "tries": 1, "errors": []} and good_one["text"]
    assert batch_one["validation"]["valid"] is True and batch_one["error"] is None
    bad, batch_bad = run(engine, rows, validate="regex=never", tries=2)
    assert set(bad) == {"index", "id", "error", "key", "validation"}
    assert bad["error"]["code"] == "invalid_answer"
    assert bad["error"]["message"] == f"item 0: no valid answer in 2 tries; {NEVER}"
    assert bad["validation"] == {
        "valid": False,
        "tries": 2,
        "errors": [NEVER] * 2,
        "text": bad.text,
    }
    assert bad.text and bad.usage.completion_tokens > len(bad.token_ids)
    assert batch_bad["response"]["status_code"] == 500 and batch_bad["error"]["code"] == "invalid_answer"
    assert batch_bad["validation"]["tries"] == 2
    assert Completion.from_row(dict(bad)).validation == bad["validation"]


def test_only_a_cut_answer_is_said_to_be_cut(engine: Engine) -> None:
    """Guards errors of answers that ended by themselves, and of those that are cut but whole."""
    row = {"prompt": "a", "choice": ["yes", "no"], "max_tokens": 20}
    (whole,) = run(engine, [row], validate="regex=never")
    assert whole.validation is not None and whole.validation["errors"] == ["it does not match never"]
    (closed,) = run(engine, [{"prompt": "a", "regex": "[a-z]+!", "max_tokens": 6}], validate="regex=never")
    assert closed.choices[0].closed and closed.finish_reason == "length"
    assert closed.validation is not None and closed.validation["errors"] == ["it does not match never"]
    (cut,) = run(engine, [{"prompt": "a", "max_tokens": 1, "ignore_eos": True}], validate="regex=never")
    assert cut.validation is not None and cut.validation["errors"] == [NEVER]


def test_greedy_rows_try_once(engine: Engine) -> None:
    """Guards against tries that can only give the same, and says so."""
    (row,) = engine.map([{"prompt": "a", "max_tokens": 3}], validate="regex=never", tries=5)
    assert row.validation is not None and row.validation["tries"] == 1
    assert "at temperature 0, another try gives the same" in str(row.error)


def test_the_model_is_told_what_was_wrong(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the conversation of further tries: every answer so far, and what was wrong with it."""
    asked: list[Any] = []
    encode = InputProcessor.encode

    def spy(self: InputProcessor, request: Request) -> Request:
        asked.append(request.messages)
        return encode(self, request)

    monkeypatch.setattr(InputProcessor, "encode", spy)
    monkeypatch.setattr(rounds, "CORRECTION", "Not valid: {error}. Again.")  # the context is short
    rows = [{"prompt": "a", "max_tokens": 3}, {"prompt": "b", "raw": True, "max_tokens": 2}]
    told, raw = engine.map(rows, validate=lambda text: f"{len(text)} is wrong.", tries=3, tell_error=True)
    assert told.validation is not None and told.validation["tries"] == 3, "also at temperature 0"
    last = max((messages for messages in asked if messages), key=len)
    assert [message["role"] for message in last] == ["user", "assistant", "user", "assistant", "user"]
    wrong = f"{len(last[1]['content'])} is wrong; it was cut off at max_tokens"
    assert last[2]["content"] == f"Not valid: {wrong}. Again."
    assert raw.validation is not None and raw.validation["tries"] == 1, "there is no conversation"


def test_a_conversation_that_grows_too_long_ends_with_its_last_answer(engine: Engine) -> None:
    """Guards against an error about the prompt, which the user did not write."""
    (row,) = engine.map(
        [{"prompt": "a", "max_tokens": 40, "ignore_eos": True}], validate="regex=never", tries=50, tell_error=True
    )
    assert row.error is not None and row.error.code == "invalid_answer"
    assert row.validation is not None and 2 <= row.validation["tries"] < 20 and row.validation["text"]


def test_a_check_that_breaks_ends_its_row(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the run against waiting for ever for a row whose check has raised."""
    monkeypatch.setattr(rounds.Checker, "error_of", lambda self, text: 1 / 0)
    for row in run(engine, validate="regex=a"):
        assert row.error is not None and row.error.code == "internal_error" and "ZeroDivisionError" in str(row.error)


def test_generation_does_not_wait_for_checks(engine: Engine) -> None:
    """Guards the engine against slow checks: all rows are generated while the first ones are still checked."""
    gate, seen = threading.Event(), []

    def slow(text: str) -> bool:
        seen.append(text)
        return gate.wait(30)

    before = engine.stats().num_tokens
    results = engine.map(ROWS, params=SAMPLED | {"ignore_eos": True}, validate=slow, window=12)
    rows: list[Completion] = []
    thread = threading.Thread(target=lambda: rows.extend(results))
    thread.start()
    while engine.stats().num_tokens - before < sum(4 * row.get("n", 1) for row in ROWS):
        assert thread.is_alive()
        thread.join(0.01)
    assert len(seen) <= rounds.MOST_CHECKS and not rows
    gate.set()
    thread.join(30)
    assert len(rows) == 12 and all(row.error is None for row in rows)


def test_leaving_early_ends_the_checks(engine: Engine, tmp_path: Path) -> None:
    """Guards the machine against a check that goes on after its run was left."""
    note = tmp_path / "pid"
    check = Validation.of([f"command=sh -c 'echo $$ > {note}; sleep 60'"])
    stream = EngineStream(engine.thread, processor(engine, check), window=4)
    with closing(stream.finished(lines_of(ROWS[:1]))) as finished:
        while not (note.exists() and note.read_text()):
            assert next(finished) == []
    with pytest.raises(ProcessLookupError):
        for _ in range(1000):
            os.kill(int(note.read_text()), 0)
            time.sleep(0.01)


def test_an_answer_after_the_end_stays_unfinished(engine: Engine) -> None:
    """Guards a loop that is left while answers wait to be read: no error, and no row that nobody has checked."""
    check = Validation.of([good])
    stream = EngineStream(engine.thread, processor(engine, check), window=12)
    with closing(stream.finished(lines_of(ROWS))) as finished:
        next(finished)
        wait_until(lambda: stream._inbox.qsize() >= 3)
    assert all(row.completion.validation is not None for row in stream.finished_by_now())


def test_tools_are_run_in_every_try(command: Command) -> None:
    """Guards rows that call tools and are validated: each try is a conversation of its own, and usage counts all."""
    (tools := command.folder / "tools.py").write_text(ADD)
    command.model = save_model(command.folder / "model", context=1500)
    (command.model / "chat_template.jinja").write_text(ROUNDS)
    rows = [{"prompt": "a", "choice": [ADD_CALL]}]
    command.options += ("--tools", tools, "--max-tool-rounds", "1", "-q")
    _, (once,) = command.answer(rows)
    _, (twice,) = command.answer(rows, "--validate", "regex=never", "--tries", "2", "--tell-error")
    assert twice["validation"]["tries"] == 2 and twice["validation"]["text"] == ADD_CALL
    assert len(twice["tool_messages"]) == len(once["tool_messages"]) == 2


def test_tools_of_files_in_python(tmp_path: Path) -> None:
    """Guards `map` with files of tools, as `--tools` takes them."""
    (tmp_path / "tools.json").write_text('{"name": "add", "command": ["echo", "{a}+{b}"]}')
    model = save_model(tmp_path / "model", context=3000)
    (model / "chat_template.jinja").write_text(ROUNDS)
    with Engine(str(model), device="cpu", dtype="float32") as engine:
        (row,) = engine.map([{"prompt": "a", "choice": [ADD_CALL]}], tools=[str(tmp_path / "tools.json")])
    assert [message["content"] for message in row.tool_messages if message["role"] == "tool"] == ["2+3"] * 8
