"""The page of a bench: what it says, in which units, and that nothing in it is markup or wider than a screen."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from cbatch.cli.bench.load.results import LoadReport
from cbatch.cli.bench.render import units
from cbatch.cli.bench.render.report.common import Occasion
from cbatch.cli.bench.render.report.comparison import comparison_page
from cbatch.cli.bench.render.report.html import Page, Picture, render_page
from cbatch.cli.bench.render.report.load import load_page, shown_users
from cbatch.cli.bench.results import ComparisonReport
from tests.support.bench_reports import EVIL, KINDS, make_capacity, make_comparison, make_load, make_load_report

SVG = '<svg viewBox="0 0 662.4 300"><title>{}</title></svg>'
PICTURES = {
    title: Picture(title, f"what {title} shows {EVIL}", SVG.format("light"), SVG.format("dark"))
    for title in ("Timeline", "Utilisation", "Speed", "One step", "Load", "Users")
}
OCCASION = Occasion(f"cbatch bench {EVIL}", "25 November 2026")


def make_report(kind: str) -> ComparisonReport | LoadReport:
    if kind == "load":
        return make_load_report(make_load(5), 9)
    if kind == "capacity":
        return make_load_report(make_capacity(1, 2, 4, 5, 6, 8, 16, capacity=5), 16, rounds=2)
    return make_comparison(kind)


def page_of(report: ComparisonReport | LoadReport) -> Page:
    make = comparison_page if isinstance(report, ComparisonReport) else load_page
    return make(report, PICTURES, OCCASION)  # type: ignore[arg-type, operator]


HEADLINES = {
    "strategies": "Continuous batching: 1.3 × the speed of static batches",
    "ablations": "Continuous batching: 1.3 × the speed of static batches",
    "peers": "Continuous batching: 1.3 × the speed of static batches",
    "replicas": "2 replicas: 2.0 × the speed of continuous batching",
    "load": "5 users: 20% of them get a first token within 500 ms and 10 tokens/s",
    "capacity": "5 users at once get a first token within 500 ms and 10 tokens/s",
}
FIGURES = {
    "strategies": [
        ("1.00", "static batches: 0.750"),
        ("100%", "static batches: 69%"),
        ("2.00 s", "static batches: 2.00 s"),
    ],
    "replicas": [
        ("2.00", "continuous batching: 1.00"),
        ("3.00 s", "continuous batching: 6.00 s"),
        ("1.50 s", "continuous batching: 2.00 s"),
    ],
    "load": [("500 ms", "99% within 1.00 s"), ("18.0", "90% get 12.0 or more"), ("3.33", "5 users")],
}
FIGURES |= {"ablations": FIGURES["strategies"], "peers": FIGURES["strategies"], "capacity": FIGURES["load"]}
LINES = {
    "strategies": ["continuous", "6.00 s", "1.00", "1.3 ×", "2.00 s", "0%"],
    "ablations": ["without KV cache", "15.7 min", "0.006", "0.01 ×", "4.00 s", "0%"],
    "peers": ["transformers-generate", "55.0 s", "0.109", "0.1 ×", "–", "–"],
    "replicas": ["2 replicas", "3.00 s", "2.00", "2.0 ×", "1.50 s", "–"],
    "load": ["half of the answers", "500 ms", "18.0"],
    "capacity": ["5 users", "20%", "500 ms", "1.00 s", "12.0", "3.33"],
}
TITLES = {
    "strategies": ["What the slots did", "Speed and latency", "One step of the engine", "Every round"],
    "ablations": ["Memory of a long prompt", "Time of one more token"],
    "peers": ["The roofline", "Machine and versions"],
    "replicas": ["Replicas"],
    "load": ["Every run", "Machine and versions"],
    "capacity": ["Every run"],
}


@pytest.mark.parametrize("kind", [*KINDS, "load", "capacity"])
def test_report_says_what_was_measured(kind: str) -> None:
    """Guards the page of each kind: a headline and three figures counted by hand, one table, command, day, machine."""
    page = page_of(make_report(kind))
    assert page.headline == HEADLINES[kind]
    assert [(figure.value, figure.note) for figure in page.figures] == FIGURES[kind]
    assert LINES[kind] in page.table.lines and len(page.table.lines) <= 5
    assert all(len(line) == len(page.table.head) for line in page.table.lines)
    assert "on 25 November 2026 on AMD EPYC with 2 threads" in page.method and page.command == OCCASION.command
    titles = [detail.title for detail in page.details]
    assert [title for title in titles if title in TITLES[kind]] == TITLES[kind]
    assert page.picture is not None and all(detail.parts for detail in page.details)
    if kind not in ("load",):
        assert page.table.strong is not None
        assert page.table.lines[page.table.strong][0] in ("continuous", "2 replicas", "5 users")


def test_what_is_missing_is_said() -> None:
    """Guards honest pages: a peer that failed, users who never came, and a search that found nobody served."""
    peers = page_of(make_report("peers"))
    assert peers.remarks[0].startswith("Continuous batching is 1.33 ×")
    assert peers.remarks[1:] == [f"transformers-cb: not available here: {EVIL}"]
    assert peers.table.lines[-1] == ["transformers-cb", "–", "–", "–", "–", "–"]
    (missing,) = page_of(make_report("load")).remarks
    assert missing.startswith("Only 5 of 9 users arrived, so these are not the figures of 9 users. --rate ")
    nobody = page_of(make_load_report(make_capacity(1, capacity=0), 1))
    assert nobody.headline == "Not even one user gets a first token within 500 ms and 10 tokens/s"
    assert nobody.table.strong is None and nobody.figures[2].note == "1 user"
    alone = make_comparison("strategies")
    only = dataclasses.replace(alone, strategies=alone.strategies[1:])
    page = page_of(only)
    assert page.headline == "Continuous batching: 1.00 output tokens a second"
    assert [figure.note for figure in page.figures] == ["", "", ""] and len(page.table.head) == 5


class Elements(HTMLParser):
    """What a page is made of. Fails if its tags do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.texts: list[str] = []
        self.too_wide: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag in ("table", "img") and "wide" not in [name for _, name in self.open]:
            self.too_wide.append(tag)
        if tag not in ("meta", "img", "source"):
            self.open.append((tag, values.get("class") or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1][0] != "style" and data.strip():
            self.texts.append(data.strip())


@pytest.mark.parametrize("kind", [*KINDS, "load", "capacity"])
def test_nothing_is_markup(kind: str) -> None:
    """Guards names of models, files and errors: text and not markup, without control characters; nothing is loaded."""
    text = render_page(page_of(make_report(kind)))
    page = Elements(text)
    assert "<script" not in text and "\x1b" not in text and "url(" not in text and "@import" not in text
    assert page.tags.isdisjoint({"script", "link", "iframe", "object", "svg", "base", "form"})
    assert {link[:26] for link in page.links} == {"data:image/svg+xml;base64,"}
    shown = EVIL.replace("\x1b", "")
    assert any(shown in words for words in page.texts) and f"cbatch bench {shown}" in page.texts


@pytest.mark.parametrize("kind", [*KINDS, "load", "capacity"])
def test_a_person_reads_the_units(kind: str) -> None:
    """Guards against 17 digits and raw bytes: no long fractions, no long numbers without commas."""
    words = " ".join(Elements(render_page(page_of(make_report(kind)))).texts)
    assert unreadable(words) == []
    assert unreadable(f"{words} 0.0123456789 s, 123456789 bytes, peak_memory_bytes, 23 B") == [
        "0.0123456789",
        "123456789",
        "peak_memory_bytes",
    ]


def unreadable(words: str) -> list[str]:
    return re.findall(r"\d+\.\d{4,}|(?<![\d.,])\d{6,}|\b[a-z]+_[a-z_]+\b", words)


def test_nothing_is_wider_than_a_screen() -> None:
    """Guards narrow screens: tables and pictures have boxes of their own that scroll, and the rest wraps."""
    text = render_page(page_of(make_report("strategies")))
    page = Elements(text)
    assert page.too_wide == [] and {"table", "img", "details", "picture"} <= page.tags
    assert re.search(r"\.wide \{[^}]*overflow-x: auto", text) and re.search(
        r"body \{[^}]*overflow-wrap: anywhere", text
    )
    assert Elements("<p>beside</p><table></table>").too_wide == ["table"], "a table without a box is found"


def test_pictures_are_for_light_and_dark() -> None:
    """Guards both: the page has its own colours for dark screens, and each picture brings one for them."""
    text = render_page(page_of(make_report("strategies")))
    sources = re.findall(
        r'<picture><source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)"><img[^>]* src="([^"]+)"', text
    )
    assert len(sources) == text.count("<img") == 4
    assert set(sources) == {PICTURES["Timeline"].sources[::-1]}
    assert "color-scheme: light dark" in text and "@media (prefers-color-scheme: dark)" in text
    assert "width: 883px; min-width: 662px" in text


def test_a_search_shows_five_lines() -> None:
    """Guards the table of a long search: the capacity, the number after it, both ends, and one between."""
    users = [1, 2, 4, 8, 16, 32, 64, 128, 256, 320, 352, 384, 512]
    assert shown_users(users, 352) == [1, 32, 352, 384, 512]
    assert shown_users(users, 0) == [1, 2, 4, 8, 512] and shown_users(users, 512) == [1, 2, 4, 64, 512]
    assert shown_users([1, 2], 1) == [1, 2] and shown_users([7], 0) == [7]


def test_units() -> None:
    """Guards figures as they are read: three digits, and nothing that is rounded to 0% or 100%."""
    assert [units.duration(value) for value in (None, 12e-6, 0.0054, 0.0188, 0.772, 1.314, 9.999, 65, 940, 9000)] == [
        "–", "12.0 µs", "5.40 ms", "18.8 ms", "772 ms", "1.31 s", "10.0 s", "65.0 s", "15.7 min", "2.50 h",
    ]  # fmt: skip
    assert [units.share(value) for value in (None, 0, 0.001, 0.6, 0.9964, 1)] == [
        "–",
        "0%",
        "<1%",
        "60%",
        "99.6%",
        "100%",
    ]
    assert [units.times(value) for value in (0.008, 0.1, 2.34, 1234)] == ["0.01 ×", "0.1 ×", "2.3 ×", "1,234 ×"]
    assert [units.per_second(value) for value in (None, 0.109, 1.0, 50, 5087.4)] == [
        "–",
        "0.109",
        "1.00",
        "50.0",
        "5,087",
    ]
    assert [units.round_duration(value) for value in (0.5, 1, 20, 1500)] == ["500 ms", "1 s", "20 s", "1,500 s"]
