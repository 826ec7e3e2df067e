"""The pipeline's threads: one row out for each row in, in bounded memory, whatever the rows are."""

from __future__ import annotations

import io
import json
import random
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbatch.api import Engine
from cbatch.base.errors import Interrupted
from cbatch.base.request import RequestDefaults
from cbatch.batch import lines as lines_module
from cbatch.batch.engine_driver import EngineDriver, EngineStream
from cbatch.batch.lines import RowOptions, read_lines
from cbatch.batch.writer import StreamWriter, run_stream
from cbatch.cli.run.stats import RunStats
from scripts.benchmarks.rows import measure_apart
from tests.support.command import Command
from tests.support.faults import slow_steps, wait_until
from tests.support.rows import parse_rows


def run(engine: Engine, data: bytes, window: int = 16) -> list[dict[str, Any]]:
    """Runs an input through the real reader, engine thread and writer."""
    stream = io.BytesIO()
    options, stats = RowOptions(RequestDefaults(params={"max_tokens": 2})), RunStats()
    output = StreamWriter(stream, input_order=True)
    driver = EngineDriver(engine.thread)
    rows = driver.open(options, window=window)
    stats.attach(driver, rows)
    run_stream(rows, output, read_lines(io.BytesIO(data)), stats.count)
    assert engine.failure is None and engine.core.scheduler.pool.num_used == 0
    return [json.loads(line) for line in stream.getvalue().splitlines()]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
names = ["prompt", "messages", "prompt_token_ids", "id", "raw", "priority", "seed", "stop", "max_tokens", "temperature"]
names += ["top_k", "top_p", "body", "url", "custom_id", "method", "note", "max_token", "stop_token_ids"]
good = st.sampled_from(
    [
        b'{"prompt": "fine", "max_tokens": 1}',
        b'{"prompt_token_ids": [5, 6], "temperature": 1, "id": "same"}',
        b'{"messages": [{"role": "user", "content": "hi"}], "id": "same"}',
        b'{"custom_id": "x", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "a"}], '
        b'"max_tokens": 2}}',
    ]
)
odd = st.sampled_from(
    [
        b'{"prompt": NaN}',
        b'{"prompt": "a", "x": 1e999}',
        b'{"prompt": "a", "x": ' + b"7" * 5000 + b"}",
        b'{"prompt": "\\ud800 lone"}',
        b'{"prompt": "a", "prompt": "b", "max_tokens": 1}',
        b"[" * 5000,
        b'{"prompt": ' + b"[" * 300 + b"]" * 300 + b"}",
        b"\xef\xbb\xbf{}",
        b"\x00\x00",
        b"\xff\xfe",
        b"x" * 3000,
    ]
)


def mutated(row: bytes, position: int, byte: int) -> bytes:
    """A good row with one byte changed."""
    position %= len(row)
    return row[:position] + bytes([byte]) + row[position + 1 :]


line = (
    good
    | odd
    | st.binary(max_size=40)
    | st.builds(mutated, good, st.integers(0, 200), st.integers(0, 255))
    | st.dictionaries(st.sampled_from(names), values, max_size=4).map(lambda fields: json.dumps(fields).encode())
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(line, max_size=8), st.sampled_from([b"\n", b"\r\n"]), st.booleans())
def test_every_line_has_exactly_one_outcome(engine: Engine, many: list[bytes], end: bytes, closed: bool) -> None:
    """Guards against lost, doubled and broken rows, and a row that ends the run, whatever the bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "MAX_LINE_BYTES", 2000)
        data = b"".join(line + end for line in many)
        data = data if closed else data.removesuffix(end)
        rows = run(engine, data)
        wanted = [number for number, line in enumerate(data.split(b"\n")) if line.strip(b"\r\n") and line.strip()]
        if data.startswith(b"\xef\xbb\xbf") and not data.split(b"\n")[0][3:].strip():
            wanted.remove(0)
    assert [row["index"] for row in rows] == wanted
    for row in rows:
        good = row["response"]["status_code"] == 200 if "custom_id" in row else row.get("finish_reason")
        assert len(row["key"]) == 32 and bool(good) != bool(row.get("error"))
        code = (row.get("error") or {}).get("code")
        assert code != "internal_error", row


def test_a_line_of_64_mib_takes_bounded_memory() -> None:
    """Guards memory against one endless line, and the rows around it."""
    stream = io.BytesIO(b'{"prompt": "a"}\n' + b"x" * 64 * 2**20 + b'\n{"prompt": "b"}\n')
    tracemalloc.start()
    found = list(read_lines(stream))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [line.data for line in found] == [b'{"prompt": "a"}', None, b'{"prompt": "b"}']
    assert peak < 3.5 * lines_module.MAX_LINE_BYTES


def test_what_was_finished_before_a_signal_is_written(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards rows that are queued, more than one write holds, or wait for an unfinished one when the signal comes."""
    monkeypatch.setattr(EngineStream, "max_messages", 4)
    stream = io.BytesIO()
    rows_of: EngineStream

    class Slow(StreamWriter):
        """Its first write takes until all rows are read, and then comes the signal."""

        has_waited = False

        def write(self, rows: Any) -> Any:
            if rows and not self.has_waited:
                self.has_waited = True
                wait_until(lambda: all(thread.name != "cbatch-reader" for thread in threading.enumerate()))
                rows_of.interrupt(2)
            return super().write(rows)

    output, stats = Slow(stream, input_order=True), RunStats()
    rows_of = EngineDriver(engine.thread).open(RowOptions(), window=100)
    rows = [b"{bad"] * 20 + [b'{"prompt": "long", "max_tokens": 240, "ignore_eos": true}'] + [b"{bad"] * 20
    with slow_steps(), pytest.raises(Interrupted):
        run_stream(rows_of, output, read_lines(io.BytesIO(b"\n".join(rows))), stats.count)
    assert [row["index"] for row in parse_rows(stream.getvalue())] == [*range(20), *range(21, 41)]


ASKED: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3, "top_p": 0.9},
    {"logit_bias": {"70": 5}, "bad_words": ["e"], "min_tokens": 5},
    {"regex": "[a-z]{3,20} [0-9]+"},
]
SAMPLED: list[dict[str, Any]] = [
    {"id": f"r{n}", "prompt": "all begin alike: " + f"row {n} " * (1 + n % 7), "temperature": 1.0, "max_tokens": 9 + n}
    | ASKED[n % 5]
    for n in range(24)
]
SETTINGS: dict[str, list[str]] = {
    "few slots": ["--max-seqs", "2", "--order", "completion"],
    "many slots": ["--max-seqs", "24", "--window", "24"],
    "small steps": ["--max-batch-tokens", "7"],
    "preempted": ["--block-size", "2", "--kv-blocks", "70", "--max-seqs", "24"],
    "resumed": ["--max-seqs", "5"],
    "no prefix cache": ["--no-prefix-cache", "--block-size", "2"],
    "drafts": ["--speculate", "3"],
    "spread": ["--device", "cpu", "--device-map", "auto", "--max-memory", '{"cpu": "100KiB"}'],
    "shuffled": [],
}


@pytest.fixture(scope="module")
def whole(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The rows of a run with the usual settings, as bytes."""
    command = Command(tmp_path_factory.mktemp("whole"), model_folder, SAMPLED)
    assert command("--token-ids") == 0
    return command.lines()


@pytest.mark.parametrize("name", SETTINGS)
def test_batch_settings_and_other_rows_change_no_byte(
    command: Command, whole: list[bytes], name: str, capfd: Any
) -> None:
    """Guards the contract's promise at temperature 1, through the whole command: only an index may be another."""
    order = list(range(len(SAMPLED)))
    if name == "shuffled":
        random.Random(0).shuffle(order)
    command.write([SAMPLED[index] for index in order])
    if name == "resumed":
        command.out.write_bytes(b"".join(whole[1::3]) + whole[0][:9])
    assert command("--resume", "--token-ids", *SETTINGS[name]) == 0
    if name == "shuffled":
        assert [row | {"index": order[row["index"]]} for row in command.rows()] == [
            parse_rows(whole[index])[0] for index in order
        ]
    else:
        assert sorted(command.lines(), key=lambda line: int(json.loads(line)["index"])) == whole
    assert ("cbatch: The model is spread: " in capfd.readouterr().err) == (name == "spread")
    stats = command.figures()
    assert (stats["preemptions"] > 0) == (name == "preempted")
    assert (stats["cached_tokens"] == 0) == (name == "no prefix cache")
    assert (stats["rows_kept"] == 8) == (name == "resumed")


@pytest.mark.exhaustive
def test_memory_does_not_grow_with_the_input() -> None:
    """Guards flat memory: a million rows may take 200 MiB, and 60,000 their share of that."""
    few, many = measure_apart(1_000, 61_000, 64)
    assert many["peak_mib"] - few["peak_mib"] < 200 * 60_000 / 1_000_000
