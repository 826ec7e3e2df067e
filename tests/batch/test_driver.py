"""What the rows of a batch run on: the driver of one engine, and what all drivers share."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace

from cbatch.base.chat_template_options import TemplateOptions
from cbatch.base.request import RequestDefaults
from cbatch.batch.journal import Journal
from cbatch.batch.lines import Line, RowOptions
from cbatch.batch.resume import Resuming, plan_resume
from cbatch.batch.row import format_row
from cbatch.engine.stats import EngineStats, total_stats

OPTIONS = RowOptions(
    RequestDefaults(params={"max_tokens": 2}, template=TemplateOptions(kwargs={"think": False}), columns=("timings",))
)


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


def test_sums_over_engines() -> None:
    """Guards the figures of several engines: work of those that died counts, what they held does not."""
    one = EngineStats(1, 2, 3, 0.5, 10, 1, 100, 20, {"slots": 2}, "A.", 7, 1, 0, "first", 0.5)
    two = replace(one, cache_used=0.1, held_back={"slots": 1, "cache": 4}, last_error="second")
    both = total_stats([one, two], ended=[replace(one, fallback="B.", last_error="")])
    assert (both.num_running, both.num_waiting, both.used_blocks, both.cache_used) == (2, 4, 6, 0.3)
    assert (both.num_steps, both.num_preemptions, both.num_tokens, both.idle_s) == (30, 3, 21, 1.5)
    assert both.held_back == {"slots": 5, "cache": 4}
    assert (both.fallback, both.last_error) == ("B. A.", "second")
    assert total_stats([]).num_steps == 0 == total_stats([]).cache_used


def test_driving_a_batch_imports_no_model_library() -> None:
    """Guards the process that drives replicas: it starts in a moment, and needs no torch."""
    code = """if True:
        import sys
        import cbatch.cli.run.batch_run, cbatch.cli.run.command
        from cbatch.cli.run.options import RunOptions
        import cbatch.batch.tables.table_writer
        RunOptions().row_options()
        print([name for name in ("torch", "numpy", "transformers", "tokenizers", "jinja2") if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
