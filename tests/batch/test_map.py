"""Rows from Python: lazily, in order, and in a file that `cbatch run` and `map` continue for each other."""

from __future__ import annotations

import gc
import itertools
import json
import re
import threading
import time
from collections import UserDict
from collections.abc import Callable, Generator, Iterator
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tqdm import tqdm

from cbatch.api import Engine
from cbatch.base.errors import ConfigError, EngineError, RequestError
from cbatch.base.params import SamplingParams
from cbatch.batch.map import MapWriter
from cbatch.requests.completion import Completion
from tests.support.command import Command
from tests.support.faults import wait_until
from tests.support.rows import parse_rows, read_rows
from tests.support.shared_engine import check_idle

ROWS: list[dict[str, Any]] = [
    {"id": "a", "prompt": "hello", "max_tokens": 12},
    {"prompt": "sampled", "temperature": 1.0, "max_tokens": 9, "note": {"x": [1, None]}},
    {"prompt": "x " * 400},
    {"prompt_token_ids": [5, 6, 7], "max_token": 3},
    {"id": 7, "messages": [{"role": "user", "content": "hé 😀 \ud800"}], "max_tokens": 3},
    {"prompt": "nan", "score": float("nan")},
    {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "two", "max_tokens": 5, "n": 2}},
    {"custom_id": "d", "url": "/v1/chat/completions", "body": {"messages": [{"role": "nobody", "content": "a"}]}},
    {"prompt": "last", "max_tokens": 20, "ignore_eos": True},
]
"""Good rows and bad ones; the third is too long, the fourth misspelt, the sixth no JSON."""


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[Engine]:
    with Engine(str(model_folder), device="cpu", dtype="float32", max_seqs=2) as made:
        yield made


Mapped = Callable[..., Generator[Completion]]


@pytest.fixture
def mapped(engine: Engine) -> Iterator[Mapped]:
    """`Engine.map`; nothing is left of the rows."""
    yield engine.map
    check_idle(engine)


def run(folder: Path, model: Path, *arguments: str, rows: list[Any] = ROWS) -> int:
    """`cbatch run` on the same rows, into the file that `map` has in these tests."""
    return Command(folder, model, rows)("--device", "cpu", *arguments)


@pytest.fixture(scope="module")
def expected(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The output of `cbatch run` for ROWS."""
    folder = tmp_path_factory.mktemp("expected")
    assert run(folder, model_folder) == 1
    return (folder / "out.jsonl").read_bytes()


@pytest.mark.parametrize("ordered", [True, False])
def test_results_and_file_are_those_of_run(mapped: Mapped, expected: bytes, tmp_path: Path, ordered: bool) -> None:
    """Guards one meaning of a row: the same bytes and keys as the command, for good rows and bad ones."""
    path = tmp_path / "out.jsonl"
    results = list(mapped(ROWS, path=path, ordered=ordered))
    assert path.read_bytes() == expected
    wanted = parse_rows(expected)
    assert results == wanted if ordered else sorted(results, key=lambda row: row["index"]) == wanted
    assert results == wanted or [row["index"] for row in results] != sorted(row["index"] for row in results)
    text = re.sub(r'(": ")line (\d+)', lambda found: f"{found[1]}item {int(found[2]) - 1}", json.dumps(wanted))
    assert list(mapped(ROWS)) == json.loads(text)  # without a file, too, but for the place of what is wrong


def test_an_abandoned_map_is_continued(mapped: Mapped, expected: bytes, tmp_path: Path) -> None:
    """Guards results of a loop that was left: they are in the file, in flight is nothing, and the rest follows."""
    path = tmp_path / "out.jsonl"
    first = mapped(ROWS, path=path)
    begun = [next(first), next(first)]
    first.close()
    kept = read_rows(path)
    assert all(row in kept for row in begun) and len(kept) < len(ROWS)
    results = list(mapped(iter(ROWS), path=path, resume=True))
    assert path.read_bytes() == expected and results == read_rows(path)


def test_what_finished_meanwhile_is_written_when_a_map_is_left(engine: Engine, mapped: Mapped, tmp_path: Path) -> None:
    """Guards work: rows that finish while the consumer does something else are in the file when it leaves."""
    results = mapped((f"row {n}" for n in range(10**9)), path=tmp_path / "out.jsonl", params={"max_tokens": 1})
    next(results)
    steps = engine.stats
    before = -1
    while before != (before := steps().num_steps) or steps().num_running:  # until all of the window has finished
        time.sleep(0.2)
    results.close()
    assert len(read_rows(tmp_path / "out.jsonl")) == 1 + 4 * 2


def test_the_file_is_in_order_before_the_last_result_is_given(mapped: Mapped, expected: bytes, tmp_path: Path) -> None:
    """Guards consumers that stop at the last result and never ask for one more, such as `zip`."""
    for options in ({}, {"resume": True}):
        results = mapped(ROWS, path=tmp_path / "out.jsonl", **options)
        assert [row["index"] for _, row in zip(range(len(ROWS)), results, strict=False)] == list(range(len(ROWS)))
        assert (tmp_path / "out.jsonl").read_bytes() == expected
        results.close()
        (tmp_path / "out.jsonl").write_bytes(b"".join(reversed(expected.splitlines(keepends=True))))


def test_a_damaged_file_is_refused_in_the_words_of_python(mapped: Mapped, expected: bytes, tmp_path: Path) -> None:
    """Guards against giving a result whose text has changed in the file; what to do needs no option of a command."""
    path = tmp_path / "out.jsonl"
    path.write_bytes(changed := expected.replace(b'"text": "', b'"text": "#', 1))
    with pytest.raises(ConfigError, match=r"has 1 damaged line \(first: line 1.* Remove damaged lines, which"):
        next(mapped(ROWS, path=path, resume=True))
    assert path.read_bytes() == changed


@pytest.mark.parametrize("ordered", [True, False])
def test_a_map_continues_a_run(
    mapped: Mapped, expected: bytes, tmp_path: Path, model_folder: Path, ordered: bool
) -> None:
    """Guards rows of the command that was cut off: a torn row and missing rows are computed, the others kept."""
    lines = expected.splitlines(keepends=True)
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"".join([lines[4], lines[0], lines[5]]) + lines[1][:30])
    results = list(mapped(ROWS, path=path, resume=True, ordered=ordered))
    assert path.read_bytes() == expected
    assert sorted(row["index"] for row in results) == list(range(len(ROWS)))
    assert [row["index"] for row in results][: 9 if ordered else 3] == ([*range(9)] if ordered else [0, 4, 5])


def test_a_file_with_rows_is_refused(mapped: Mapped, tmp_path: Path) -> None:
    """Guards results of an earlier call: the sentence of `cbatch run`, in words of Python, and its bytes."""
    path = tmp_path / "out.jsonl"
    list(mapped(ROWS[:2], path=path))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"out.jsonl exists and is not empty; resume=True continues it\.$"):
        next(mapped(ROWS, path=path))
    with pytest.raises(ConfigError, match=r"2 made with another input.* The file is left as it is\. Give"):
        next(mapped(["other", "rows"], path=path, resume=True))
    with pytest.raises(ConfigError, match=r"1 for lines that the input does not have \(first: line 2\)"):
        next(mapped(ROWS[:1], path=path, resume=True))
    with MapWriter(path, input_order=True), pytest.raises(ConfigError, match="Another run is writing"):
        next(mapped(ROWS, path=path, resume=True))
    assert path.read_bytes() == before
    results = mapped(ROWS, path=path, resume=True)
    next(results)
    del results  # and a generator that is dropped gives the lock back
    gc.collect()
    assert len(list(mapped(ROWS, path=path, resume=True))) == len(ROWS)


def test_rows_are_taken_lazily(mapped: Mapped, tmp_path: Path) -> None:
    """Guards memory, and sources without an end: only so many rows are taken as results are missing."""
    taken = 0

    def endless() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield f"row {taken}"

    for options in ({}, {"path": tmp_path / "out.jsonl"}, {"ordered": False}):
        taken = 0
        results = mapped(endless(), params={"max_tokens": 1}, **options)
        assert taken == 0
        for count in range(1, 40):
            next(results)
            assert taken <= count + 4 * 2 + 1
        results.close()
        wait_until(lambda: all(thread.name != "cbatch-reader" for thread in threading.enumerate()))
    assert len(read_rows(tmp_path / "out.jsonl")) >= 39


def test_all_forms_of_rows(mapped: Mapped) -> None:
    """Guards texts, token ids, messages and dictionaries, and mappings and tuples in their place."""
    message = {"role": "user", "content": "hi"}
    forms: list[Any] = ["hi", [message], (message,), {"messages": [message]}, {"prompt": "hi"}, UserDict(prompt="hi")]
    results = list(mapped(forms, params={"max_tokens": 3}))
    assert len({row["text"] for row in results}) == 1 and results[0]["usage"]["completion_tokens"] == 3
    first, second, third = mapped([[5, 6, 7], (5, 6, 7), np.array([5, 6, 7])], params={"max_tokens": 3})
    assert first["usage"]["prompt_tokens"] == 3 and first["text"] == second["text"] == third["text"]


def test_a_bad_row_is_one_result_with_an_error(mapped: Mapped, tmp_path: Path) -> None:
    """Guards the other rows, and a file whose error rows are kept like all others."""
    circle: list[Any] = []
    circle.append(circle)
    bad: list[Any] = [None, {"id": 3, "prompt": "a", "when": object}, {"prompt": "a", "x": circle}, [], "", b"bytes"]
    bad += [{"prompt": "a", (1, 2): 3}, "x" * (16 * 2**20)]
    path = tmp_path / "out.jsonl"
    results = list(mapped([*bad, "good"], path=path, params={"max_tokens": 1}))
    assert [row.get("error", {}).get("code") for row in results] == ["invalid_row"] * 7 + ["line_too_long", None]
    assert results[0]["error"]["message"].startswith("line 1: a prompt must be a text, token ids or a row such as")
    assert results[1]["id"] == 3 and "line 2: the row cannot be written as JSON" in results[1]["error"]["message"]
    assert len({row["key"] for row in results}) == len(results)
    again = list(mapped([*bad, "good"], path=path, resume=True, params={"max_tokens": 1}))
    assert again == results == read_rows(path)


TEMPLATE = "Translate to {language}: {text} {{literally}}"


def test_a_template_fills_prompts(mapped: Mapped, tmp_path: Path, model_folder: Path) -> None:
    """Guards what a template makes: the prompt; of the other columns, only the id is a field of the row."""
    rows = [
        {"language": "French", "text": "{language} a.b {0}", "id": "x", "max_token": 1},
        {"language": "German", "text": 5, "custom_id": 4, "where": None},
    ]
    rendered = [
        {"prompt": "Translate to French: {language} a.b {0} {literally}", "max_tokens": 4, **rows[0]},
        {"prompt": "Translate to German: 5 {literally}", "max_tokens": 4, **rows[1]},
    ]
    results = list(mapped(rows, template=TEMPLATE, params={"max_tokens": 4}))
    assert [(row["id"], row["extra"]) for row in results] == [
        ("x", {"language": "French", "text": "{language} a.b {0}", "max_token": 1}),
        (4, {"language": "German", "text": 5, "where": None}),
    ]
    assert run(tmp_path, model_folder, "--allow-unknown", rows=rendered) == 0
    assert read_rows(tmp_path / "out.jsonl") == results

    def by_function(row: dict[str, Any]) -> str:
        return f"Translate to {row['language']}: {row['text']} {{literally}}"

    assert list(mapped(rows, template=by_function, params={"max_tokens": 4})) == results
    path = tmp_path / "translate.jinja"
    path.write_text("Translate to {{ language }}: {{ text }} {literally}\n")
    assert list(mapped(rows, template=path, params={"max_tokens": 4})) == results


def test_columns_of_a_template_may_have_any_names(engine: Engine, mapped: Mapped, tmp_path: Path) -> None:
    """Guards data sets, whose columns are called like fields of rows, parameters, or OpenAI Batch requests."""
    names = "choice n stop tools tool_choice priority seed system prompt messages raw url body method max_token top_p"
    table: dict[str, Any] = {name: [f"some {name}"] for name in names.split()} | {"key": 1, "index": "x", "text": {}}
    options: dict[str, Any] = {"params": {"max_tokens": 3}, "path": tmp_path / "out.jsonl"}
    (result,) = mapped([table], template="Sum up {body}", **options)
    assert result["extra"] == table and "error" not in result and result["usage"]["completion_tokens"] == 3
    steps = engine.stats().num_steps
    assert list(mapped([table], template="Sum up {body}", resume=True, **options)) == [result]
    assert engine.stats().num_steps == steps


def test_the_row_that_a_function_makes_counts(mapped: Mapped) -> None:
    """Guards parameters for each row beside a template: those of the row that it returns, in any form of a row."""
    tables = [{"id": 1, "n": 3, "size": 2}, {"id": 2, "n": 4, "size": 5}]
    first, second = mapped(tables, template=lambda row: {"prompt": "a", "max_tokens": row["size"], "ignore_eos": True})
    assert [first["usage"]["completion_tokens"], second["usage"]["completion_tokens"]] == [2, 5]
    assert (first["id"], first["extra"]) == (1, {"n": 3, "size": 2})
    made = {3: {"prompt": "a", "id": 9, "b": 1}, 4: {"prompt": "a", "max_token": 1}}
    own, misspelt = mapped(tables, template=lambda row: made[row["n"]])
    assert (own["id"], own["extra"]) == (9, {"n": 3, "size": 2, "b": 1})
    assert misspelt["error"]["code"] == "unknown_parameter" and misspelt["id"] == 2


class Opaque:
    """Its text has an address, like that of a picture."""


class Missing:
    """Compares like the NA of pandas."""

    def __ne__(self, other: object) -> Any:
        return self

    def __bool__(self) -> bool:
        raise TypeError("boolean value of NA is ambiguous")


def test_columns_of_a_template_are_carried_as_data(mapped: Mapped, tmp_path: Path) -> None:
    """Guards rows against a column that nobody asked for, and keys against addresses and the order of sets."""

    def columns() -> dict[Any, tuple[Any, Any]]:
        """Values, each with what stands for it in JSON."""
        return {
            "q": ("hello", "hello"),
            "whole": (np.int32(4), 4),
            "real": (np.float64("nan"), None),
            "list": ([float("inf"), 1.5, np.array([1, 2])], [None, 1.5, [1, 2]]),
            "day": (date(2024, 5, 6), "2024-05-06"),
            "moment": (datetime(2024, 5, 6, 7), "2024-05-06T07:00:00"),
            "numpy": (np.datetime64("2024-05-06T07", "ns"), "2024-05-06T07:00:00.000000000"),
            "days": (np.array(["2024-05-06", "NaT"], "M8[D]"), ["2024-05-06", None]),
            "no_time": (np.datetime64("NaT"), None),
            "price": (Decimal("1.50"), "1.50"),
            "set": ({"b", "a"}, ["a", "b"]),
            "bytes": ([b"x", b"\xff"], ["x", "/w=="]),
            "object": (Opaque(), f"<{__name__}.Opaque object>"),
            "missing": (Missing(), None),
            7: ("number", "number"),
        }

    def row() -> dict[Any, Any]:
        return {"id": np.int64(3)} | {name: value for name, (value, _) in columns().items()}

    options: dict[str, Any] = {"template": "Say {q}", "params": {"max_tokens": 1}, "path": tmp_path / "out.jsonl"}
    (result,) = mapped([row()], **options)
    assert "error" not in result and result["id"] == 3
    assert result["extra"] == {str(name): shown for name, (_, shown) in columns().items()}
    assert list(mapped([row()], resume=True, **options)) == [result]
    huge = {"q": "a", "huge": 10**5000, "id": 5}
    missing, digits, shown, good = mapped(
        [{"q": float("nan"), "id": 4}, huge, {**huge, "q": None}, {"q": date(2024, 5, 6)}], template="Say {q}"
    )
    assert missing["error"]["message"] == "item 0: the column 'q' of the template is null" and missing["id"] == 4
    assert missing["extra"] == {"q": None}
    assert digits["error"]["code"] == "invalid_row" and shown["error"]["code"] == "template_error"
    assert "error" not in good


def test_a_template_over_prompts(mapped: Mapped) -> None:
    """Guards templates around plain texts, and around the prompts of rows, which they replace."""
    wanted = list(mapped(["Say: a", "Say: b"], params={"max_tokens": 4}))
    assert list(mapped(["a", "b"], template="Say: {prompt}", params={"max_tokens": 4})) == wanted
    results = list(mapped([{"prompt": "a"}, {"prompt": "b"}], template="Say: {prompt}", params={"max_tokens": 4}))
    assert [one.text for one in results] == [one.text for one in wanted] and results[0].extra == {"prompt": "a"}
    messages = [{"role": "user", "content": "Say: a"}]
    for made in ("Say: a", messages, {"messages": messages}, {"prompt": "Say: a"}):
        (result,) = mapped([object()], template=lambda row, made=made: made, params={"max_tokens": 4})
        assert result["text"] == wanted[0]["text"]


def test_a_template_that_fails_is_an_error_of_its_row(mapped: Mapped, tmp_path: Path) -> None:
    """Guards the other rows against a column that one row lacks, and against what a function raises."""
    rows = [{"text": "a", "language": "French"}, {"text": "a"}, {"language": None, "text": "a", "id": 4}, ["x"], 7]
    results = list(mapped(rows, template=TEMPLATE, path=tmp_path / "out.jsonl", params={"max_tokens": 1}))
    codes = [row.get("error", {}).get("code") for row in results]
    assert codes == [None, "template_error", "template_error", "template_error", "invalid_row"]
    message = "line 2: the column 'language' of the template is missing; the row has text"
    assert results[1]["error"]["message"] == message
    assert results[2]["error"]["message"].endswith("is null") and results[2]["id"] == 4
    again = mapped(rows, template=TEMPLATE, path=tmp_path / "out.jsonl", resume=True, params={"max_tokens": 1})
    assert list(again) == results
    first, second = mapped([1, 0], template=lambda row: f"{1 / row}", params={"max_tokens": 1})
    assert "error" not in first
    assert second["error"] == {
        "code": "template_error",
        "message": "item 1: the template raised ZeroDivisionError('division by zero')",
    }


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{}", r"\{\} is not one"),
        ("{a.__class__}", r"\{a.__class__\} is not one"),
        ("{a[0]}", r"\{a\[0\]\} is not one"),
        ("{a!r}", r"\{a!r\} is not one"),
        ("{a:>{b}}", r"\{a:>\{b\}\} is not one"),
        ("{a", "cannot be read: expected '}'"),
        ("a}", "cannot be read: Single '}'"),
    ],
)
def test_templates_reach_nothing_but_columns(mapped: Mapped, template: str, message: str) -> None:
    """Guards against templates that look into values, and says so before any row is taken."""
    with pytest.raises(ConfigError, match=message):
        mapped(["a"], template=template)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ("one text", {}, "rows must be an iterable of rows, not one str; put it into a list."),
        (b"bytes", {}, "not one bytes; put it into a list."),
        ({"prompt": "one row"}, {}, "not one dict; put it into a list."),
        (SimpleNamespace(iterrows=0, __iter__=0), {}, "such as to_dict('records')."),
        (5, {}, "rows must be an iterable of rows, not int."),
        (["a"], {"path": "/dev/null"}, "a file is needed."),
        (["a"], {"resume": True}, "resume needs the path of the file that is to be continued."),
        (["a"], {"window": -1}, "window must be a whole number of at least 1, or None, not -1."),
        (["a"], {"window": True}, "at least 1, or None, not True."),
        (["a"], {"template": 5}, "template must be a text, a path or a function of the row, not int."),
        (["a"], {"path": 5}, "path must be the path of a file, not int."),
    ],
)
def test_what_cannot_be_meant(mapped: Mapped, rows: Any, options: dict[str, Any], message: str) -> None:
    """Guards against a prompt for every character of a text, a map that waits for ever, or fails somewhere below."""
    with pytest.raises(ConfigError) as raised:
        next(mapped(rows, **options))
    assert str(raised.value).endswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": 5}, "params must be SamplingParams or a mapping for all rows, not int."),
        ({"params": [{}]}, "not list."),
        ({"system": 5}, "system must be a text or None, not int."),
        ({"seed": "x"}, "seed must be a whole number or None, not 'x'."),
        ({"seed": 1.5}, "not 1.5."),
        ({"seed": True}, "not True."),
    ],
)
def test_what_holds_for_all_rows_is_checked(engine: Engine, options: dict[str, Any], message: str) -> None:
    """Guards calls with a wrong type for all rows."""
    for method in (engine.map, engine.generate, engine.chat, engine.stream)[: 4 if "seed" in options else 1]:
        with pytest.raises(RequestError) as raised:
            method(["a"] if method == engine.map else "a", **options)
        assert str(raised.value).endswith(message)


def test_no_seed_is_new_randomness(engine: Engine, tmp_path: Path) -> None:
    """Guards against the same answers over and over, and against a file that could not be resumed."""
    with pytest.raises(ConfigError, match="give a seed with a path"):
        engine.map(["a"], seed=None, path=tmp_path / "out.jsonl")
    warm: dict[str, Any] = {"params": {"temperature": np.float64(1.0), "max_tokens": 12, "ignore_eos": True}}
    texts = [next(engine.map(["a"], seed=seed, **warm)).token_ids for seed in (None, None, 3, np.int64(3))]
    assert texts[0] != texts[1] and texts[2] == texts[3]


def test_maps_share_an_engine(model_folder: Path, tmp_path: Path) -> None:
    """Guards `Engine.map`: what it is given arrives, and maps inside each other and other calls do not disturb it."""
    with Engine(str(model_folder), device="cpu", dtype="float32", max_seqs=2) as engine:
        options: dict[str, Any] = {"params": {"max_tokens": 4, "temperature": 1.0}, "seed": 5, "system": "Be odd."}
        plain = list(engine.map((f"Say: row {n}" for n in range(6)), **options))
        assert len({one.text for one in plain}) > 3
        mapped = engine.map(
            (f"row {n}" for n in range(6)),
            template="Say: {prompt}",
            path=tmp_path / "out.jsonl",
            ordered=False,
            window=3,
            **options,
        )
        found, inner = [], []
        for one in mapped:
            found.append(one)
            inner.append(next(iter(engine.map([f"Say: row {one.index}"], **options))).text)
            assert engine.generate("hi", {"max_tokens": 1}).error is None
        assert sorted(found, key=lambda one: one.index) == plain and len(set(inner)) > 1
        assert plain == read_rows(tmp_path / "out.jsonl")
        assert next(iter(engine.map(["Say: row 0"], **{**options, "seed": 6}))).text != plain[0].text
        left = engine.map(itertools.repeat("endless"), params={"max_tokens": 90})
        next(left)
    with pytest.raises(EngineError, match="closed"):
        list(left)


def test_an_engine_maps_with_complete_params_and_progress(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards an object as `params`, and the bar on stderr: from the first row to the last, or until it is dropped."""
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    rows = ["hello", {"prompt": "again", "max_tokens": 2}]
    found = list(engine.map(rows, params=params, progress=True))
    assert [one.usage.completion_tokens for one in found] == [3, 2]
    assert [one.to_dict() for one in found] == [one.to_dict() for one in engine.generate(rows, params)]
    assert "2/2" in capsys.readouterr().err
    dropped = engine.map(rows, params=params, progress=True)
    assert capsys.readouterr().err == "" and not tqdm._instances
    next(dropped)
    assert len(tqdm._instances) == 1
    del dropped
    gc.collect()
    assert not tqdm._instances and "1/2" in capsys.readouterr().err
    assert len(list(engine.map(iter(rows), params=params, progress=True))) == 2
    assert "2 rows" in capsys.readouterr().err
