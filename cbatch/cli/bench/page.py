"""The report of a bench of any kind: printed in a terminal, and as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cbatch.base.errors import ConfigError
from cbatch.base.units import format_count, word_for
from cbatch.cli.bench.units import NOTHING
from cbatch.cli.common.configured_command import command_line
from cbatch.cli.common.console import emit, notice, safe

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Report(NamedTuple):
    """The measurement: the object that `--json` prints, and the runs that pictures need beside it, by name."""

    data: dict[str, Any]
    runs: Any = None


Charts = Mapping[str, Callable[[], "Figure"]]
"""Functions that draw pictures, by the stems of their files."""

PIXELS_PER_POINT = 4 / 3

ALTS = {
    "timeline": "One lane for each slot over time: what it computed, for which request, and when it was empty.",
    "utilisation": "Share of the slots that compute over time, by kind of work, for each strategy.",
    "speed": "Output tokens a second, time to the first token and time of further tokens, for each strategy.",
    "step": "One step: the tokens of all requests in one line, what each attends to, and the cache blocks read.",
    "speculation": "Tokens of some requests in each step: their own, accepted and rejected drafts.",
    "load": "Time to the first token, speed of a user and share of users within the objective, by number of users.",
    "users": "Users who have come, time to the first token and speed of each answer, over time.",
    "skew": (
        "Gain of continuous over static batches by the skew of lengths, measured and by arithmetic, and its factors."
    ),
}
"""Descriptions of pictures, by the stems of their files."""


class KeyFigure(NamedTuple):
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

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, str]], strong: int | None = None) -> Table:
        """lines: cells by heading; the first has all headings, and what others lack is nothing"""
        head = list(lines[0]) if lines else []
        return cls(head, [[line.get(name) or NOTHING for name in head] for line in lines], strong)

    @property
    def markdown(self) -> str:
        """With aligned columns: the first to the left, the others to the right."""
        columns = list(zip(self.head, *self.lines, strict=True))
        widths = [max(map(len, column)) for column in columns]
        rule = ["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]
        shown = [
            " | ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])])
            for cells in (self.head, *self.lines)
        ]
        first, *others = (f"| {line} |" for line in shown)
        return "\n".join([first, f"|{'|'.join(rule)}|", *others])


class Picture(NamedTuple):
    """A picture as SVG text in light colours. `alt` says in words what it shows."""

    alt: str
    svg: str

    @property
    def source(self) -> str:
        """As an address. The content of an image cannot run or load anything."""
        from cbatch.cli.bench.pictures.style import adaptive_variant

        return f"data:image/svg+xml;base64,{base64.b64encode(adaptive_variant(self.svg).encode()).decode()}"

    @property
    def width(self) -> int:
        """Of its natural size, in pixels."""
        found = re.search(r'viewBox="0 0 ([\d.]+) ', self.svg)
        return round(float(found[1]) * PIXELS_PER_POINT) if found else 0


def draw(charts: Charts) -> dict[str, Picture]:
    from cbatch.cli.bench.pictures.style import svg_texts

    return {name: Picture(ALTS[name], svg) for name, svg in svg_texts(charts).items()}


@dataclass(frozen=True, slots=True)
class Detail:
    """A part that a page folds, and a terminal shows if it `is_printed`. Parts that are None or empty are left out."""

    title: str
    parts: Sequence[str | Table | Picture | None]
    is_printed: bool = True

    @property
    def shown(self) -> list[str | Table | Picture]:
        return [part for part in self.parts if part and not (isinstance(part, Table) and not part.lines)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The content of a report, from top to bottom.

    data:    the object that `--json` prints, of which the page takes `machine` and `model`
    facts:   what was measured: the work in a sentence
    method:  how it was measured, in sentences
    remarks: below the table
    drawing: what a terminal shows of a picture, in characters
    """

    data: Mapping[str, Any]
    headline: str
    figures: Sequence[KeyFigure]
    picture: Picture | None
    table: Table
    facts: str
    method: str
    remarks: Sequence[str]
    details: Sequence[Detail] = ()
    drawing: Sequence[str] = ()

    @property
    def all_details(self) -> list[Detail]:
        """Those that have parts, and the machine."""
        lines = [[name, str(value)] for name, value in ({"model": self.data["model"]} | self.data["machine"]).items()]
        found = [detail for detail in self.details if detail.shown]
        return [*found, Detail("Machine and versions", [Table([], lines, has_words=True)])]

    def print(self) -> None:
        machine = self.data["machine"]
        emit(safe(self.data["model"]))
        emit(safe(f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}"))
        emit(safe("\n".join([f"{self.facts}\n\n{self.table.markdown}\n\n{self.headline}.", *self.remarks])))
        for detail in self.details:
            parts = [part for part in detail.shown if not isinstance(part, Picture)]
            texts = [part.markdown if isinstance(part, Table) else part for part in parts]
            if detail.is_printed and texts:
                emit(safe("\n".join(["", *texts])))
        if self.drawing:
            emit("\n".join(["", *self.drawing]))

    def html(self, command: str, date: str) -> str:
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
        return environment.get_template("page.html.jinja").render(page=self, command=command, date=date)


def write_files(page: Page, pictures: Mapping[str, Picture], folder: str | None, file: str | None) -> None:
    """Writes the pictures to a folder, for light and for dark pages, and the page to a file, and says where they are.

    pictures: by the stems of their files
    Raises ConfigError if they cannot be written.
    """
    from cbatch.cli.bench.pictures.style import dark_variant

    try:
        for stem, picture in pictures.items() if folder else ():
            for name, svg in ((stem, picture.svg), (f"{stem}-dark", dark_variant(picture.svg))):
                Path(folder or "", f"{name}.svg").write_text(svg, encoding="utf-8")
        if file:
            text = page.html(command_line(), f"{datetime.now():%d %B %Y}".lstrip("0"))
            Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot write {error.filename}: {error.strerror}.") from error
    if folder and pictures:
        count = f"{format_count(len(pictures), 'picture')} {word_for(len(pictures), 'is', 'are')}"
        notice(f"{count} in {safe(folder)}, for light and for dark pages")
    if file:
        notice(f"the report is {safe(file)}")
