"""The report of a bench of any kind: printed in a terminal, and as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cbatch.base.errors import ConfigError
from cbatch.base.units import format_count, word_for
from cbatch.cli.bench.pictures.style import Drawing, adaptive_variant, dark_variant, drawing_of
from cbatch.cli.bench.units import NOTHING
from cbatch.cli.common.configured_command import command_line
from cbatch.cli.common.console import emit, notice, safe

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


@dataclass(frozen=True)
class Picture:
    """A picture, which is drawn when a file is to show it.  name: the stem of its files"""

    name: str
    draw: Callable[[], Figure]

    @cached_property
    def drawing(self) -> Drawing:
        return drawing_of(self.draw, self.name)

    def write(self, folder: Path) -> None:
        """Writes its two files, for light and for dark pages. Raises OSError."""
        svg = self.drawing.svg
        (folder / f"{self.name}.svg").write_text(svg, encoding="utf-8")
        (folder / f"{self.name}-dark.svg").write_text(dark_variant(svg), encoding="utf-8")

    @property
    def source(self) -> str:
        """As an address. The content of an image cannot run or load anything."""
        return f"data:image/svg+xml;base64,{base64.b64encode(adaptive_variant(self.drawing.svg).encode()).decode()}"


@dataclass(frozen=True, slots=True)
class Detail:
    """A part that a page folds, and a terminal shows but for pictures. Parts that are None or empty are left out."""

    title: str
    parts: Sequence[str | Table | Picture | None]

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
    """

    data: dict[str, Any]
    headline: str
    figures: Sequence[KeyFigure]
    table: Table
    facts: str
    method: str
    remarks: Sequence[str]
    picture: Picture | None = None
    details: Sequence[Detail] = ()

    @property
    def all_details(self) -> list[Detail]:
        """Those that have parts, and the machine."""
        lines = [[name, str(value)] for name, value in ({"model": self.data["model"]} | self.data["machine"]).items()]
        found = [detail for detail in self.details if detail.shown]
        return [*found, Detail("Machine and versions", [Table([], lines, has_words=True)])]

    @property
    def pictures(self) -> list[Picture]:
        """All of them, from top to bottom."""
        parts = [self.picture, *(part for detail in self.details for part in detail.shown)]
        return [part for part in parts if isinstance(part, Picture)]

    def print(self) -> None:
        machine = self.data["machine"]
        emit(safe(self.data["model"]))
        emit(safe(f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}"))
        emit(safe("\n".join([f"{self.facts}\n\n{self.table.markdown}\n\n{self.headline}.", *self.remarks])))
        for detail in self.details:
            parts = [part for part in detail.shown if not isinstance(part, Picture)]
            texts = [part.markdown if isinstance(part, Table) else part for part in parts]
            if texts:
                emit(safe("\n".join(["", *texts])))

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

    def write(self, folder: str | None, file: str | None) -> None:
        """Writes pictures for light and for dark pages to a folder, and the page to a file, and says where they are.

        Raises ConfigError if they cannot be written.
        """
        pictures = self.pictures
        try:
            if folder:
                for picture in pictures:
                    picture.write(Path(folder))
            if file:
                text = self.html(command_line(), f"{datetime.now():%d %B %Y}".lstrip("0"))
                Path(file).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"Cannot write {error.filename}: {error.strerror}.") from error
        if folder and pictures:
            count = f"{format_count(len(pictures), 'picture')} {word_for(len(pictures), 'is', 'are')}"
            notice(f"{count} in {safe(folder)}, for light and for dark pages")
        if folder and not pictures:  # a load
            notice("there is no picture, because no answer came that could be judged; use a longer --duration")
        if file:
            notice(f"the report is {safe(file)}")
