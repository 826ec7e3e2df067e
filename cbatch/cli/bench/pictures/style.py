"""The style of all pictures: size, fonts, colours for light and for dark pages, and SVG that follows from the data."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cbatch.cli.bench.recorder import TokenKind
from cbatch.cli.bench.timeline import KIND_LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 9.2
"""Inches; 883 pixels in a browser, the width of a README on GitHub."""

HEAD, LEGEND = 0.65, 0.3
"""Inches above the axes: for the title and the note under it, and for a legend."""

STYLE = Path(__file__).with_name("bench.mplstyle")

DARK: dict[str, str] = {}
"""The colours of dark pages by those of light ones. The background is that of GitHub's dark pages, and of our own."""


def colour(light: str, dark: str) -> str:
    """A colour of light pages, whose dark one is kept in DARK."""
    DARK[light] = dark
    return light


TEXT, MUTED = colour("#1f2328", "#e6edf3"), colour("#59636e", "#9198a1")
GRID, BACKGROUND = colour("#e7eaee", "#262c36"), colour("#ffffff", "#0d1117")
EMPTY_SLOT, BAND = colour("#eceff2", "#21262d"), colour("#e6f1fc", "#14243a")

HIGHLIGHT, OTHER = colour("#0969da", "#58a6ff"), colour("#8c959f", "#768390")
PEER, TARGET = colour("#8250df", "#bc8cff"), colour("#1a7f37", "#3fb950")
"""Continuous batching, other strategies, peers, and what was to be reached."""

SUBJECT = "continuous"
"""The title of the strategy that pictures are about."""

KIND_COLOURS: dict[TokenKind, str] = {
    "prefill": colour("#0b4f8a", "#a5d6ff"),
    "decode": colour("#6fb1e0", "#1f6bb0"),
    "padding": colour("#f0b429", "#e3b341"),
    "idle": colour("#d1581b", "#da6a35"),
}
"""Blue is useful work, yellow and red are waste. All four differ in lightness too."""

KINDS = {label: KIND_COLOURS[kind] for kind, label in KIND_LABELS.items()} | {"empty": EMPTY_SLOT}
"""The legend of pictures of slots."""

_COLOUR = re.compile(r"(?<=fill: )#[0-9a-f]{6}|(?<=stroke: )#[0-9a-f]{6}")


class Drawing(NamedTuple):
    """A picture as SVG text in light colours, and in words what it shows."""

    svg: str
    alt: str


def drawing_of(draw: Callable[[], Figure], name: str) -> Drawing:
    """Draws a figure in our style, whatever settings of matplotlib the user has."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rc_file(STYLE, use_default_template=False)
        figure = draw()
        return Drawing(svg_text(figure, name), str(figure.get_label()))


def new_figure(height: float, title: str, note: str, legend: Mapping[str, str]) -> Figure:
    """A figure whose axes take `height` inches, below a title, a note, and a legend of colours by what they mean."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    whole = height + HEAD + (LEGEND if legend else 0)
    figure = Figure((WIDTH, whole), facecolor=BACKGROUND, layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0, 1, height / whole), h_pad=0.06)  # type: ignore[union-attr, call-arg]
    figure.set_label(f"{title.rstrip('.')}. {note}")
    left = 0.12 / WIDTH
    figure.text(left, 1 - 0.12 / whole, title, size=12, weight="bold", va="top")
    figure.text(left, 1 - 0.38 / whole, note, size=9, va="top", color=MUTED)
    figure.legend(
        handles=[Patch(color=colour, label=label, linewidth=0) for label, colour in legend.items()],
        loc="upper left", bbox_to_anchor=(0, 1 - 0.58 / whole), ncols=max(len(legend), 1), frameon=False,
        handlelength=0.9, handleheight=0.9, handletextpad=0.5, columnspacing=1.6, borderpad=0.4, borderaxespad=0.3,
    )  # fmt: skip
    return figure


def write(axes: Axes, words: str, place: tuple[float, float], offset: tuple[float, float], **how: Any) -> None:
    """Writes beside a place, in small letters.  offset: in points"""
    settings: dict[str, Any] = {"textcoords": "offset points", "va": "center", "size": 8.5}
    axes.annotate(words, place, offset, **settings | how)


def log_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers within two bounds above 0, for a logarithmic scale."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 5), (1, 3), (1,)):
        ticks = [value for decade in decades for step in steps if low <= (value := step * 10.0**decade) <= high]
        if len(ticks) <= most:
            return ticks
    return ticks[:: math.ceil(len(ticks) / most)]


def set_log_scale(
    axes: Axes, which: str, values: Sequence[float], words: Callable[[float], str], *, most: int = 5
) -> None:
    """Makes the x or the y axis logarithmic for values above 0, with a few round numbers, in words, and lines there."""
    found = [value for value in values if value > 0] or [1.0]
    low, high = min(found) / 1.5, max(found) * 1.5
    ticks = log_ticks(low, high, most)
    axes.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
    axes.minorticks_off()
    axes.set(**{f"{which}ticks": ticks, f"{which}ticklabels": [words(tick) for tick in ticks]})
    axes.grid(axis="x" if which == "x" else "y")


def svg_text(figure: Figure, title: str) -> str:
    """A figure as SVG text, the same for the same data: in tenths of a point, without ids that nothing uses."""
    file = io.StringIO()
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None, "Title": title}
    figure.savefig(file, format="svg", metadata=metadata)
    svg = re.sub(r'<g id="[^"]*">', "<g>", file.getvalue())
    svg = re.sub(r'(?<= d=")[^"]*', lambda path: re.sub(r"\s*([A-Za-z])\s*", r"\1", _rounded(path[0])), svg)
    svg = re.sub(r'translate\([^)]*\)| [xy]="[^"]*"', lambda place: _rounded(place[0]), svg)
    svg = re.sub(r"\n\s+", "\n", svg)
    return re.sub(r"<g>\n(<(?:use|path)[^>]*/>)\n</g>", r"\1", svg)


def _rounded(text: str) -> str:
    return re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), text)


def dark_variant(svg: str) -> str:
    """The text of a picture in dark colours."""
    return _COLOUR.sub(lambda colour: DARK.get(colour[0], colour[0]), svg)


def adaptive_variant(svg: str) -> str:
    """The text of a picture that takes dark colours by itself where the page that shows it is dark."""
    rules = [
        f'[style*="{name}: {light}"]{{{name}:{DARK[light]}!important}}'
        for light in sorted(set(_COLOUR.findall(svg)) & DARK.keys())
        for name in ("fill", "stroke")
    ]
    style = f"<style>@media (prefers-color-scheme:dark){{{''.join(rules)}}}</style>"
    return re.sub(r"(<svg[^>]*>)", lambda opening: opening[0] + style, svg, count=1)
