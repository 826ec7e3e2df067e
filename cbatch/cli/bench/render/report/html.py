"""A page of results as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cbatch.cli.common.console import notice, safe

LEAST_SCALE = 0.75
"""A picture is not drawn smaller than this, lest nobody can read it: on narrow screens its box scrolls."""

PIXELS_PER_POINT = 4 / 3


@dataclass(frozen=True, slots=True)
class KeyFigure:
    """A figure in large type, what it is, and what to compare it with."""

    value: str
    label: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Lines of text. The first cell of a line is its heading; the others hold figures, unless `has_words`.

    strong: number of the line that the page is about
    """

    head: list[str]
    lines: list[list[str]]
    strong: int | None = None
    has_words: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG text for light pages and one for dark pages. `alt` says in words what it shows."""

    title: str
    alt: str
    light: str
    dark: str

    @property
    def sources(self) -> tuple[str, str]:
        """Light and dark, as addresses. The content of an image cannot run or load anything."""
        light, dark = (base64.b64encode(svg.encode()).decode() for svg in (self.light, self.dark))
        return f"data:image/svg+xml;base64,{light}", f"data:image/svg+xml;base64,{dark}"

    @property
    def width(self) -> int:
        """Of its natural size, in pixels."""
        found = re.search(r'viewBox="0 0 ([\d.]+) ', self.light)
        return round(float(found[1]) * PIXELS_PER_POINT) if found else 0

    @property
    def least_width(self) -> int:
        return round(self.width * LEAST_SCALE)


def write_pictures(folder: Path, pictures: Mapping[str, Picture]) -> None:
    """Writes each picture into a folder, for light and for dark pages.  pictures: by file name"""
    for name, picture in pictures.items():
        path = folder / name
        path.write_text(picture.light, encoding="utf-8")
        path.with_stem(f"{path.stem}-dark").write_text(picture.dark, encoding="utf-8")
    if pictures:
        count = f"{len(pictures)} pictures are" if len(pictures) > 1 else "1 picture is"
        notice(f"{count} in {safe(str(folder))}, for light and for dark pages")


@dataclass(frozen=True, slots=True)
class Detail:
    """What is folded: shown when a reader asks for it."""

    title: str
    parts: Sequence[str | Table | Picture]


@dataclass(frozen=True, slots=True)
class Page:
    """What a report says, from top to bottom.

    kicker:  a line above the headline: what this is and when it was measured
    method:  sentences, and the command that measures it again
    remarks: below the table
    """

    kicker: str
    headline: str
    figures: Sequence[KeyFigure]
    picture: Picture | None
    table: Table
    method: str
    command: str
    remarks: Sequence[str] = ()
    details: Sequence[Detail] = field(default=())


def render_page(page: Page) -> str:
    """The page as text. All that it says is escaped, and loses its control characters."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: safe(value) if type(value) is str else value,
    )
    environment.tests["table"] = lambda part: isinstance(part, Table)
    environment.tests["picture"] = lambda part: isinstance(part, Picture)
    return environment.get_template("report.html.jinja").render(page=page)


def write_page(path: Path, page: Page) -> None:
    """Writes a page, and says where it is."""
    path.write_text(render_page(page), encoding="utf-8")
    notice(f"the report is {safe(str(path))}")
