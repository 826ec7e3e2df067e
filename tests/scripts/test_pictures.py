"""The scripts that draw the documentation's pictures: what they run exists, and what they draw is right and kept."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from cbatch.cli.bench.command import bench
from cbatch.cli.bench.page import Picture
from cbatch.cli.bench.recorder import RecordedChunk, RecordedRequest, RecordedStep, RunRecord, RunRecorder
from cbatch.cli.bench.workload import Workload
from scripts.benchmarks.harness import parse
from scripts.pictures.picture_bench import DRAWINGS, FOLDER, SKEW, rows
from scripts.pictures.skew import plot_skew
from scripts.pictures.speculation import plot_speculation
from scripts.pictures.step import ExampleStep, StepWatcher, plot_step
from scripts.pictures.utilisation import plot_utilisation
from tests.support.bench_reports import both, continuous_record, make_curve, slow_record
from tests.support.pictures import check_colours, check_pictures, draw_all
from tests.support.tiny_models import make_engine, make_network


def test_drawings_can_be_repeated() -> None:
    """Guards the documented commands: their options exist, and what they draw is there for light and dark pages."""
    for drawing in DRAWINGS.values():
        if drawing.command == SKEW:
            parse(["skew", *drawing.arguments.split()])
        else:
            bench.make_context("bench", drawing.arguments.split())
        assert drawing.make is None or len(drawing.keeps) == 1
    kept = [name for drawing in DRAWINGS.values() for name in drawing.keeps if "." not in name]
    assert all((FOLDER / f"{name}{end}.svg").is_file() for name in kept for end in ("", "-dark"))
    assert len(rows().splitlines()) == 32 and "Felix" in json.loads(rows().splitlines()[0])["prompt"]


def drafting_record() -> RunRecord:
    """Request 0 decodes in 40 steps with drafts of two in every other one; request 1 enters, and has none."""
    steps = []
    for n in range(40):
        right = (0, 2, 1, 1)[n // 2 % 4]
        own = RecordedChunk(0, 0, "decode", n, 3, 2, right) if n % 2 else RecordedChunk(0, 0, "decode", n, 1)
        other = RecordedChunk(1, 1, "decode" if n > 20 else "prefill", n, 1)
        steps.append(RecordedStep(n, n + 1, 0.5, (own, other) if n >= 20 else (own,), 2))
    return RunRecord(2, [RecordedRequest(60), RecordedRequest(19)], steps, elapsed_s=40.0)


EXPECTED = {
    "utilisation": {
        "useful 69% of 8.00 s",
        "useful 100% of 15.7 min, of which 9.00 s are shown",
        "55.0 s, of which 9.00 s are shown",
        "only the time is known",
        "padding",
    },
    "step": {
        "One step of the engine: 4 tokens of 2 requests in one pass",
        "request 0, token 5",
        "request 2, tokens 0 to 2",
        "The same blocks in memory, 0 to 5 of 16: a request takes whichever are free",
        "3",
    },
    "speculation": {"20 of 40 drafted tokens of the run were accepted.", "request 0", "1.5", "1.0", "rejected"},
    "skew": {"measured", "by steps", "by tokens", "chat", "instructions", "slots that do not wait", "no padding"},
}


def test_pictures_are_whole() -> None:
    """Guards each picture: figures counted by hand, words that do not overlap, colours that are explained."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plot)")
    records = both() | {"without KV cache": slow_record(940.0), "without dynamic scheduling": slow_record(9.0)}
    draws: dict[str, Any] = {
        "utilisation": partial(plot_utilisation, records, {"transformers-generate": 55.0}),
        "step": partial(plot_step, continuous_record(), ExampleStep(2, 2, ((3, 0, 4), (1, 5)))),
        "speculation": partial(plot_speculation, drafting_record()),
        "skew": partial(plot_skew, make_curve()),
    }
    drawn = draw_all(Picture(name, draw) for name, draw in draws.items())
    check_pictures(drawn, EXPECTED)
    check_colours(drawn)


def test_example_of_a_step() -> None:
    """Guards the step that is drawn: prompt and output mixed, and the blocks that its tokens take."""
    engine = make_engine(make_network("llama"), max_batch_tokens=8)
    recorder, watcher = RunRecorder(engine, [4, 4, 4], slots=3), StepWatcher()
    prompts = [list(range(20 * index, 20 * index + length)) for index, length in enumerate((3, 13, 6))]
    watcher.run(recorder, Workload(prompts, [4, 4, 4], "by hand"), 3)
    record, example = recorder.finish(), watcher.example
    assert example is not None and example.block_size == 4
    chunks = record.steps[example.step].chunks
    assert {chunk.kind for chunk in chunks} == {"prefill", "decode"}
    assert any(chunk.kind == "prefill" and chunk.start > 0 for chunk in chunks)
    blocks = [block for table in example.block_tables for block in table]
    assert len(set(blocks)) == len(blocks) and max(blocks) < record.num_blocks
    sizes = [-(-(chunk.start + chunk.tokens) // 4) for chunk in chunks]
    assert [len(table) for table in example.block_tables] == sizes
