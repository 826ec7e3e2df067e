"""Columns of results: which name each gets beside the others."""

from __future__ import annotations

from cbatch.batch.tables.columns import (
    ALWAYS,
    carried_columns,
    earlier_error,
    input_names,
    is_result,
    split_result,
)

KEY = "0123456789abcdef" * 2
ROW = {
    "index": 3,
    "id": "a",
    "text": "Paris",
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
    "key": KEY,
    "extra": {"text": "Where?", "city": "x", "check": "mine"},
    "check": "01234567",
}
FAILED = {"index": 3, "id": None, "error": {"code": "invalid_row", "message": "why"}, "key": KEY}


def test_an_answer_keeps_its_names() -> None:
    """Guards the rule for two columns of one name: the answer has it, and the input's gets the next that is free."""
    assert input_names(["text", "city"], ALWAYS) == {"text": "input_text", "city": "city"}
    assert input_names(["input_text", "text", "input_text_2"], ALWAYS) == {
        "input_text": "input_text",
        "text": "input_text_3",
        "input_text_2": "input_text_2",
    }


def test_a_row_as_columns() -> None:
    """Guards what a table says of a row, an error row and an OpenAI result: all have the same columns."""
    answer, columns = split_result(ROW)
    assert answer["text"] == "Paris" and answer["total_tokens"] == 3 and columns == ROW["extra"]
    failed, _ = split_result(FAILED)
    assert failed["error_code"] == "invalid_row" and failed["error_message"] == "why" and failed["text"] is None
    message = {"index": 0, "message": {"role": "assistant", "content": "Paris"}, "finish_reason": "stop"}
    body = {"choices": [message], "usage": ROW["usage"]}
    line = {"id": "batch_req_1", "custom_id": "a", "response": {"body": body}, "error": None, "index": 3, "key": KEY}
    assert split_result(line)[0] == answer
    assert set(answer) == set(failed) == set(ALWAYS)


def test_a_chained_run_carries_columns_and_not_the_run() -> None:
    """Guards chains: from JSON Lines and from a table, a second run sees the same flat columns."""
    assert is_result(ROW) and not is_result({"index": 3, "key": "k"}) and not is_result({"index": "x", "key": KEY})
    wanted = {"id": "a", "text": "Paris", "input_text": "Where?", "city": "x", "check": "mine"}
    assert carried_columns(ROW) == wanted
    answer, columns = split_result(ROW)
    names = input_names(columns, answer)
    assert carried_columns({names[name]: value for name, value in columns.items()} | answer) == wanted
    assert earlier_error(ROW) is None and earlier_error(answer) is None
    for failed in (FAILED, split_result(FAILED)[0]):
        assert earlier_error(failed) == "it is an error of an earlier run (invalid_row: why)"
