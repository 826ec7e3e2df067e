"""The style of all pictures: size, fonts, colours, and SVG that is the same for the same data."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from cbatch.cli.bench.recorder import TokenKind
from cbatch.cli.bench.render.timeline import KIND_LABELS

WIDTH = 9.2
"""Inches; 883 pixels in a browser, the width of a README on GitHub."""

TEXT, MUTED, GRID, BACKGROUND = "#1f2328", "#59636e", "#e7eaee", "#ffffff"
EMPTY_SLOT = "#f3f4f6"

KIND_COLOURS: dict[TokenKind, str] = {
    "prefill": "#0b4f8a",
    "decode": "#6fb1e0",
    "padding": "#f0b429",
    "idle": "#d1581b",
}
"""Blue is useful work, yellow and red are waste. All four differ in lightness too."""

CHUNK_COLOURS = ("#332288", "#ddaa33", "#117733", "#cc6677", "#88ccee", "#882255", "#999933", "#44aa99")
"""Colours that the colour-blind can tell apart: Paul Tol's muted scheme, https://personal.sron.nl/~pault/."""

SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": TEXT,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": TEXT,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "svg.fonttype": "path",
    "svg.hashsalt": "cbatch",
    "path.simplify": False,
}
"""Text is drawn as paths, since a viewer's own fonts may be wider or narrower."""


@contextmanager
def picture_style() -> Iterator[None]:
    """Draws with SETTINGS, whatever settings of matplotlib the user has."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        yield


KINDS_BY_LABEL = {label: KIND_COLOURS[kind] for kind, label in KIND_LABELS.items()}


def new_figure(height: float, title: str, subtitle: str = "", *, width: float = WIDTH) -> Figure:
    """An empty figure, `height` inches high, with a title that says what to see in it."""
    figure = Figure(figsize=(width, height), facecolor=BACKGROUND)
    figure.text(0.12 / width, 1 - 0.12 / height, title, size=12, weight="bold", va="top", color=TEXT)
    figure.text(0.12 / width, 1 - 0.38 / height, subtitle, size=9, va="top", color=MUTED)
    return figure


def axes_grid(figure: Figure, heights: Sequence[float], columns: int = 1, **places: float) -> list[Axes]:
    """Rows of axes with these relative heights.

    places: `left`, `right` (0.2 if not given), `top` and `bottom` in inches, and `hspace` and `wspace` as in matplotlib
    """
    width, height = figure.get_figwidth(), figure.get_figheight()
    gridspec: dict[str, Any] = places | {
        "height_ratios": heights,
        "left": places["left"] / width,
        "right": 1 - places.get("right", 0.2) / width,
        "top": 1 - places["top"] / height,
        "bottom": places["bottom"] / height,
    }
    return list(figure.subplots(len(heights), columns, squeeze=False, sharex=columns == 1, gridspec_kw=gridspec).flat)


def add_legend(figure: Figure, colours: Mapping[str, str] = KINDS_BY_LABEL) -> None:
    """Adds a line of coloured squares with what they stand for: the kinds of work, unless others are given."""
    width, height, x, side = figure.get_figwidth(), figure.get_figheight(), 0.12, 0.12
    y = 1 - 0.72 / height
    for label, colour in colours.items():
        square = Rectangle((x / width, y), side / width, side / height, color=colour, linewidth=0)
        figure.add_artist(square)
        figure.text((x + 0.18) / width, y, label, size=9, va="bottom", color=TEXT)
        x += 0.45 + 0.075 * len(label)


def svg_text(figure: Figure, title: str) -> str:
    """A figure as SVG text, the same for the same data."""
    file = io.StringIO()
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None, "Title": title}
    figure.savefig(file, format="svg", metadata=metadata)
    return re.sub(r' d="[^"]*"', _rounded, file.getvalue())


def _rounded(path: re.Match[str]) -> str:
    """A path in hundredths of a point: more digits cannot be seen, but make the file larger."""
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.2f}", path[0])
