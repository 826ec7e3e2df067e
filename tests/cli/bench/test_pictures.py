"""The pictures of a bench: in characters, and as SVG for light and for dark pages."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from cbatch.cli.bench import comparison, timeline
from cbatch.cli.bench.load import Capacity
from cbatch.cli.bench.page import Page
from cbatch.cli.bench.recorder import RunRecord, RunRecorder
from cbatch.cli.bench.timeline import draw_timeline, time_shares, whole_percents
from cbatch.cli.bench.users import LoadResult
from tests.support.bench_reports import (
    both,
    load_report,
    make_comparison,
    make_curve,
    make_load,
    make_one_load,
    make_search,
    static_record,
)
from tests.support.tiny_models import make_engine, make_network


def test_timeline_is_drawn() -> None:
    """Guards every mark, and that both runs are on one scale: 16 columns for 8 seconds, of which one takes 6."""
    assert draw_timeline(both(), 20) == [
        "static batches: 8.00",
        "s; useful 69%,",
        "padding 6%, idle",
        "13%, empty 12%",
        "0 │▐███━━━━━━━━▐███│",
        "1 │▐█░░━━━━····    │",
        "continuous: 6.00 s;",
        "useful 100%, padding",
        "0%, idle 0%, empty",
        "0%",
        "0 │▐███━━━━━━━━│",
        "1 │▐███━━━━▐███│",
        "   0         8.00 s",
        "█ prefill (prompt)",
        "━ decode (output)",
        "░ padding   · idle",
        "(past the end)   ▐ a",
        "request enters",
    ]


def test_timeline_fits_any_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards narrow terminals, too many lanes, and a run of nothing."""
    monkeypatch.setattr(timeline, "MAX_LANES", 1)
    lines = draw_timeline({"static": static_record()}, 72)
    assert all(len(line) <= 72 and "\x1b" not in line for line in lines)
    assert lines[0] == "static: 8.00 s; useful 69%, padding 6%, idle 13%, empty 12%"
    assert lines[1].startswith("0 │▐███") and lines[2] == "1 of 2 slots are not shown" and "4.00" in lines[3]
    assert draw_timeline({"nothing": RunRecord(1, [])}, 40)[2] == "0 ││"
    assert draw_timeline({}, 40) == []


def test_shares_are_whole() -> None:
    """Guards that shares add up to 1, and their percents to 100, whatever is rounded."""
    for record in (*both().values(), RunRecord(3, [])):
        assert sum(time_shares(record).values()) == pytest.approx(1)
    assert time_shares(static_record()) == {"useful": 0.6875, "padding": 0.0625, "idle": 0.125, "empty": 0.125}
    assert whole_percents({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}) == {"a": 34, "b": 33, "c": 33}


def test_example_of_a_step() -> None:
    """Guards the step that is kept for a picture: prompt and output mixed, and the blocks that its tokens take."""
    engine = make_engine(make_network("llama"), max_batch_tokens=8)
    recorder = RunRecorder(engine, [4, 4, 4], slots=3)
    for index, length in enumerate((3, 13, 6)):
        recorder.add(index, list(range(20 * index, 20 * index + length)), 4)
    recorder.run()
    record = recorder.finish()
    assert record.example is not None and record.example.block_size == 4
    chunks = record.steps[record.example.step].chunks
    assert {chunk.kind for chunk in chunks} == {"prefill", "decode"}
    assert any(chunk.kind == "prefill" and chunk.start > 0 for chunk in chunks)
    blocks = [block for table in record.example.block_tables for block in table]
    assert len(set(blocks)) == len(blocks) and max(blocks) < record.num_blocks
    sizes = [-(-(chunk.start + chunk.tokens) // 4) for chunk in chunks]
    assert [len(table) for table in record.example.block_tables] == sizes


def texts_of(svg: str) -> set[str]:
    """The words in a picture; each is drawn as outlines after a comment with the text."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    root = ElementTree.fromstring(svg, parser)
    return {(node.text or "").strip() for node in root.iter() if node.tag is ElementTree.Comment}


def colours_of(svg: str) -> set[str]:
    return set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", svg))


def explained_colours(figure: Any) -> set[str]:
    """Colours of the squares of legends, and of squares beside words."""
    from matplotlib.colors import to_hex

    patches = {to_hex(handle.get_facecolor()) for legend in figure.legends for handle in legend.legend_handles}
    return patches | {text.get_color() for axes in figure.axes for text in axes.texts if text.get_text() == "■"}


def misplaced_texts(figure: Any) -> list[str]:
    """Texts of a figure that reach beyond it, and pairs of texts that lie over each other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in _texts(figure)]
    width, height = figure.bbox.width, figure.bbox.height
    outside = [
        f"{words!r} is outside" for words, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height
    ]
    over = [
        f"{words!r} is over {others!r}"
        for (words, box), (others, other) in combinations(boxes, 2)
        if min(box.x1, other.x1) - max(box.x0, other.x0) > 1 and min(box.y1, other.y1) - max(box.y0, other.y0) > 2
    ]
    return outside + over


def _texts(figure: Any) -> Iterator[Any]:
    """All texts that are drawn; labels of ticks only if they are within the axes."""
    found = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        found += [*axes.texts, axes.title, axes._left_title, axes._right_title, axes.xaxis.label, axes.yaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            found += [tick.label1 for tick in axis._update_ticks() if tick.label1.get_visible()]
    return (text for text in found if text.get_visible() and text.get_text().strip())


EXPECTED = {
    "timeline": {"static batches: 8.00 s", "continuous: 6.00 s", "useful 100%, padding 0%, idle 0%, empty 0%"},
    "utilisation": {
        "useful 69% of 8.00 s",
        "useful 100% of 15.7 min, of which 9.00 s are shown",
        "55.0 s, of which 9.00 s are shown",
        "only the time is known",
        "padding",
    },
    "speed": {"output tokens/s", "transformers-generate", "first token (TTFT)", "2.00 s / 7.88 s", "not known"},
    "step": {
        "One step of the engine: 4 tokens of 2 requests in one pass",
        "request 0, token 5",
        "request 2, tokens 0 to 2",
        "The same blocks in memory, 0 to 5 of 16: a request takes whichever are free",
        "3",
    },
    "speculation": {"20 of 40 drafted tokens of the run were accepted.", "request 0", "1.5", "1.0", "rejected"},
    "load": {"users at once", "the objective (SLO)", "4 users", "16", "100 ms", "100%"},
    "skew": {"measured", "by steps", "by tokens", "chat", "instructions", "slots that do not wait", "no padding"},
    "users": {"5 users of 9, and their answers", "9 asked for", "500 ms", "answer within the objective"},
}


@pytest.fixture(scope="module")
def drawn() -> dict[str, tuple[str, Any]]:
    """The SVG text and the figure of every picture, by name: with very slow runs, peers, replicas and drafts."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plot)")
    from cbatch.cli.bench.pictures import style

    found: dict[str, tuple[str, Any]] = {}
    make_text = style.svg_text

    def keep(figure: Any, title: str) -> str:
        found[title] = (make_text(figure, title), figure)
        return found[title][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "svg_text", keep)
        search = make_search(1, 2, 4, 7, 8, 16, capacity=4, rounds=2)
        pages = make_comparison("ablations", "peers", "replicas", "drafts"), search, make_one_load(), make_curve()
        for picture in (one for page in pages for one in page.pictures):
            assert picture.drawing.svg and picture.drawing.alt.endswith("."), picture.name
    return found


def test_pictures_are_whole(drawn: dict[str, tuple[str, Any]]) -> None:
    """Guards each picture: well-formed, it says what it shows in figures counted by hand, and no words are misplaced.

    The same data give the same picture, so that a diff of kept ones says something.
    """
    assert drawn.keys() == EXPECTED.keys()
    for name, (svg, figure) in drawn.items():
        missing = EXPECTED[name] - texts_of(svg)
        assert not missing, f"{name} lacks {missing}; it has {texts_of(svg)}"
        assert "<dc:date>" not in svg and misplaced_texts(figure) == [], name
    assert make_one_load().pictures[0].drawing.svg == drawn["users"][0]


def test_colours(drawn: dict[str, tuple[str, Any]]) -> None:
    """Guards legends and dark pages: each colour that is no ink or background is explained, and has a dark one."""
    from cbatch.cli.bench.pictures import style
    from cbatch.cli.bench.pictures.style import DARK, adaptive_variant, dark_variant

    neutral = {style.TEXT, style.MUTED, style.INK_ON_DARK, style.INK_ON_LIGHT}
    neutral |= {style.GRID, style.BACKGROUND, style.BAND, style.EMPTY_SLOT}
    assert DARK.keys().isdisjoint(DARK.values()) and len(set(DARK.values())) == len(DARK)
    for name, (svg, figure) in drawn.items():
        own = colours_of(svg) - neutral
        assert own and own <= explained_colours(figure), name
        dark = dark_variant(svg)
        assert colours_of(svg) <= DARK.keys() and colours_of(dark) == {DARK[colour] for colour in colours_of(svg)}
        assert texts_of(dark) == texts_of(svg) and len(dark) == len(svg)
        for colour in colours_of(svg):
            assert f'[style*="fill: {colour}"]{{fill:{DARK[colour]}!important}}' in adaptive_variant(svg)


def names(page: Page) -> set[str]:
    """Of its pictures."""
    return {picture.name for picture in page.pictures}


def test_pictures_of_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards empty runs and other strategies: pictures without data are left out, and stderr says why there is none."""
    unjudged = LoadResult(make_load(4).figures | {"users_served_share": None})
    empty = load_report(4, {4: [unjudged]})
    empty.write(str(tmp_path), None)
    assert "no picture, because no answer" in capsys.readouterr().err and not any(tmp_path.iterdir())
    assert names(empty) == names(load_report(4, {1: [unjudged]}, Capacity(0))) == set()
    assert names(make_search(1)) == {"load"}
    page_with = lambda **records: comparison.page_of(make_comparison().data, records)  # noqa: E731
    assert names(page_with(nothing=RunRecord(1, []))) == {"utilisation", "speed"}
    few = {"static batches": dataclasses.replace(static_record(), example=None)}
    assert names(page_with(**few)) == {"timeline", "utilisation", "speed"}
    assert names(make_comparison()) == {"timeline", "utilisation", "speed", "step"}
