"""The results of a benchmark as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from cbatch.engine import format_bytes

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --paper: #fff; --band: #f6f8fa }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --paper: #0d1117; --band: #151b23 }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .8rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
thead th { background: var(--band) }
tbody th { font-weight: normal; color: var(--soft); white-space: nowrap }
td.number, th.number { text-align: right }
td.number { white-space: nowrap }
figure { margin: 1.5rem 0 }
figure img { max-width: 100%; height: auto; background: #fff; border-radius: 6px }
figcaption { color: var(--soft); font-size: .9rem }
@media print {
  :root { --ink: #000; --soft: #444; --line: #bbb; --paper: #fff; --band: #eee }
  body { font-size: 10pt; margin: 0; max-width: none }
  table { font-size: 8pt } th, td { padding: .1rem .35rem }
  figure, tr { break-inside: avoid } h2 { break-after: avoid } .wide { overflow: visible }
}
"""

SHORT = {word.lower(): word for word in ("TTFT", "TPOT", "KV", "CPU", "GPU", "SLO", "MiB", "GiB")} | {"tps": "tokens/s"}
"""Words that are not written small."""

NOTHING = "–"


def html_report(data: Mapping[str, Any], pictures: Iterable[tuple[str, str]]) -> str:
    """A page with a table for each part of the data, and the pictures.

    data:     by headings, in order; `title` is that of the page. A part is a text, a mapping of values (a table of
              two columns), a mapping of mappings (a column for each, as for strategies), or a list of mappings
              (a line for each). Names ending in _s are seconds, in _share parts of 1, in _bytes bytes.
    pictures: title and SVG of each; a picture is an image of its own in the page, whose content cannot run or load
              anything
    """
    title = escape(str(data.get("title", "Benchmark")))
    chunks = [f"<h2>{escape(_heading(name))}</h2>\n{_part(value)}" for name, value in data.items() if name != "title"]
    drawn = [_picture(name, svg) for name, svg in pictures]
    body = "\n".join([f"<h1>{title}</h1>", *chunks, *(["<h2>Pictures</h2>"] if drawn else []), *drawn])
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _picture(title: str, svg: str) -> str:
    encoded = base64.b64encode(svg.encode()).decode()
    words = escape(title)
    image = f'<img alt="{words}" src="data:image/svg+xml;base64,{encoded}">'
    return f"<figure>{image}<figcaption>{words}</figcaption></figure>"


def _part(value: Any) -> str:
    if isinstance(value, Mapping) and value and all(isinstance(column, Mapping) for column in value.values()):
        return _columns(value)
    if isinstance(value, Mapping):
        return _table([], [[_words(name), _shown(name, item)] for name, item in _flat(value).items()])
    if isinstance(value, Sequence) and value and all(isinstance(line, Mapping) for line in value):
        lines = [_flat(line) for line in value]
        names = list(dict.fromkeys(name for line in lines for name in line))
        cells = [[_shown(name, line.get(name)) for name in names] for line in lines]
        return _table([_words(name) for name in names], cells)
    return f"<p>{escape(_shown('', value))}</p>"


def _columns(value: Mapping[Any, Mapping[str, Any]]) -> str:
    """A line for each name that any of the mappings has, a column for each mapping."""
    columns = [_flat(column) for column in value.values()]
    names = dict.fromkeys(name for column in columns for name in column)
    lines = [[_words(name), *(_shown(name, column.get(name)) for column in columns)] for name in names]
    return _table(["", *map(str, value)], lines)


def _table(head: list[str], lines: list[list[str]]) -> str:
    """The first column names the line, the others are values."""

    def cells(line: list[str], first: str, other: str) -> str:
        named = f"<{first}>{escape(line[0])}</{first}>" if line else ""
        kind = ' class="number"' if len(line) > 2 else ""
        return named + "".join(f"<{other}{kind}>{escape(cell)}</{other}>" for cell in line[1:])

    top = f"<thead><tr>{cells(head, 'th', 'th')}</tr></thead>" if head else ""
    rows = "\n".join(f"<tr>{cells(line, 'th', 'td')}</tr>" for line in lines)
    return f'<div class="wide"><table>{top}\n<tbody>\n{rows}\n</tbody></table></div>'


def _flat(value: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings inside are spread out: {"ttft_s": {"p50": 1}} is {"ttft_p50_s": 1}."""
    found: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, Mapping):
            stem, unit = (name[:-2], "_s") if name.endswith("_s") and not name.endswith("_per_s") else (name, "")
            found |= {f"{stem}_{inner}{unit}": shown for inner, shown in _flat(item).items()}
        else:
            found[str(name)] = item
    return found


def _words(name: str) -> str:
    """A name of the data as people write it."""
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
