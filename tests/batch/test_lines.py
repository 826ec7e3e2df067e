"""Lines: read from a stream, turned into rows, and back; and the window that bounds them."""

from __future__ import annotations

import io
import json
import tracemalloc
from typing import Any

import pytest

from cbatch.base.errors import RequestError
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.batch import lines
from cbatch.batch.driver import Window, weight_of
from cbatch.batch.lines import Line, RowOptions, parse_line, read_lines


def test_lines_are_physical_and_blank_ones_skipped() -> None:
    """Guards the index: BOM, CRLF, blank lines and a missing last newline change no number."""
    data = b'\xef\xbb\xbf{"a":1}\r\n\n  \r\n{"b":"\xe2\x80\xa8"}\n\nlast'
    assert [(line.index, line.data) for line in read_lines(io.BytesIO(data))] == [
        (0, b'{"a":1}'),
        (3, b'{"b":"\xe2\x80\xa8"}'),
        (5, b"last"),
    ]


def test_the_hash_of_a_long_line_is_of_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the key of a line that is too long: its line end, which may still be missing, changes nothing."""
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10)
    for text in (b"x" * 29, b"y" * 30, b"z" * 31, b"w" * 32):
        digests = {next(read_lines(io.BytesIO(text + end))).digest for end in (b"", b"\n", b"\r\n")}
        assert len(digests) == 1
    assert len({next(read_lines(io.BytesIO(b"x" * n))).digest for n in range(13, 50)}) == 37


def parse(text: str | bytes, **options: bool) -> Request:
    return parse_line(Line(0, text.encode() if isinstance(text, str) else text), RowOptions(**options))


def code(row: Request) -> str | None:
    return row.error.code if row.error else None


def test_the_three_forms() -> None:
    """Guards the three forms of a row, with parameters, aliases and extra columns."""
    row = parse('{"id": 7, "prompt": "hi", "max_new_tokens": 3, "stop": ["x"], "priority": 2, "note": {"a": 1}}')
    assert (row.id, row.text, row.given, row.priority) == (7, "hi", {"max_tokens": 3, "stop": ["x"]}, 2)
    assert row.extra == {"note": {"a": 1}} and row.error is None
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = parse(json.dumps({"messages": [{"role": "user", "content": parts}]}))
    assert row.messages == [{"role": "user", "content": "ab"}]
    assert parse('{"prompt_token_ids": [1, 2]}').prompt_ids == [1, 2]
    assert parse("not json at all", is_text=True).text == "not json at all"


TOOL = '{"type": "function", "function": {"name": "look"}}'


@pytest.mark.parametrize(
    ("text", "expected", "message"),
    [
        ('{"prompt": }', "invalid_json", "line 1, column 12"),
        ('{"prompt": NaN}', "invalid_json", "NaN"),
        ('{"prompt": "a", "top_p": 1e999}', "invalid_json", "too large"),
        ('{"prompt": "a", "k": ' + "[" * 300 + "]" * 300 + "}", "invalid_json", "nested too deeply"),
        ('{"prompt": "\\ud800", "k": ' + '{"a":' * 700 + "1" + "}" * 701, "invalid_json", "nested too deeply"),
        ("1" * 5000, "invalid_json", "too many digits"),
        ('{"prompt": "a", "k": [' + "[]," * 100_000 + "[]]}", "invalid_row", "more than 100,000 lists and objects"),
        ('{"prompt": "a", "k": [' + "1," * 2_000_000 + "1]}", "invalid_row", "more than 2,000,000 values"),
        ('{"prompt": "a", "k": {' + '"a":1,' * 300_000 + '"a":1}}', "invalid_row", "more than 300,000 names"),
        (b'{"prompt": "\xff"}', "invalid_utf8", "byte 13"),
        ("[1]", "invalid_row", "not a list"),
        ("{}", "invalid_row", "has none of messages"),
        ('{"prompt": "a", "messages": []}', "invalid_row", "has both messages and prompt"),
        ('{"prompt": ""}', "invalid_row", "empty"),
        ('{"prompt": 3}', "invalid_row", "not a number"),
        ('{"prompt": "a", "id": [1]}', "invalid_row", "id must be"),
        ('{"prompt": "a", "priority": 1.5}', "invalid_row", "priority must be a whole number"),
        ('{"prompt": "a", "raw": 1}', "invalid_row", "raw must be true or false"),
        ('{"prompt_token_ids": [1], "raw": true}', "invalid_row", "raw works only with prompt"),
        ('{"messages": []}', "invalid_row", "at least one message"),
        ('{"messages": [{"content": "a"}]}', "invalid_row", "message 1"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "invalid_row", "image 1 of mess"),
        ('{"prompt_token_ids": [true]}', "invalid_row", "whole number"),
        ('{"prompt": "a", "temperatur": 1}', "unknown_parameter", "'temperature'"),
        ('{"prompt": "a", "max-tokens": 1}', "unknown_parameter", "'max_tokens'"),
        ('{"promt": "a"}', "unknown_parameter", "'prompt'"),
        ('{"prompt": "a", "tools": {}}', "invalid_row", "line 1: tools must be a list"),
        ('{"prompt": "a", "tools": [{"type": "function"}]}', "invalid_row", "line 1: Tool 1"),
        ('{"prompt": "a", "tool_choice": "required"}', "invalid_row", "there are no tools"),
        (f'{{"prompt": "a", "raw": true, "tools": [{TOOL}]}}', "invalid_row", "not raw"),
    ],
)
def test_what_is_wrong_is_named(text: str | bytes, expected: str, message: str) -> None:
    """Guards the error codes, and that each message says what is wrong, and in which line."""
    row = parse(text)
    assert code(row) == expected and message in str(row.error)


def test_unknown_keys_are_carried_unless_they_look_misspelt() -> None:
    """Guards the user's own columns; --allow-unknown carries near misses too."""
    assert parse('{"prompt": "a", "label": 1, "seeds": 2}').extra == {"label": 1, "seeds": 2}
    assert parse('{"prompt": "a", "temperatur": 1}', allow_unknown=True).extra == {"temperatur": 1}


def test_parameters_that_ask_for_nothing_are_fine() -> None:
    """Guards files made for other programs, which spell out every default."""
    row = parse('{"prompt": "a", "logprobs": null, "response_format": null, "tools": [], "tool_choice": "none"}')
    assert row.error is None and row.extra == {} and row.given == {} and not row.tools


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"logit_bias": {" 1_0 ": 1}}, "logit_bias must be"),
        ({"logit_bias": {str(n): 1 for n in range(2000)}}, "up to 1,024 token ids"),
        ({"bad_words": ["x"] * 2000}, "bad_words has 2,000 strings"),
        ({"stop_token_ids": [10**4000]}, "stop_token_ids must be"),
        ({"choice": "yes"}, "choice must be a list"),
        ({"response_format": "json"}, "response_format must be"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty must be"),
    ],
)
def test_parameters_out_of_range_are_named(asked: dict[str, Any], message: str) -> None:
    """Guards that each message is short, whatever the row holds."""
    with pytest.raises(RequestError) as caught:
        SamplingParams().merged(asked)
    assert message in str(caught.value) and len(str(caught.value)) < 250


def test_tools_and_calls_are_taken() -> None:
    """Guards tools, `tool_choice: none`, and an earlier call without content."""
    assert parse(f'{{"prompt": "a", "tools": [{TOOL}]}}').tools == [json.loads(TOOL)]
    assert not parse(f'{{"prompt": "a", "tools": [{TOOL}], "tool_choice": "none"}}').tools
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    row = parse(json.dumps({"messages": [call, {"role": "tool", "content": "4"}]}))
    assert row.messages == [call | {"content": ""}, {"role": "tool", "content": "4"}]
    assert parse('{"messages": [{"role": "assistant", "content": null}]}').error is not None


def test_duplicate_keys_and_surrogates() -> None:
    """Guards two corners of JSON: the last of duplicate keys wins, and a lone surrogate becomes U+FFFD."""
    assert parse('{"prompt": "a", "prompt": "b"}').prompt == "b"
    row = parse('{"prompt": "x\\ud800y", "k": ["\\udc00"], "pair": "\\ud83d\\ude00"}')
    assert row.text == "x\ufffdy" and row.extra == {"k": ["\ufffd"], "pair": "😀"}


@pytest.mark.parametrize("wrong", ['"raw": 1', '"id": []', '"temperatur": 1', '"priority": "x"'])
def test_error_rows_carry_all_columns(wrong: str) -> None:
    """Guards the user's own columns in error rows, whatever the order of keys."""
    for text in (f'{{"note": 1, {wrong}, "prompt": "a"}}', f'{{{wrong}, "prompt": "a", "note": 1}}'):
        row = parse(text)
        assert row.error is not None and row.extra["note"] == 1


def test_strings_of_brackets_and_commas_are_no_values() -> None:
    """Guards long prompts of code, whose signs are no lists, objects and values; also behind escaped quotes."""
    prompt = '{[,:"\\' * 600_000
    row = parse(json.dumps({"prompt": prompt, "k": [[]] * 90_000}))
    assert row.error is None and row.text == prompt


def test_a_row_of_too_many_values_is_refused_before_it_is_parsed() -> None:
    """Guards memory against a short line that becomes a hundred times as many bytes of objects."""
    line = Line(0, b'{"prompt": "a", "k": [' + b"{}," * 1_000_000 + b"{}]}")
    tracemalloc.start()
    assert code(parse_line(line)) == "invalid_row"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert line.data is not None and peak < 3 * len(line.data)


def test_a_row_that_takes_less_than_it_could_makes_room() -> None:
    """Guards the number of rows in flight: what a row could have taken at most is given back once it is read."""
    window = Window(3, size=100)
    window.acquire(0, 90)
    window.settle(0, 20)
    window.acquire(1, 80)
    window.release([0])
    window.acquire(2, 20)
    assert window.waited_s < 1 and window._bytes_left == 0


HEAVY: dict[str, dict[str, Any]] = {
    "lists": {"k": [[]] * 20_000},
    "objects": {"k": [{}] * 20_000},
    "filled objects": {"k": [{"a": 1}] * 20_000},
    "filled lists": {"k": [[300]] * 20_000},
    "numbers": {"k": [300.5] * 20_000},
    "names": {"k": {f"n{number}": number for number in range(20_000)}},
    "texts": {"k": [f"t{number}" for number in range(20_000)]},
    "messages": {"messages": [{"role": "user", "content": "a"}] * 10_000},
    "wide": {"k": "é" * 200_000},
    "wider": {"k": "a" * 500_000 + "\U0001f600"},
}


@pytest.mark.parametrize("kind", HEAVY)
def test_a_row_takes_no_more_memory_than_its_weight(kind: str) -> None:
    """Guards the bound on memory: rows in flight are counted by the weight of their lines."""
    columns = HEAVY[kind]
    fields = columns if "messages" in columns else {"prompt": "a"} | columns
    line = Line(0, json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode())
    tracemalloc.start()
    row = parse_line(line)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert row.error is None and taken < weight_of(line.data)
