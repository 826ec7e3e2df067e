"""The pictures of a bench: in characters, as SVG, and the page that holds them."""

from __future__ import annotations

import dataclasses
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from cbatch.cli.bench.load.results import LoadResult
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
from cbatch.cli.bench.render.timeline import (
    Interval,
    draw_timeline,
    share_line,
    slot_intervals,
    time_shares,
    whole_percents,
)
from cbatch.cli.bench.results import RunMetrics, run_metrics
from cbatch.cli.bench.workload import Workload
from cbatch.cli.common.percentiles import Percentiles
from cbatch.cli.main import run_command
from tests.support.tiny_models import make_engine, make_network


def make_step(start: float, end: float, *chunks: tuple[int, int, TokenKind, int, int]) -> RecordedStep:
    return RecordedStep(start, end, (end - start) / 2, tuple(RecordedChunk(*chunk) for chunk in chunks), 2)


def make_request(first: float, last: float, tokens: int) -> RecordedRequest:
    return RecordedRequest(tokens, [7] * tokens, first, last)


def static_record() -> RunRecord:
    """Two slots: request 1 is padded, and computed past its end; then request 2 runs alone."""
    steps = [
        make_step(0, 2, (0, 0, "prefill", 0, 4), (1, 1, "prefill", 0, 2), (1, 1, "padding", 0, 2)),
        make_step(2, 4, (0, 0, "decode", 4, 1), (1, 1, "decode", 2, 1)),
        make_step(4, 6, (0, 0, "decode", 5, 1), (1, 1, "idle", 3, 1)),
        make_step(6, 8, (0, 2, "prefill", 0, 3)),
    ]
    requests = [make_request(2, 6, 3), make_request(2, 4, 2), make_request(8, 8, 1)]
    return RunRecord(2, requests, steps, elapsed_s=8.0, num_blocks=16, example=ExampleStep(0, 2, ((3, 0), (5,), (6,))))


def continuous_record() -> RunRecord:
    """The same requests, but request 2 enters when request 1 leaves."""
    steps = [
        make_step(0, 2, (0, 0, "prefill", 0, 4), (1, 1, "prefill", 0, 2)),
        make_step(2, 4, (0, 0, "decode", 4, 1), (1, 1, "decode", 2, 1)),
        make_step(4, 6, (0, 0, "decode", 5, 1), (1, 2, "prefill", 0, 3)),
    ]
    requests = [make_request(2, 6, 3), make_request(2, 4, 2), make_request(6, 6, 1)]
    return RunRecord(2, requests, steps, elapsed_s=6.0, num_blocks=16, example=ExampleStep(2, 2, ((3, 0, 4), (1, 5))))


def both() -> dict[str, RunRecord]:
    return {"static batches": static_record(), "continuous": continuous_record()}


def some_metrics() -> dict[str, RunMetrics]:
    work = Workload([[1] * 4, [1] * 2, [1] * 3], [3, 2, 1], "by hand")
    return {title: run_metrics(record, work) for title, record in both().items()}


def some_loads() -> dict[int, LoadResult]:
    return {users: make_load(users) for users in (1, 4, 16)}


def make_load(users: int) -> LoadResult:
    return LoadResult(
        users=users,
        users_judged=users,
        users_served=1 / users,
        answers=users,
        answers_served=1 / users,
        cut_off=0,
        errors=0,
        first_error="",
        ttft_s=Percentiles(0.1 * users, 0.15 * users, 0.2 * users),
        tpot_s=Percentiles(users / 90, users / 60, users / 50),
        prompt_tokens=30,
        cached_tokens=0,
        output_tokens=30,
        elapsed_s=9.0,
        worst_lag_s=0.0,
    )


def test_timeline_is_drawn() -> None:
    """Guards every mark, and that both runs are on one scale: 16 columns for 8 seconds, of which one takes 6."""
    assert draw_timeline(both(), 20) == [
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
        "· idle (past the end",
        "▐ a request enters",
    ]


def test_timeline_fits_any_terminal() -> None:
    """Guards narrow terminals, too many lanes, and a run of nothing."""
    lines = draw_timeline({"static": static_record()}, 72, max_lanes=1)
    assert all(len(line) <= 72 and "\x1b" not in line for line in lines)
    assert lines[0] == "static: 8.00 s; useful 69%, padding 6%, idle 13%, empty 12%"
    assert lines[1].startswith("0 │▐███") and lines[2] == "1 of 2 slots are not shown" and "4.00" in lines[3]
    assert draw_timeline({"nothing": RunRecord(1, [])}, 40)[2] == "0 ││"
    assert draw_timeline({}, 40) == []


def test_majority_of_a_column() -> None:
    """Guards that a column shows what took most of its time, and that it is empty if that was nothing."""
    steps = [make_step(0, 1, (0, 0, "prefill", 0, 2)), make_step(4, 5, (0, 0, "padding", 0, 2))]
    steps += [make_step(5, 7, (0, 0, "decode", 2, 1)), make_step(40, 41, (0, 0, "decode", 3, 1))]
    lines = draw_timeline({"one": RunRecord(1, [RecordedRequest(3)], steps, elapsed_s=44.0)}, 15)
    assert lines[2] == "0 │▐━         │"


def test_shares_are_whole() -> None:
    """Guards that shares add up to 1, and their percents to 100, whatever is rounded."""
    for record in (*both().values(), RunRecord(3, [])):
        assert sum(time_shares(record).values()) == pytest.approx(1)
    assert time_shares(static_record()) == {"useful": 0.6875, "padding": 0.0625, "idle": 0.125, "empty": 0.125}
    assert whole_percents({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}) == {"a": 34, "b": 33, "c": 33}
    assert share_line(static_record()) == "useful 69%, padding 6%, idle 13%, empty 12%"


def test_intervals_join_steps() -> None:
    """Guards that steps of one kind are one interval, that those of a slot do not overlap, and the entries."""
    found = slot_intervals(static_record())
    assert [interval for interval in found if interval.slot == 0] == [
        Interval(0, 0, "prefill", 0, 2, is_entry=True),
        Interval(0, 0, "decode", 2, 6),
        Interval(0, 2, "prefill", 6, 8, is_entry=True),
    ]
    assert [interval.request for interval in found if interval.is_entry] == [0, 1, 2]
    other = [interval for interval in found if interval.slot == 1]
    assert all(before.end <= after.start for before, after in pairwise(other))


def test_example_of_a_step() -> None:
    """Guards the step that is kept for a picture: prompt and output mixed, and the blocks the engine held then."""
    engine = make_engine(make_network("llama"), max_batch_tokens=8)
    held: list[list[list[int]]] = []
    forward = engine.runner.forward

    def spy(batch: Any) -> Any:
        held.append([list(chunk.request.blocks) for chunk in engine._core.last_scheduled.chunks])
        return forward(batch)

    engine.runner.forward = spy  # type: ignore[method-assign]
    recorder = RunRecorder(engine, [4, 4, 4], slots=3)
    for index, length in enumerate((3, 13, 6)):
        recorder.add(index, list(range(1, length + 1)), 4)
    recorder.run()
    record = recorder.finish()
    assert record.example is not None and record.example.block_size == 4
    chunks = record.steps[record.example.step].chunks
    assert {chunk.kind for chunk in chunks} == {"prefill", "decode"}
    assert any(chunk.kind == "prefill" and chunk.start > 0 for chunk in chunks)
    assert [list(table) for table in record.example.block_tables] == held[record.example.step]
    assert [len(table) for table in record.example.block_tables] == [
        -(-(chunk.start + chunk.tokens) // 4) for chunk in chunks
    ]


def test_score_of_a_step() -> None:
    """Guards which step is shown: mixed before all prompts or all output, then steps that continue a prompt."""
    ranked = [[(5, 1)] * 7, [(5, 1), (0, 4)], [(5, 1), (4, 4)], [(5, 1)] * 6 + [(4, 30)], [(5, 1)] * 6 + [(4, 4)]]
    assert sorted(ranked, key=example_score) == ranked


def texts_of(svg: str) -> set[str]:
    """The words in a picture; each is drawn as outlines after a comment with the text."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    root = ElementTree.fromstring(svg, parser)
    return {(node.text or "").strip() for node in root.iter() if node.tag is ElementTree.Comment}


EXPECTED = {
    "timeline.svg": {"static batches: 8.00 s", "continuous: 6.00 s", "useful 100%, padding 0%, idle 0%, empty 0%"},
    "utilisation.svg": {"useful 69% of 8.00 s", "100%", "seconds", "padding"},
    "speed.svg": {"output tokens/s", "static batches", "first token (TTFT), s", "2.00 / 6.80 / 7.88"},
    "load.svg": {"users at once", "p99", "p10", "16", "The objective (SLO) is TTFT under 1 s."},
    "step.svg": {
        "One step of the engine: 4 tokens of 2 requests in one pass",
        "request 0, token 5",
        "request 2, tokens 0 to 2",
        "The same blocks in memory: the first 6 of 16",
        "3",
    },
}


def test_pictures_are_whole() -> None:
    """Guards that each picture is well-formed, says what it shows, and is the same for the same data."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plot)")
    from cbatch.cli.bench.render.plots import FILE_NAMES, draw_all

    pictures = draw_all(both(), some_metrics(), some_loads(), "TTFT under 1 s")
    assert {FILE_NAMES[title] for title in pictures} == EXPECTED.keys()
    for title, svg in pictures.items():
        missing = EXPECTED[FILE_NAMES[title]] - texts_of(svg)
        assert not missing, f"{title} lacks {missing}; it has {texts_of(svg)}"
        assert "<dc:date>" not in svg
    again = draw_all(both(), {}, {}, "")
    assert len(again) == 3
    assert all(svg == pictures[title] for title, svg in again.items())


def test_pictures_of_little() -> None:
    """Guards empty runs and other strategies: pictures without data are left out."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plot)")
    from cbatch.cli.bench.render.plots import draw_all

    unjudged = dataclasses.replace(make_load(4), users_served=None)
    assert draw_all({}, {}, {4: unjudged}, "") == {}
    assert draw_all({"one by one": RunRecord(1, [])}, {}, {}, "").keys() == {"Utilisation"}
    few = dataclasses.replace(static_record(), example=None)
    assert draw_all({"static batches": few}, {}, {}, "").keys() == {"Timeline", "Utilisation"}


def drafting_record() -> RunRecord:
    """Request 0 decodes in 40 steps with drafts of two in every other one; request 1 enters, and has none."""
    steps = []
    for n in range(40):
        right = (0, 2, 1, 1)[n // 2 % 4]
        own = RecordedChunk(0, 0, "decode", n, 3, 2, right) if n % 2 else RecordedChunk(0, 0, "decode", n, 1)
        other = RecordedChunk(1, 1, "decode" if n > 20 else "prefill", n, 1)
        steps.append(RecordedStep(n, n + 1, 0.5, (own, other) if n >= 20 else (own,), 2))
    return RunRecord(2, [RecordedRequest(60), RecordedRequest(19)], steps, elapsed_s=40.0)


def test_speculation_is_drawn() -> None:
    """Guards the picture of drafts: what is accepted and rejected in the run, and each request's mean of a step."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plot)")
    from cbatch.cli.bench.render.plots import FILE_NAMES, draw_all

    records = {"one by one": both()["continuous"], "without drafts": static_record(), "continuous": drafting_record()}
    pictures = draw_all(records, {}, {}, "")
    assert FILE_NAMES["Speculation"] == "speculation.svg"
    words = texts_of(pictures["Speculation"])
    assert {"20 of 40 drafted tokens of the run were accepted.", "request 0", "request 1", "1.5", "1.0"} <= words
    assert {"as without drafts", "accepted", "rejected", "prompt", "step"} <= words
    assert "Speculation" not in draw_all(both(), {}, {}, "")


def test_the_drawn_steps_are_typical() -> None:
    """Guards the choice of steps: neither the luckiest nor those without drafts, and all steps of a short run."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plot)")
    from cbatch.cli.bench.render.speculation_plot import MAX_STEPS, tokens_shown, typical_steps

    def run_of(*accepted: int | None) -> list[RecordedStep]:
        chunks = [(0, n, 1 if one is None else 5, 0 if one is None else 4, one or 0) for n, one in enumerate(accepted)]
        return [
            RecordedStep(n, n + 1, 0.5, (RecordedChunk(slot, 0, "decode", start, *rest),), 1)
            for n, (slot, start, *rest) in enumerate(chunks)
        ]

    lucky, none, mixed, wrong = [4] * MAX_STEPS, [None] * MAX_STEPS, [1, 3] * (MAX_STEPS // 2), [0] * MAX_STEPS
    shown = typical_steps(run_of(*lucky, *none, *mixed, *none, *wrong))
    assert shown == range(2 * MAX_STEPS, 3 * MAX_STEPS)
    assert typical_steps(run_of(2, None)) == range(2) and typical_steps([]) == range(0)
    assert tokens_shown(RecordedChunk(0, 0, "decode", 9, 5, 4, 1)) == {
        "as without drafts": 1,
        "accepted": 1,
        "rejected": 3,
    }
    assert tokens_shown(RecordedChunk(0, 0, "prefill", 0, 99)) == {"prompt": 1, "accepted": 0, "rejected": 0}


def test_step_picture_chooses_requests() -> None:
    """Guards pictures of steps with many requests: the eight shown include some prompts and no padding."""
    from cbatch.cli.bench.render.step_plot import choose_chunks, lay_out

    chunks = [(RecordedChunk(n, n, "decode", 9, 1), (n, n + 100)) for n in range(20)]
    chunks += [
        (RecordedChunk(20, 20, "padding", 0, 9), (300,)),
        (RecordedChunk(21, 21, "prefill", 0, 100), tuple(range(400, 413))),
    ]
    chosen = choose_chunks(chunks)
    assert [chunk.request for chunk, _ in chosen] == [0, 1, 2, 3, 4, 5, 6, 21]
    drawn, width = lay_out(chosen, block_size=8)
    assert drawn[-1].left + 13 * 8 == width
    assert drawn[-1].visible_tokens(drawn[-1].cells - 1) == 100
    assert all(before.top + before.height == after.top for before, after in pairwise(drawn))
    assert choose_chunks(chunks[20:21]) == chunks[20:21]


@pytest.mark.parametrize("option", ["--plot", "--report"])
def test_missing_matplotlib_is_named(
    option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards the message for people who have not installed the extra, before anything is measured."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run_command(["bench", option, str(tmp_path / "out"), "-m", "no/model"]) == 2
    assert "[plot]'" in capsys.readouterr().err


class Page(HTMLParser):
    """Collects what a page is made of, and fails if its tags do not nest."""

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
        "strategies": {
            "continuous": dataclasses.asdict(some_metrics()["continuous"]),
            evil: {"idle_slot_share": 0.25, "only_s": 2},
        },
        "load": [load.to_json() for load in some_loads().values()],
        "empty": {},
    }
    text = html_report(data, {evil: f"<svg><title>{evil}</title></svg>"})
    page = Page()
    page.feed(text)
    page.close()
    assert not page.open and "<script" not in text
    assert page.tags.isdisjoint({"script", "link", "iframe", "object"}) and "url(" not in text
    assert [link[:26] for link in page.links] == ["data:image/svg+xml;base64,"]
    assert page.cells.count(evil) == 6
    for shown in ("1.5 GiB", "–", "yes", "25.0%", "TTFT p50", "2.00 s", "1, 2", "output tokens/s", "users"):
        assert shown in page.cells, shown
