"""Guards where a difference is found, and what is shown of it."""

from __future__ import annotations

from typing import Any

import pytest

from cbatch.cli.verify.report import Difference, first_difference

ROW: dict[str, Any] = {
    "index": 0,
    "id": "a",
    "text": "The cat sat.",
    "finish_reason": "stop",
    "token_ids": [5, 6, 7, 2],
    "choices": [{"index": 0, "text": "The cat sat."}, {"index": 1, "text": "A dog ran.", "token_ids": [8, 9]}],
    "usage": {"completion_tokens": 4},
}


def test_equal_rows_have_no_difference() -> None:
    """Guards rows of --timings: seconds and cached tokens differ from run to run."""
    assert first_difference(ROW, dict(ROW)) is None
    timed = ROW | {"cached_tokens": 3, "ttft_s": 0.1, "elapsed_s": 0.2, "from_cache": True}
    assert first_difference(timed, ROW) is None and first_difference(ROW, timed) is None


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"text": "The cow sat.", "token_ids": [5, 8, 7, 2]},
         Difference("text", 0, 5, "character", 1, '"The cat sat."', '"The cow sat."')),
        ({"text": "The cat sat. It"}, Difference("text", 0, 12, "character", 4, '"The cat sat."', '"The cat sat. It"')),
        ({"text": None}, Difference("text", 0, None, None, None, '"The cat sat."', "null")),
        ({"token_ids": [5, 6, 8, 2]}, Difference("token_ids[2]", 0, 2, "token", None, "7", "8")),
        ({"token_ids": [5, 6]}, Difference("token_ids[2]", 0, 2, "token", None, "7", "null")),
        ({"choices": [ROW["choices"][0], {"index": 1, "text": "A dog.", "token_ids": [8, 3]}]},
         Difference("choices[1].text", 1, 5, "character", 1, '"A dog ran."', '"A dog."')),
        ({"usage": {"completion_tokens": 5}}, Difference("usage.completion_tokens", None, None, None, None, "4", "5")),
        ({"stop_reason": "END"}, Difference("stop_reason", 0, None, None, None, "null", '"END"')),
        ({"finish_reason": True}, Difference("finish_reason", 0, None, None, None, '"stop"', "true")),
    ],
)  # fmt: skip
def test_the_first_difference(changed: dict[str, Any], expected: Difference) -> None:
    """Guards offsets of characters and tokens, outputs after the first, fields that come and go, and other types."""
    assert first_difference(ROW, ROW | changed) == expected


def test_numbers_are_not_truth_values() -> None:
    """Guards columns: in Python 1 equals true, in JSON it does not."""
    assert first_difference({"extra": {"a": 1}}, {"extra": {"a": True}}) is not None
    assert first_difference({"extra": {"a": 1}}, {"extra": {"a": 1}}) is None


def test_an_openai_body_has_its_outputs_and_tokens_inside() -> None:
    """Guards OpenAI rows, whose text stands two levels below the token ids of its choice."""

    def row(text: str, ids: list[int]) -> dict[str, Any]:
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "token_ids": ids}
        return {"custom_id": "c", "response": {"body": {"choices": [choice]}}}

    found = first_difference(row("abc", [1, 2]), row("abd", [1, 3]))
    assert found == Difference(
        "response.body.choices[0].message.content", 0, 2, "character", 1, '"abc"', '"abd"'
    )  # fmt: skip


def test_long_texts_are_cropped_around_the_difference() -> None:
    """Guards reports of long answers: a line each, with the place that differs in it."""
    found = first_difference({"text": "a" * 500 + "b" + "c" * 500}, {"text": "a" * 500 + "d" + "c" * 500})
    assert found is not None and found.offset == 500
    assert found.in_file == '"…' + "a" * 40 + "b" + "c" * 39 + '…"'
    assert str(found).startswith('text differs from character 500 on: "…aaa') and " in the file, " in str(found)
    listed = first_difference({"extra": list(range(100))}, {"extra": None})
    assert listed is not None and len(listed.in_file) == 81 and listed.now == "null"
