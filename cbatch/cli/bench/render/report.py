"""The results of a bench as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cbatch.engine import format_bytes

SHORT = {word.lower(): word for word in ("TTFT", "TPOT", "KV", "CPU", "GPU", "SLO", "MiB", "GiB")} | {"tps": "tokens/s"}
"""Words that are not written in lower case."""

NOTHING = "–"


class _Table(NamedTuple):
    """The first cell of a line is its heading."""

    head: list[str]
    lines: list[list[str]]


def html_report(data: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """A page with a section for each entry of the data, and the pictures.

    data:     by headings, in order; `title` is that of the page. An entry is a text, a mapping of values (a table of
              two columns), a mapping of mappings (a column for each, as for strategies), or a list of mappings
              (a line for each). Names ending in _s are seconds, in _share shares of 1, in _bytes bytes.
    pictures: SVG texts by title. They are embedded as images, whose content cannot run or load anything.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("report.html.jinja").render(
        title=data["title"],
        sections=[(_words(name), _content(value)) for name, value in data.items() if name != "title"],
        pictures=[(title, base64.b64encode(svg.encode()).decode()) for title, svg in pictures.items()],
    )


def _content(value: Any) -> _Table | str:
    if isinstance(value, Mapping):
        has_columns = bool(value) and all(isinstance(column, Mapping) for column in value.values())
        columns = [_flat(column) for column in (value.values() if has_columns else [value])]
        names = dict.fromkeys(name for column in columns for name in column)
        lines = [[_words(name), *(_shown(name, column.get(name)) for column in columns)] for name in names]
        return _Table(["", *map(str, value)] if has_columns else [], lines)
    if isinstance(value, Sequence) and value and all(isinstance(line, Mapping) for line in value):
        entries = [_flat(entry) for entry in value]
        names = dict.fromkeys(name for entry in entries for name in entry)
        lines = [[_shown(name, entry.get(name)) for name in names] for entry in entries]
        return _Table([_words(name) for name in names], lines)
    return _shown("", value)


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
