"""What is wrong with a picture: words outside of it or over each other, and colours that nothing explains."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any
from xml.etree import ElementTree

_COLOUR = re.compile(r"(?:fill|stroke): (#[0-9a-f]{6})")


def texts_of(svg: str) -> set[str]:
    """The words in a picture; each is drawn as outlines after a comment with the text."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    root = ElementTree.fromstring(svg, parser)
    return {(node.text or "").strip() for node in root.iter() if node.tag is ElementTree.Comment}


def colours_of(svg: str) -> set[str]:
    return set(_COLOUR.findall(svg))


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
