"""The results of a bench as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cbatch.engine import format_bytes

SHORT = {word.lower(): word for word in ("TTFT", "TPOT", "KV", "CPU", "GPU", "SLO", "MiB", "GiB")} | {"tps": "tokens/s"}
"""Words that are not written in lower case."""

NOTHING = "–"


@dataclass(frozen=True, slots=True)
class _Table:
    """The first cell of a line is its heading."""

    head: list[str]
    lines: list[list[str]]


@dataclass(frozen=True, slots=True)
class _Section:
    heading: str
    content: _Table | str


def html_report(data: Mapping[str, Any], pictures: Iterable[tuple[str, str]]) -> str:
    """A page with a section for each entry of the data, and the pictures.

    data:     by headings, in order; `title` is that of the page. An entry is a text, a mapping of values (a table of
              two columns), a mapping of mappings (a column for each, as for strategies), or a list of mappings
              (a line for each). Names ending in _s are seconds, in _share shares of 1, in _bytes bytes.
    pictures: title and SVG of each. They are embedded as images, whose content cannot run or load anything.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("report.html.jinja").render(
        title=str(data.get("title", "Benchmark")),
        sections=[_Section(_heading(name), _content(value)) for name, value in data.items() if name != "title"],
        pictures=[{"title": title, "source": _data_uri(svg)} for title, svg in pictures],
    )


def _data_uri(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _content(value: Any) -> _Table | str:
    if isinstance(value, Mapping) and value and all(isinstance(column, Mapping) for column in value.values()):
        return _columns(value)
    if isinstance(value, Mapping):
        return _Table([], [[_words(name), _shown(name, item)] for name, item in _flat(value).items()])
    if isinstance(value, Sequence) and value and all(isinstance(line, Mapping) for line in value):
        lines = [_flat(line) for line in value]
        names = list(dict.fromkeys(name for line in lines for name in line))
        cells = [[_shown(name, line.get(name)) for name in names] for line in lines]
        return _Table([_words(name) for name in names], cells)
    return _shown("", value)


def _columns(value: Mapping[Any, Mapping[str, Any]]) -> _Table:
    """A line for each name in any of the mappings, a column for each mapping."""
    columns = [_flat(column) for column in value.values()]
    names = dict.fromkeys(name for column in columns for name in column)
    lines = [[_words(name), *(_shown(name, column.get(name)) for column in columns)] for name in names]
    return _Table(["", *map(str, value)], lines)


def _flat(value: Mapping[str, Any]) -> dict[str, Any]:
    """Spreads out inner mappings: {"ttft_s": {"p50": 1}} becomes {"ttft_p50_s": 1}."""
    found: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, Mapping):
            stem, unit = (name[:-2], "_s") if name.endswith("_s") and not name.endswith("_per_s") else (name, "")
            found |= {f"{stem}_{inner}{unit}": shown for inner, shown in _flat(item).items()}
        else:
            found[str(name)] = item
    return found


def _words(name: str) -> str:
    """A key of the data in words."""
    words = str(name).replace("_per_s", "/s").removesuffix("_bytes").removesuffix("_s").replace("_", " ")
    return " ".join(SHORT.get(word, word) for word in words.split(" "))


def _heading(name: str) -> str:
    words = _words(name)
    return words[:1].upper() + words[1:]


def _shown(name: str, value: Any) -> str:
    """A value with its unit."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        if name.endswith("_share"):
            return f"{value:.1%}"
        if name.endswith("_bytes"):
            return format_bytes(round(value))
        if name.endswith("_s") and not name.endswith("_per_s"):
            return f"{value * 1000:#.3g}".rstrip(".") + " ms" if abs(value) < 1 else f"{value:,.2f} s"
        return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    if isinstance(value, list | tuple | set):
        return ", ".join(_shown(name, item) for item in value) or NOTHING
    return str(value)
