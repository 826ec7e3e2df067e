"""Whole batches that are broken off and go on: the same rows, with less computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cbatch.api import Engine
from cbatch.base.errors import ConfigError
from cbatch.base.request import RequestDefaults
from cbatch.batch.earlier_outputs import JournaledOutputs
from cbatch.batch.engine_driver import EngineStream
from cbatch.batch.line_processor import LineProcessor
from cbatch.batch.lines import RowOptions
from cbatch.batch.templates import lines_of
from cbatch.batch.token_journal import TokenJournalConfig
from cbatch.requests.completion import Completion
from cbatch.tools.tool import load_tools
from cbatch.validation.validation import Validation
from tests.support.faults import slow_steps
from tests.support.model_folder import save_model
from tests.support.shared_engine import ROWS
from tests.support.tiny_models import make_engine, make_network
from tests.support.tool_rounds import ADD, ADD_CALL, ROUNDS

LONG: list[dict[str, Any]] = [
    {"prompt": "hello", "max_tokens": 90, "ignore_eos": True, "temperature": 1.0, "n": 2},
    {"prompt": "hello", "max_tokens": 80, "temperature": 1.0, "logprobs": 2, "ignore_eos": True},
    {"prompt": "user", "max_tokens": 70, "regex": "[ab]{60,70}", "temperature": 1.0},
    {"prompt": "user", "max_tokens": 60, "prompt_logprobs": 0, "ignore_eos": True},
    {"prompt": "user", "max_tokens": 60, "stop": ["qqqqq"], "min_tokens": 50, "frequency_penalty": 1.0},
]
ALL = [*LONG, *ROWS]


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[Engine]:
    options: dict[str, Any] = {"dtype": "float32", "max_seqs": 40, "prefix_cache": False}
    with Engine(str(model_folder), device="cpu", attention="reference", **options) as made:  # whose steps take a while
        yield made


def about(value: Any) -> Any:
    """Rows as they are compared: the last place of log-probabilities depends on the shape of a step on this path."""
    if isinstance(value, Completion):
        return about(value.to_dict())
    if isinstance(value, dict):
        return {name: about(one) for name, one in value.items()}
    if isinstance(value, list):
        return [about(one) for one in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


class Batch:
    """A batch over and over, with its tokens in a file."""

    def __init__(self, engine: Engine, folder: Path, rows: list[Any] = ALL, **options: Any) -> None:
        self.engine, self.rows, self.options = engine, rows, options
        self.path = folder / "out.tokens"

    def stream(self, *, resume: bool = True, interval_s: float | None = 0.001) -> EngineStream:
        config = TokenJournalConfig(str(self.path), resume, interval_s)
        inputs = self.engine.core.input_processor(RequestDefaults(columns=("token_ids",)))
        processor = LineProcessor(inputs, RowOptions(token_journal=config, **self.options))
        stream = EngineStream(self.engine.thread, processor, window=100)
        stream.poll_s = 0.001
        return stream

    def break_off(self, num_tokens: int, **config: Any) -> int:
        """Leaves the batch once so many tokens were generated. Returns how many were."""
        stream = self.stream(**config)
        with slow_steps(), closing(stream.finished(lines_of(self.rows))) as finished:
            for _ in finished:
                if stream.output_tokens >= num_tokens:
                    break
        return stream.output_tokens

    def finish(self, **config: Any) -> tuple[list[Completion], int]:
        """All rows, and the tokens that were generated for them."""
        stream = self.stream(**config)
        found = [row.completion for rows in stream.finished(lines_of(self.rows)) for row in rows]
        return sorted(found, key=lambda row: row.index), stream.output_tokens


@pytest.fixture
def batch(engine: Engine, tmp_path: Path) -> Batch:
    return Batch(engine, tmp_path)


@pytest.fixture(scope="module")
def whole(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of a batch that nothing broke off."""
    rows, _ = Batch(engine, tmp_path_factory.mktemp("whole")).finish(resume=False)
    return about(rows)


@pytest.mark.parametrize("num_tokens", [1, 240])
def test_rows_go_on_where_they_were_broken_off(batch: Batch, whole: list[dict[str, Any]], num_tokens: int) -> None:
    """Guards every kind of row: the same bytes, and what was journaled is not generated again."""
    made = batch.break_off(num_tokens, resume=False)
    rows, rest = batch.finish()
    assert [row.to_dict() for row in rows] == whole
    continued = [row.index for row in rows if row.continued_tokens]
    assert 3 not in continued, "log-probabilities of a prompt come with the first token"
    total = sum(row["usage"]["completion_tokens"] for row in whole if "usage" in row)
    assert rest == total - sum(row.continued_tokens for row in rows)
    if num_tokens >= 60:
        assert {0, 1, 2, 4} <= set(continued)
    assert made >= num_tokens


def test_a_batch_may_be_broken_off_over_and_over(
    batch: Batch, whole: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """Guards tokens of the first run in the third, and that no run begins from the start or warns of anything."""
    made = batch.break_off(30, resume=False)
    for _ in range(4):
        made += batch.break_off(30)
    rows, rest = batch.finish()
    assert [row.to_dict() for row in rows] == whole
    assert rest < sum(row["usage"]["completion_tokens"] for row in whole if "usage" in row) - 60
    assert all(row.reused.completion_tokens == row.continued_tokens for row in rows)
    assert not caplog.records


def test_other_options_begin_anew(batch: Batch, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against the tokens of another seed, prompt or temperature, and says that they are not used."""
    batch.rows = [{"prompt": "hello", "max_tokens": 60, "ignore_eos": True, "temperature": 1.0}] * 3
    batch.break_off(60, resume=False)
    data = batch.path.read_bytes()
    for change in ({"prompt": "other"}, {"temperature": 0.9}, {"logprobs": 0}):
        batch.path.write_bytes(data)
        batch.rows = [row | change for row in batch.rows]
        rows, _ = batch.finish()
        assert not any(row.continued_tokens for row in rows)
        assert "3 unfinished answers began anew" in caplog.text
        caplog.clear()


def test_another_limit_goes_on(batch: Batch, caplog: pytest.LogCaptureFixture) -> None:
    """Guards --max-tokens: it decides where an answer ends and no token of it, so a smaller one ends it at once."""
    row = {"prompt": "hello", "ignore_eos": True, "temperature": 1.0}
    batch.rows = [row | {"max_tokens": 80}]
    batch.break_off(30, resume=False)
    data = batch.path.read_bytes()
    for limit in (10, 100):
        batch.rows = [row | {"max_tokens": limit}]
        batch.path.write_bytes(data)
        (found,), made = batch.finish()
        batch.path.unlink(missing_ok=True)
        (alone,), _ = batch.finish(resume=False)
        assert found.to_dict() == alone.to_dict() and found.continued_tokens >= min(limit, 30)
        assert made == limit - found.continued_tokens
    assert not caplog.records


def test_tries_are_not_generated_twice(engine: Engine, tmp_path: Path) -> None:
    """Guards tries: those that are over come from the journal as well, and the row counts all tokens."""
    rows = [{"prompt": "hello", "max_tokens": 30, "ignore_eos": True, "temperature": 1.0, "id": n} for n in range(4)]
    never = Validation.of(["regex=never"], tries=3, tells_error=False, timeout_s=30.0)
    batch = Batch(engine, tmp_path, rows, validation=never)
    expected, total = batch.finish(resume=False)
    assert total == 4 * 3 * 30
    batch.break_off(200, resume=False)
    found, rest = batch.finish()
    assert [row.to_dict() for row in found] == [row.to_dict() for row in expected]
    assert rest <= total - 200 and [row.usage for row in found] == [row.usage for row in expected]


def test_rounds_of_tools_are_not_generated_twice(tmp_path: Path) -> None:
    """Guards tools: rounds that are over come from the journal, and the one that was broken off goes on."""
    (tmp_path / "tools.py").write_text(ADD)
    model = save_model(tmp_path / "model", context=1500)
    (model / "chat_template.jinja").write_text(ROUNDS)
    rows = [{"prompt": "a", "choice": [ADD_CALL]}, {"prompt": "b", "max_tokens": 30, "ignore_eos": True}]
    with Engine(str(model), device="cpu", dtype="float32") as engine:
        tools = tuple(load_tools([tmp_path / "tools.py"]))
        batch = Batch(engine, tmp_path, rows, tools=tools, max_tool_rounds=2)
        expected, total = batch.finish(resume=False)
        length = (total - 30) // 3
        assert len(expected[0].tool_messages) == 4 and length > 20
        batch.break_off(30 + 2 * length - 5, resume=False)
        found, rest = batch.finish()
    assert [row.to_dict() for row in found] == [row.to_dict() for row in expected]
    assert rest <= 30 + length + 5


def test_a_model_without_a_fingerprint_is_refused(tmp_path: Path) -> None:
    """Guards models made in memory, which nothing tells apart."""
    with pytest.raises(ConfigError, match="have no fingerprint"):
        JournaledOutputs(make_engine(make_network("llama")), TokenJournalConfig(str(tmp_path / "out.tokens")))
