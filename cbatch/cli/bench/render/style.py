"""The style of all pictures: size, fonts, colours, and SVG that is the same for the same data."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
EMPTY_SLOT = "#eceff2"
BAND = "#e6f1fc"
"""Behind the line of the strategy that a picture is about."""

INK_ON_DARK, INK_ON_LIGHT = "#fdfdfe", "#1a1d21"
"""Text in a field of one of CHUNK_COLOURS."""

HIGHLIGHT, OTHER, PEER, TARGET = "#0969da", "#8c959f", "#8250df", "#1a7f37"
"""Continuous batching, other strategies, peers, and what was to be reached."""

SUBJECT = "continuous"
"""The title of the strategy that pictures are about."""

PALE_GREY = "#d0d7de"

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
    "axes.facecolor": "none",
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


KINDS_BY_LABEL = {label: KIND_COLOURS[kind] for kind, label in KIND_LABELS.items()} | {"empty": EMPTY_SLOT}

LEGEND = "legend"
"""What the ids of the squares of a legend begin with."""


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


def add_axes(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes at a place of the figure, in inches from its left and its top."""
    whole_width, whole_height = figure.get_figwidth(), figure.get_figheight()
    bottom = whole_height - top - height
    place = (left / whole_width, bottom / whole_height, width / whole_width, height / whole_height)
    axes: Axes = figure.add_axes(place)
    return axes


def add_band(figure: Figure, top: float, height: float) -> None:
    """A pale field over the whole width, behind the line that a picture is about; inches from the figure's top."""
    whole = figure.get_figheight()
    place = (0, 1 - (top + height) / whole)
    figure.add_artist(Rectangle(place, 1, height / whole, color=BAND, linewidth=0, zorder=-1))


def add_legend(figure: Figure, colours: Mapping[str, str] = KINDS_BY_LABEL) -> None:
    """Adds a line of coloured squares with what they stand for: the kinds of work, unless others are given."""
    width, height, x, side = figure.get_figwidth(), figure.get_figheight(), 0.12, 0.12
    y = 1 - 0.72 / height
    for label, colour in colours.items():
        square = Rectangle((x / width, y), side / width, side / height, color=colour, linewidth=0)
        square.set_gid(f"{LEGEND}-{colour[1:]}")
        figure.add_artist(square)
        figure.text((x + 0.18) / width, y, label, size=9, va="bottom", color=TEXT)
        x += 0.42 + 0.068 * len(label)


def log_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers within two bounds above 0, for a logarithmic scale."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 5), (1, 3), (1,)):
        ticks = [value for decade in decades for step in steps if low <= (value := step * 10.0**decade) <= high]
        if len(ticks) <= most:
            return ticks
    return ticks[:: math.ceil(len(ticks) / most)]


def log_limits(values: Sequence[float], space: float = 1.5) -> tuple[float, float]:
    """The ends of a logarithmic scale for these values, of which only those above 0 count."""
    found = [value for value in values if value > 0] or [1.0]
    return min(found) / space, max(found) * space


def set_log_scale(
    axes: Axes, which: str, limits: tuple[float, float], words: Callable[[float], str], most: int = 5
) -> None:
    """Makes the x or the y axis logarithmic, with a few round numbers, in words, and a line at each of them."""
    ticks = log_ticks(*limits, most)
    labels = [words(tick) for tick in ticks]
    if which == "x":
        axes.set_xscale("log")
        axes.set_xlim(*limits)
        axes.set_xticks(ticks, labels)
    else:
        axes.set_yscale("log")
        axes.set_ylim(*limits)
        axes.set_yticks(ticks, labels)
    axes.minorticks_off()
    axes.grid(axis="x" if which == "x" else "y")


def svg_text(figure: Figure, title: str) -> str:
    """A figure as SVG text, the same for the same data."""
    file = io.StringIO()
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None, "Title": title}
    figure.savefig(file, format="svg", metadata=metadata)
    return _compact(file.getvalue())


def _compact(svg: str) -> str:
    """The same picture in half the text: without indents and ids that nothing uses, in hundredths of a point."""
    svg = re.sub(rf'<g id="(?!{LEGEND})[^"]*">', "<g>", svg)
    svg = re.sub(r'(?<= d=")[^"]*', lambda path: re.sub(r"\s*([A-Za-z])\s*", r"\1", _rounded(path[0])), svg)
    svg = re.sub(r'translate\([^)]*\)| [xy]="[^"]*"', lambda place: _rounded(place[0]), svg)
    svg = re.sub(r"\n\s+", "\n", svg)
    return re.sub(r"<g>\n(<(?:use|path)[^>]*/>)\n</g>", r"\1", svg)


def _rounded(text: str) -> str:
    return re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), text)
