"""The same pictures for dark pages: each colour of the style has one that does its work on a dark background."""

from __future__ import annotations

import re

from cbatch.cli.bench.render import style

DARK = {
    style.TEXT: "#e6edf3",
    style.MUTED: "#9198a1",
    style.GRID: "#262c36",
    style.BACKGROUND: "#0d1117",
    style.EMPTY_SLOT: "#21262d",
    style.BAND: "#14243a",
    style.INK_ON_DARK: "#0d1118",
    style.INK_ON_LIGHT: "#0d1119",
    style.HIGHLIGHT: "#58a6ff",
    style.OTHER: "#768390",
    style.PEER: "#bc8cff",
    style.TARGET: "#3fb950",
    style.PALE_GREY: "#484f58",
    style.KIND_COLOURS["prefill"]: "#a5d6ff",
    style.KIND_COLOURS["decode"]: "#1f6bb0",
    style.KIND_COLOURS["padding"]: "#e3b341",
    style.KIND_COLOURS["idle"]: "#da6a35",
    **dict(
        zip(
            style.CHUNK_COLOURS,
            ("#a99cf0", "#ddaa34", "#6fd08c", "#f08a98", "#88ccef", "#d06ba6", "#b5b545", "#36b3a0"),
            strict=True,
        )
    ),
}
"""By the colours of light pages. The background is that of GitHub's dark pages, and of our own."""

_COLOUR = re.compile(r"(?<=fill: )#[0-9a-f]{6}|(?<=stroke: )#[0-9a-f]{6}")


def dark_variant(svg: str) -> str:
    """The text of a picture in dark colours. Colours that are not of the style stay as they are."""
    return _COLOUR.sub(lambda colour: DARK.get(colour[0], colour[0]), svg)


def colours_of(svg: str) -> set[str]:
    """All colours that a picture has."""
    return set(_COLOUR.findall(svg))
