"""Rows of an earlier run: which ones stay, and with which tokens those go on that a lower limit has ended."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from cbatch.batch.journal import Journal, with_check
from cbatch.batch.lines import Line
from cbatch.batch.resume import Resuming, earlier_limits, known_tokens, plan_resume, with_key
from cbatch.batch.row import format_result, format_row

OLD, NEW = "0" * 32, "1" * 32


def row(finish: str = "stop", tokens: int = 4, **fields: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": tokens + 3}
    ids = {"token_ids": list(range(tokens))}
    return {"index": 0, "id": "é", "text": "…", "finish_reason": finish} | ids | {"usage": usage, "key": OLD} | fields


def several(*finish: str) -> dict[str, Any]:
    choices = [
        {"index": number, "text": "", "finish_reason": reason, "token_ids": [number]}
        for number, reason in enumerate(finish)
    ]
    return row(finish[0], len(finish), choices=choices)


def answer(finish: str = "stop", **message: Any) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": finish, "logprobs": None, "message": {"content": "…"} | message}
    body = {"id": f"chatcmpl-{OLD}", "choices": [choice | {"token_ids": [7]}], "usage": {"completion_tokens": 1}}
    response = {"status_code": 200, "request_id": f"req_{OLD}", "body": body}
    return {"id": f"batch_req_{OLD}", "custom_id": "c", "response": response, "error": None, "index": 0, "key": OLD}


def response(status: str = "completed", *items: dict[str, Any]) -> dict[str, Any]:
    """A row of the Responses API."""
    said = {
        "id": f"msg_{OLD}",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": ""}],
    }
    usage = {"input_tokens": 3, "output_tokens": 1, "total_tokens": 4, "output_tokens_details": {"reasoning_tokens": 0}}
    body = {"id": f"resp_{OLD}", "object": "response", "status": status, "output": [said, *items], "token_ids": [7]}
    return answer() | {"response": answer()["response"] | {"body": body | {"usage": usage}}}


CALL = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
FAILED = {"index": 0, "id": None, "error": {"code": "nan_logits", "message": "m"}, "key": OLD}
CALLED = {"type": "function_call", "id": "fc_a", "call_id": "a", "name": "f", "arguments": "{}"}
LOST = answer() | {"error": {"code": "nan_logits", "message": "m"}, "response": {"body": {"error": {}}}}


@pytest.mark.parametrize(
    "fields", [row(), row(extra={"key": OLD, "x": 1e300}), several("stop", "stop"), answer(), response()]
)
def test_rows_that_ended_by_themselves_get_the_new_key(fields: dict[str, Any]) -> None:
    """Guards rows that a higher limit leaves as they are: all that is made of the key changes, then the check."""
    kept, of_older_version = with_key(format_result(fields), NEW), with_key(format_row(fields), NEW)
    expected = format_row(fields).replace(OLD.encode(), NEW.encode())
    if "extra" in fields:
        expected = expected.replace(f'"extra": {{"key": "{NEW}"'.encode(), f'"extra": {{"key": "{OLD}"'.encode())
    assert kept == of_older_version == with_check(expected)


@pytest.mark.parametrize(
    "fields",
    [
        row("length"),
        several("stop", "length"),
        answer("length"),
        answer("stop", tool_calls=CALL),
        response("incomplete"),
        response("completed", CALLED),
        row("tool_calls", tool_calls=CALL),
        row(tool_messages=[{"role": "tool"}]),
        row(validation={"valid": True, "tries": 2, "errors": ["e"]}),
        FAILED,
        LOST,
    ],
)
def test_other_rows_are_computed(fields: dict[str, Any]) -> None:
    """Guards rows that the limit has ended, or may have changed on the way."""
    assert with_key(format_row(fields), NEW) is None


@pytest.mark.parametrize(
    ("fields", "takes_over"),
    [
        (row("length", extra={"x": 1, "z": 0}, cached_tokens=1), True),
        (answer(), True),
        (response("incomplete"), True),
        (response("completed", CALLED), False),
        (FAILED, True),
        (LOST | {"response": {"status_code": 500, "request_id": f"req_{OLD}", "body": {"error": {}}}}, True),
        (row("tool_calls", tool_calls=CALL), False),
        (several("stop", "stop") | {"choices": [{"tool_calls": CALL}]}, False),
        (answer("stop", tool_calls=CALL), False),
        (row(tool_messages=[{"role": "tool"}]), False),
    ],
)
def test_a_row_takes_over_the_answer_to_other_columns(fields: dict[str, Any], takes_over: bool) -> None:
    """Guards columns that no prompt uses: they change in the row, but for answers whose calls have ids of the key."""
    carried = {"x": "new", "y": [2]}

    def keyed(some: Iterable[Line]) -> Iterator[tuple[Line, str]]:
        return ((line, NEW if line.carried is None else OLD) for line in some)

    with tempfile.TemporaryFile() as file:
        file.write(format_result(fields))
        file.seek(0)
        journal = Journal.read(file, "out")
        journal.fd = file.fileno()
        lines = iter([Line(0, b"")])
        plan = plan_resume(journal, lines, keyed, Resuming(recompute_changed=True, carried_by=lambda line: carried))
    assert (plan.carried, plan.misfits.total()) == ((1, 0) if takes_over else (0, 1))
    if plan.rewritten is not None:
        plan.rewritten.seek(0)
    if takes_over:
        assert plan.rewritten is not None
        made = json.loads(plan.rewritten.read())
        del made["check"]
        assert list(made) == [*(name for name in fields if name not in ("extra", "cached_tokens")), "extra"] + (
            ["cached_tokens"] if "cached_tokens" in fields else []
        )
        assert made["extra"] == carried and made["key"] == NEW and OLD not in json.dumps(made)


def test_a_row_that_others_have_written_is_computed() -> None:
    """Guards bytes: a row that would not come out the same is not taken over."""
    assert with_key(format_row(row()).replace(b'": ', b'":'), NEW) is None


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        (row("length"), ((0, 1, 2, 3),)),
        (several("stop", "length"), ((0,), (1,))),
        (answer("length"), ((7,),)),
        (response("incomplete"), ((7,),)),
        (row("length", logprobs={"content": []}), ()),
        (row("length", prompt_logprobs={"sum": 0, "content": []}), ()),
        ({name: value for name, value in row("length").items() if name != "token_ids"}, ()),
        (row("length", validation={"valid": True, "tries": 1, "errors": []}), ((0, 1, 2, 3),)),
        (row("length", validation={"valid": True, "tries": 3, "errors": []}), ()),
        (row("length", tool_messages=[{}]), ()),
        (FAILED, ()),
    ],
)
def test_tokens_that_a_row_holds(fields: dict[str, Any], tokens: tuple[tuple[int, ...], ...]) -> None:
    """Guards against tokens of another request, and against log-probabilities that were rounded."""
    assert known_tokens(format_row(fields)) == tokens


def test_limits_are_found_in_the_rows_that_they_ended() -> None:
    """Guards the search: the most frequent ones, below the new one, also where rows have no token ids."""
    bare = {name: value for name, value in row("length", 9).items() if name != "token_ids"}
    pair = several("length", "length") | {"usage": {"completion_tokens": 12}}
    for choice in pair["choices"]:
        del choice["token_ids"]
    rows = [row("length", 4)] * 3 + [row("stop", 5), bare, bare, pair, several("stop", "length"), row("length", 20)]
    rows += [FAILED, row("length", 7, tool_messages=[{}])]
    assert earlier_limits(map(format_row, rows), 20) == [4, 9, 6, 1]


def test_keys_may_be_made_ahead() -> None:
    """Guards --resume with a driver that takes lines in pieces: each key is compared with its own row."""
    rows = {0: "a", 1: "b", 3: "c", 4: "d", 9: "e"}
    stored = [format_row({"index": index, "key": key * 32}) for index, key in rows.items()]
    stored[3] = format_row({"index": 4, "error": {}, "key": "d" * 32})
    taken: list[int] = []

    def lines() -> Iterator[Line]:
        for index in (0, 2, 3, 4, 9, 10, 11):
            taken.append(index)
            yield Line(index, b"")

    def keyed(some: Iterable[Line]) -> Iterator[tuple[Line, str]]:
        asked.extend(some)
        yield from ((line, ("e" if line.index == 3 else rows[line.index]) * 32) for line in asked)

    asked: list[Line] = []
    plan = plan_resume(Journal.read(io.BytesIO(b"".join(stored)), "out"), lines(), keyed, Resuming(retry_errors=True))
    assert [line.index for line in asked] == [0, 3, 9] and taken == [0, 2, 3, 4, 9]
    assert [index for index in range(12) if index in plan] == [0, 9] and plan.rows == 2
    assert plan.misfits.total() == 2 and plan.first_misfit["for lines that the input does not have"] == 2
    assert str(plan).startswith("1 made with another model")
