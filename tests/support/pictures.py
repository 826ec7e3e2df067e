"""Checks of pictures: their words, where these stand, and their colours for light and for dark pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any
from xml.etree import ElementTree

import pytest

from cbatch.cli.bench.page import Picture


def draw_all(pictures: Iterable[Picture]) -> dict[str, tuple[str, Any]]:
    """The SVG text and the figure of each, by its name."""
    from cbatch.cli.bench.pictures import style

    found: dict[str, tuple[str, Any]] = {}
    make_text = style.svg_text

    def keep(figure: Any, title: str) -> str:
        found[title] = (make_text(figure, title), figure)
        return found[title][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "svg_text", keep)
        for picture in pictures:
            assert picture.drawing.svg and picture.drawing.alt.endswith("."), picture.name
    return found


def check_pictures(drawn: Mapping[str, tuple[str, Any]], expected: Mapping[str, set[str]]) -> None:
    """Checks that each has these words among its own, and that none is misplaced."""
    assert drawn.keys() == expected.keys()
    for name, (svg, figure) in drawn.items():
        missing = expected[name] - texts_of(svg)
        assert not missing, f"{name} lacks {missing}; it has {texts_of(svg)}"
        assert "<dc:date>" not in svg and misplaced_texts(figure) == [], name


def check_colours(drawn: Mapping[str, tuple[str, Any]]) -> None:
    """Checks that each colour which is no ink or background is explained, and that each has a dark one."""
    from cbatch.cli.bench.pictures import style
    from cbatch.cli.bench.pictures.style import DARK, adaptive_variant, dark_variant
    from scripts.pictures.step import INK_ON_DARK, INK_ON_LIGHT

    neutral = {style.TEXT, style.MUTED, style.GRID, style.BACKGROUND, style.BAND, style.EMPTY_SLOT}
    neutral |= {INK_ON_DARK, INK_ON_LIGHT}
    assert DARK.keys().isdisjoint(DARK.values()) and len(set(DARK.values())) == len(DARK)
    for name, (svg, figure) in drawn.items():
        own = colours_of(svg) - neutral
        assert own and own <= explained_colours(figure), name
        dark = dark_variant(svg)
        assert colours_of(svg) <= DARK.keys() and colours_of(dark) == {DARK[colour] for colour in colours_of(svg)}
        assert texts_of(dark) == texts_of(svg) and len(dark) == len(svg)
        for colour in colours_of(svg):
            assert f'[style*="fill: {colour}"]{{fill:{DARK[colour]}!important}}' in adaptive_variant(svg)


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
