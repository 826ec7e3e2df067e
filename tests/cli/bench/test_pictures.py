"""The pictures of a benchmark: in characters, as SVG, and the page that holds them."""

from __future__ import annotations

import dataclasses
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from cbatch.cli.bench.metrics import run_metrics
from cbatch.cli.bench.recorder import (
    ExampleStep,
    RecordedChunk,
    RecordedRequest,
    RecordedStep,
    RunRecord,
    RunRecorder,
    TokenKind,
    example_score,
)
from cbatch.cli.bench.render.report import html_report
from cbatch.cli.bench.render.timeline import share_line, slot_intervals, time_shares, timeline, whole_percents
from cbatch.cli.bench.workload import Workload
from cbatch.engine import ConfigError
from tests.support.tiny_models import make_engine, make_network

if TYPE_CHECKING:
    from cbatch.cli.bench.load.users import LoadPoint


def make_step(start: float, end: float, *chunks: tuple[int, int, TokenKind, int, int]) -> RecordedStep:
    return RecordedStep(start, end, (end - start) / 2, tuple(RecordedChunk(*chunk) for chunk in chunks), 2)


def make_row(first: float, last: float, tokens: int) -> RecordedRequest:
    return RecordedRequest(tokens, [7] * tokens, first, last)


def static_trace() -> RunRecord:
    """Two slots: row 1 is padded, and computed past its end; then row 2 is alone."""
    steps = [
        make_step(0, 2, (0, 0, "prefill", 0, 4), (1, 1, "prefill", 0, 2), (1, 1, "padding", 0, 2)),
        make_step(2, 4, (0, 0, "decode", 4, 1), (1, 1, "decode", 2, 1)),
        make_step(4, 6, (0, 0, "decode", 5, 1), (1, 1, "idle", 3, 1)),
        make_step(6, 8, (0, 2, "prefill", 0, 3)),
    ]
    rows = [make_row(2, 6, 3), make_row(2, 4, 2), make_row(8, 8, 1)]
    return RunRecord(2, rows, steps, elapsed_s=8.0, num_blocks=16, example=ExampleStep(0, 2, ((3, 0), (5,), (6,))))


def continuous_trace() -> RunRecord:
    """The same rows, but row 2 enters with what row 1 leaves."""
    steps = [
        make_step(0, 2, (0, 0, "prefill", 0, 4), (1, 1, "prefill", 0, 2)),
        make_step(2, 4, (0, 0, "decode", 4, 1), (1, 1, "decode", 2, 1)),
        make_step(4, 6, (0, 0, "decode", 5, 1), (1, 2, "prefill", 0, 3)),
    ]
    rows = [make_row(2, 6, 3), make_row(2, 4, 2), make_row(6, 6, 1)]
    return RunRecord(2, rows, steps, elapsed_s=6.0, num_blocks=16, example=ExampleStep(2, 2, ((3, 0, 4), (1, 5))))


def both() -> dict[str, RunRecord]:
    return {"static batches": static_trace(), "continuous": continuous_trace()}


def some_figures() -> dict[str, Any]:
    work = Workload([[1] * 4, [1] * 2, [1] * 3], [3, 2, 1], "by hand")
    return {title: run_metrics(record, work) for title, record in both().items()}


def some_points() -> list[LoadPoint]:
    from cbatch.cli.bench.load.users import LoadPoint

    return [LoadPoint(users, 0.1 * users, 0.2 * users, 90 / users, 60 / users, 1 / users) for users in (1, 4, 16)]


def test_timeline_is_drawn() -> None:
    """Guards every mark, and that both runs are on one scale: 16 columns for 8 seconds, of which one takes 6."""
    assert timeline(both(), 20) == [
        "static batches: 8.00",
        "useful 69%, padding ",
        "0 │▐███━━━━━━━━▐███│",
        "1 │▐█░░━━━━····    │",
        "continuous: 6.00 s",
        "useful 100%, padding",
        "0 │▐███━━━━━━━━│",
        "1 │▐███━━━━▐███│",
        "   0         8.00 s",
        "█ prefill (prompt)",
        "━ decode (output)",
        "░ padding",
        "· idle (past a row's",
        "▐ a row enters",
    ]


def test_timeline_fits_any_terminal() -> None:
    """Guards terminals without Unicode, lanes that are too many, colours nobody asked for, and a run of nothing."""
    lines = timeline({"static": static_trace()}, 72, plain=True, lanes=1)
    assert all(line.isascii() and len(line) <= 72 and "\x1b" not in line for line in lines)
    assert lines[0] == "static: 8.00 s; useful 69%, padding 6%, idle 13%, empty 12%"
    assert lines[1].startswith("0 |[####") and lines[2] == "1 of 2 slots are not shown" and "4.00" in lines[3]
    assert any("\x1b[34m█\x1b[0m" in line for line in timeline(both(), 40, colour=True))
    assert timeline({"nothing": RunRecord(1, [])}, 40)[2] == "0 ││"
    assert timeline({}, 40) == []


def test_majority_of_a_column() -> None:
    """Guards that a column shows what took most of its time, and that it is empty where that was nothing."""
    steps = [make_step(0, 1, (0, 0, "prefill", 0, 2)), make_step(4, 5, (0, 0, "padding", 0, 2))]
    steps += [make_step(5, 7, (0, 0, "decode", 2, 1)), make_step(40, 41, (0, 0, "decode", 3, 1))]
    lines = timeline({"one": RunRecord(1, [RecordedRequest(3)], steps, elapsed_s=44.0)}, 15, plain=True)
    assert lines[2] == "0 |[=         |"


def test_shares_are_whole() -> None:
    """Guards that shares add up to 1, and their percents to 100, whatever is rounded."""
    for record in (*both().values(), RunRecord(3, [])):
        assert sum(time_shares(record).values()) == pytest.approx(1)
    assert time_shares(static_trace()) == {"useful": 0.6875, "padding": 0.0625, "idle": 0.125, "empty": 0.125}
    assert whole_percents({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}) == {"a": 34, "b": 33, "c": 33}
    assert share_line(static_trace()) == "useful 69%, padding 6%, idle 13%, empty 12%"


def test_spans_join_steps() -> None:
    """Guards that steps of one kind are one span, that spans of a slot do not overlap, and who enters where."""
    found = slot_intervals(static_trace())
    assert [(span.slot, span.row, span.kind, span.start, span.end) for span in found if span.slot == 0] == [
        (0, 0, "prefill", 0, 2),
        (0, 0, "decode", 2, 6),
        (0, 2, "prefill", 6, 8),
    ]
    assert [span.row for span in found if span.enters] == [0, 1, 2]
    other = [span for span in found if span.slot == 1]
    assert all(before.end <= after.start for before, after in pairwise(other))


def test_example_of_a_step() -> None:
    """Guards the step that is kept for a picture: prompt and output mixed, and the blocks the engine held then."""
    engine = make_engine(make_network("llama"), max_batch_tokens=8)
    held: list[list[list[int]]] = []
    forward = engine.runner.forward

    def spy(batch: Any) -> Any:
        held.append([list(chunk.request.blocks) for chunk in engine.last_scheduled.chunks])
        return forward(batch)

    engine.runner.forward = spy  # type: ignore[method-assign]
    recorder = RunRecorder(engine, [4, 4, 4], slots=3)
    for row, length in enumerate((3, 13, 6)):
        recorder.add(row, list(range(1, length + 1)), 4)
    recorder.run()
    record = recorder.finish()
    assert record.example is not None and record.example.block_size == 4
    chunks = record.steps[record.example.step].chunks
    assert {chunk.kind for chunk in chunks} == {"prefill", "decode"}
    assert any(chunk.kind == "prefill" and chunk.start > 0 for chunk in chunks)
    assert [list(table) for table in record.example.tables] == held[record.example.step]
    assert [len(table) for table in record.example.tables] == [
        -(-(chunk.start + chunk.tokens) // 4) for chunk in chunks
    ]


def test_variety_of_a_step() -> None:
    """Guards which step is shown: mixed before all prompts or all output, then one that goes on with a prompt."""
    ranked = [[(5, 1)] * 7, [(5, 1), (0, 4)], [(5, 1), (4, 4)], [(5, 1)] * 6 + [(4, 30)], [(5, 1)] * 6 + [(4, 4)]]
    assert sorted(ranked, key=example_score) == ranked


def texts_of(svg: str) -> set[str]:
    """Words of a picture: they are drawn as outlines, each after a comment with the text."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    root = ElementTree.fromstring(svg, parser)
    return {(node.text or "").strip() for node in root.iter() if node.tag is ElementTree.Comment}


EXPECTED = {
    "timeline.svg": {"static batches: 8.00 s", "continuous: 6.00 s", "useful 100%, padding 0%, idle 0%, empty 0%"},
    "utilisation.svg": {"useful 69% of 8.00 s", "100%", "seconds", "padding"},
    "speed.svg": {"output tokens/s", "static batches", "first token (TTFT), s", "2.00 / 6.80 / 7.88"},
    "load.svg": {"users at once", "p99", "p10", "16", "The objective is TTFT under 1 s."},
    "step.svg": {
        "One step of the engine: 4 tokens of 2 rows in one pass",
        "row 0, token 5",
        "row 2, tokens 0 to 2",
        "The same pages where they lie in memory: the first 6 of 16",
        "3",
    },
}


def test_pictures_are_whole(tmp_path: Path) -> None:
    """Guards that each picture is well-formed, says what it shows, and is the same for the same data."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plot)")
    from cbatch.cli.bench.render.plots import write_svgs

    paths = write_svgs(tmp_path / "new", both(), some_figures(), some_points(), objective="TTFT under 1 s")
    assert {path.name for path in paths.values()} == EXPECTED.keys()
    for path in paths.values():
        svg = path.read_text(encoding="utf-8")
        missing = EXPECTED[path.name] - texts_of(svg)
        assert not missing, f"{path.name} lacks {missing}; it has {texts_of(svg)}"
        assert "<dc:date>" not in svg
    again = write_svgs(tmp_path, both(), {})
    assert len(again) == 3
    for title, path in again.items():
        assert path.read_bytes() == paths[title].read_bytes()


def test_pictures_of_little(tmp_path: Path) -> None:
    """Guards runs with nothing in them, or of other strategies: what has no data is left out."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plot)")
    from cbatch.cli.bench.render.plots import write_svgs

    assert write_svgs(tmp_path, {}, {}) == {}
    assert write_svgs(tmp_path, {"one by one": RunRecord(1, [])}, {}).keys() == {"Utilisation"}
    few = dataclasses.replace(static_trace(), example=None)
    assert write_svgs(tmp_path, {"static batches": few}, {}).keys() == {"Timeline", "Utilisation"}


def test_step_picture_chooses_rows() -> None:
    """Guards pictures of steps with many rows: some prompts and no dummies are among the eight that are shown."""
    from cbatch.cli.bench.render.step_plot import choose_chunks, lay_out

    chunks = [(RecordedChunk(n, n, "decode", 9, 1), (n, n + 100)) for n in range(20)]
    chunks += [
        (RecordedChunk(20, 20, "padding", 0, 9), (300,)),
        (RecordedChunk(21, 21, "prefill", 0, 100), tuple(range(400, 413))),
    ]
    chosen = choose_chunks(chunks)
    assert [chunk.row for chunk, _ in chosen] == [0, 1, 2, 3, 4, 5, 6, 21]
    sequences, width = lay_out(chosen, block_size=8)
    assert sequences[-1].left + 13 * 8 == width
    assert sequences[-1].own(sequences[-1].cells - 1) == 100
    assert all(before.top + before.height == after.top for before, after in pairwise(sequences))
    assert choose_chunks(chunks[20:21]) == chunks[20:21]


def test_missing_matplotlib_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what people read who have not installed the extra."""
    from cbatch.cli.bench.render.plots import write_svgs

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'cbatch\[plot\]'"):
        write_svgs(tmp_path, both(), {})


class Page(HTMLParser):
    """Collects what a page is made of, and fails where its tags do not fit into each other."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th", "p", "h1", "figcaption"):
            self.cells.append(data)


def test_report_is_safe_and_whole() -> None:
    """Guards the page: tags fit, names are text and not markup, units are written, and nothing is loaded."""
    evil = "<script src='http://example.org/x'>\"&"
    data = {
        "title": evil,
        "machine": {"cpu": evil, "memory_bytes": 3 << 29, "gpu": None, "fast": True, evil: [1, 2]},
        "work": evil,
        "strategies": {"continuous": some_figures()["continuous"], evil: {"idle_slot_share": 0.25, "only_s": 2}},
        "load": [dataclasses.asdict(point) for point in some_points()],
        "empty": {},
    }
    text = html_report(data, [(evil, f"<svg><title>{evil}</title></svg>")])
    page = Page()
    page.feed(text)
    page.close()
    assert not page.open and "<script" not in text
    assert page.tags.isdisjoint({"script", "link", "iframe", "object"}) and "url(" not in text
    assert [link[:26] for link in page.links] == ["data:image/svg+xml;base64,"]
    assert page.cells.count(evil) == 6
    for shown in ("1.5 GiB", "–", "yes", "25.0%", "TTFT p50", "2.00 s", "1, 2", "output tokens/s", "users"):
        assert shown in page.cells, shown
