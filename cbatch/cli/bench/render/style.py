"""The style of all pictures: size, fonts, colours, and SVG that is the same for the same data."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from cbatch.cli.bench.recorder import TokenKind
from cbatch.cli.bench.render.timeline import KIND_LABELS, KINDS
from cbatch.engine import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


Given = ParamSpec("Given")
Result = TypeVar("Result")


def require_matplotlib() -> None:
    """Raises ConfigError if it is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("Pictures need matplotlib: pip install 'cbatch[plot]'.") from error


def with_style(draw: Callable[Given, Result]) -> Callable[Given, Result]:
    """Makes a function draw with SETTINGS, and raise ConfigError if matplotlib is not installed."""

    @functools.wraps(draw)
    def draw_styled(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        require_matplotlib()
        import matplotlib

        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(SETTINGS)
            return draw(*args, **kwargs)

    return draw_styled


def new_figure(height: float, title: str, subtitle: str = "") -> Figure:
    """An empty figure, `height` inches high, with a title that says what to see in it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), facecolor=BACKGROUND)
    figure.text(0.12 / WIDTH, 1 - 0.12 / height, title, size=12, weight="bold", va="top", color=TEXT)
    figure.text(0.12 / WIDTH, 1 - 0.38 / height, subtitle, size=9, va="top", color=MUTED)
    return figure


def axes_grid(figure: Figure, heights: Iterable[float], columns: int = 1, **margins: float) -> list[Axes]:
    """A grid of axes, row by row. A single column shares its x axis.

    heights: relative heights of the rows
    margins: left, right, top and bottom in inches, and the gaps wspace and hspace as shares of the axes
    """
    rows = list(heights)
    height = figure.get_figheight()
    inches = {"left": 0.6, "right": 0.2, "top": 0.75, "bottom": 0.5} | margins
    gridspec = {
        "height_ratios": rows,
        "left": inches["left"] / WIDTH,
        "right": 1 - inches["right"] / WIDTH,
        "top": 1 - inches["top"] / height,
        "bottom": inches["bottom"] / height,
        "hspace": inches.get("hspace", 0.2),
        "wspace": inches.get("wspace", 0.2),
    }
    grid = figure.subplots(len(rows), columns, squeeze=False, sharex=columns == 1, gridspec_kw=gridspec)
    return [axes for row in grid for axes in row]


def add_legend(figure: Figure, kinds: Iterable[TokenKind] = KINDS, *, top: float = 0.72) -> None:
    """Adds a line of coloured squares with their meaning, `top` inches below the top edge."""
    from matplotlib.patches import Rectangle

    y, x = 1 - top / figure.get_figheight(), 0.12
    for kind in kinds:
        side = 0.12
        size: dict[str, Any] = {"width": side / WIDTH, "height": side / figure.get_figheight()}
        figure.add_artist(Rectangle((x / WIDTH, y), **size, color=KIND_COLOURS[kind], linewidth=0))
        figure.text((x + 0.18) / WIDTH, y, KIND_LABELS[kind], size=9, va="bottom", color=TEXT)
        x += 0.45 + 0.075 * len(KIND_LABELS[kind])


@with_style
def svg_text(figure: Figure, title: str) -> str:
    """A figure as SVG text, the same for the same data."""
    file = io.StringIO()
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None, "Title": title}
    figure.savefig(file, format="svg", metadata=metadata)
    return re.sub(r' d="[^"]*"', _rounded, file.getvalue())


def _rounded(path: re.Match[str]) -> str:
    """A path in hundredths of a point: more digits cannot be seen, but make the file larger."""
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.2f}", path[0])
