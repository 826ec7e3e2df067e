"""The page of a bench: what it says, in which units, and that nothing in it is markup or wider than a screen."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cbatch.base.errors import ConfigError
from cbatch.cli.bench import comparison, page, units
from cbatch.cli.bench.page import Page
from cbatch.cli.bench.pictures.style import Drawing
from tests.support.bench_reports import (
    EVIL,
    KINDS,
    both,
    load_report,
    make_comparison,
    make_load,
    make_one_load,
    make_search,
)

SVG = '<svg><path style="fill: #1f2328"/></svg>'
COMMAND, DATE = f"cbatch bench {EVIL}", "25 November 2026"


@pytest.fixture(autouse=True)
def quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws nothing, for which `test_pictures.py` is there."""
    monkeypatch.setattr(page, "drawing_of", lambda draw, name: Drawing(SVG, f"what {name} shows {EVIL}"))


def page_of(kind: str) -> Page:
    if kind == "load":
        return make_one_load()
    if kind == "capacity":
        return make_search(1, 2, 4, 5, 6, 8, 16, capacity=5, rounds=2)
    return make_comparison(kind)


def html_of(kind: str) -> str:
    return page_of(kind).html(COMMAND, DATE)


STATIC = (
    "Continuous batching: 1.3 × the speed of static batches",
    [("1.00", "static batches: 0.750"), ("100%", "static batches: 69%"), ("2.00 s", "static batches: 2.00 s")],
)
SERVED = [("500 ms", "99% within 1.00 s"), ("18.0", "90% get 12.0 or more"), ("3.33", "5 users")]
USERS = ["5", "20%", "5", "500 ms / 1.00 s", "18.0 / 12.0", "3.33"]
CONTINUOUS = ["continuous", "6.00 s", "1.00", "1.3 ×", "2.00 s / 5.92 s", "2.00 s / 2.00 s", "12%", "100%"]
STRATEGIES = ["What the slots did", "Speed and latency"]
PEER = ["transformers-generate", "55.0 s", "0.109", "0.1 ×", "–", "–", "12%", "100%"]
SLOW = ["without KV cache", "15.7 min", "0.006", "0.01 ×"]
LOAD = "5 users: 20% of them get a first token within 500 ms and 10 tokens/s"
SEARCH = "5 users at once get a first token within 500 ms and 10 tokens/s"
REPORTS = {
    "strategies": (*STATIC, CONTINUOUS, STRATEGIES),
    "ablations": (*STATIC, SLOW, STRATEGIES),
    "peers": (*STATIC, PEER, ["The roofline", "Machine and versions"]),
    "load": (LOAD, SERVED, USERS, ["Machine and versions"]),
    "capacity": (SEARCH, SERVED, USERS, ["Machine and versions"]),
}
"""The headline, the three figures, a line of the table, and some titles of details."""


@pytest.mark.parametrize("kind", [*KINDS, "load", "capacity"])
def test_report_says_what_was_measured(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the page of each kind: a headline and three figures counted by hand, a table, details, command, machine.

    The terminal says the same.
    """
    page, (headline, figures, wanted, titles) = page_of(kind), REPORTS[kind]
    assert page.headline == headline
    assert [(figure.value, figure.note) for figure in page.figures] == figures
    assert any(line[: len(wanted)] == wanted for line in page.table.lines), page.table
    assert all(len(line) == len(page.table.head) for line in page.table.lines)
    assert [detail.title for detail in page.all_details if detail.title in titles] == titles
    assert all(detail.shown for detail in page.all_details)
    if kind != "load":
        assert page.picture is not None
        assert page.table.strong is not None
        assert page.table.lines[page.table.strong][0] in ("continuous", "5")
    text = html_of(kind)
    assert f"Measured on {DATE} on AMD EPYC with 2 threads" in text and "&#34;&amp;[2J</code>" in text
    page.print()
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and f"\n\n{page.headline}.\n" in shown
    assert re.search(rf"^\| {re.escape(wanted[0])} +\|.* {re.escape(wanted[1])} \|", shown, re.MULTILINE)


def test_what_is_missing_is_said() -> None:
    """Guards honest pages: a peer that failed, users who never came, and a search that found nobody served."""
    peers = page_of("peers")
    assert peers.remarks[0].startswith("Continuous batching is 1.33 ×")
    assert peers.remarks[1:] == [f"transformers-cb: not available here: {EVIL}"]
    assert peers.table.lines[-1] == ["transformers-cb", *"–––––––"]
    (missing,) = page_of("load").remarks
    assert missing.startswith("Only 5 of 9 users arrived, so these are not the figures of 9 users. --rate ")
    nobody = make_search(1)
    assert nobody.headline == "Not even one user gets a first token within 500 ms and 10 tokens/s"
    assert nobody.table.strong is None and nobody.figures[2].note == "1 user"
    unjudged = make_load(5) | {"users_served_share": None}
    nowhere = load_report(5, {5: [unjudged]})
    assert nowhere.headline == "5 users came, and none of their answers could be judged" and nowhere.picture is None
    alone = make_comparison("strategies")
    single = comparison.page_of(alone.data | {"strategies": alone.data["strategies"][1:]}, both())
    assert single.headline == "Continuous batching: 1.00 output tokens a second"
    assert [figure.note for figure in single.figures] == ["", "", ""]


class Elements(HTMLParser):
    """The parts of a page. Fails if its tags do not nest."""

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
    """Guards names of models, files and errors: text and not markup, without control characters; nothing is loaded.

    A person reads the figures: no long fractions, no long numbers without commas.
    """
    text = html_of(kind)
    page = Elements(text)
    assert "<script" not in text and "\x1b" not in text and "url(" not in text and "@import" not in text
    assert page.tags.isdisjoint({"script", "link", "iframe", "object", "svg", "base", "form"})
    assert {link[:26] for link in page.links} == ({"data:image/svg+xml;base64,"} if kind != "load" else set())
    shown = EVIL.replace("\x1b", "")
    assert any(shown in words for words in page.texts) and f"cbatch bench {shown}" in page.texts
    assert re.findall(r"\d+\.\d{4,}|(?<![\d.,])\d{6,}|\b[a-z]+_[a-z_]+\b", " ".join(page.texts)) == []


def test_screens() -> None:
    """Guards narrow screens, where tables and pictures have boxes that scroll, and dark ones.

    A picture takes the colours of a dark page by a style of its own.
    """
    text = html_of("strategies")
    page = Elements(text)
    assert page.too_wide == [] and {"table", "img", "details"} <= page.tags
    assert re.search(r"\.wide \{[^}]*overflow-x: auto", text)
    assert re.search(r"body \{[^}]*overflow-wrap: anywhere", text)
    assert "color-scheme: light dark" in text and "@media (prefers-color-scheme: dark)" in text
    assert "width: 883px; min-width: 662px" in text and len(page.links) == 2
    svg = base64.b64decode(page.links[0].partition(",")[2]).decode()
    assert '<style>@media (prefers-color-scheme:dark){[style*="fill: #1f2328"]{fill:#e6edf3!important}' in svg


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards what is written: each picture for light and for dark pages, and the page; and a folder that is gone."""
    monkeypatch.setattr("cbatch.cli.bench.page.command_line", lambda: COMMAND)
    loaded = page_of("capacity")
    loaded.write(str(tmp_path), str(tmp_path / "a.html"))
    assert "1 picture is in" in (shown := capsys.readouterr().err) and "the report is" in shown
    assert {path.name for path in tmp_path.iterdir()} == {"load.svg", "load-dark.svg", "a.html"}
    assert "#e6edf3" in (tmp_path / "load-dark.svg").read_text()
    with pytest.raises(ConfigError, match=r"Cannot write .*: No such file"):
        loaded.write(str(tmp_path / "no"), None)


def test_units() -> None:
    """Guards figures as they are read: three digits, and nothing that is rounded to 0% or 100%."""
    assert [units.duration(value) for value in (None, 12e-6, 0.0054, 0.0188, 0.772, 1.314, 9.999, 65, 940, 9000)] == [
        "–", "12.0 µs", "5.40 ms", "18.8 ms", "772 ms", "1.31 s", "10.0 s", "65.0 s", "15.7 min", "2.50 h",
    ]  # fmt: skip
    shares = [units.share(value) for value in (None, 0, 0.001, 0.6, 0.9964, 1)]
    assert shares == ["–", "0%", "<1%", "60%", "99.6%", "100%"]
    assert [units.times(value) for value in (0.008, 0.1, 2.34, 1234)] == ["0.01 ×", "0.1 ×", "2.3 ×", "1,234 ×"]
    rates = [units.number(value) for value in (None, 0.109, 1.0, 50, 5087.4)]
    assert rates == ["–", "0.109", "1.00", "50.0", "5,087"]
    assert [units.round_duration(value) for value in (0.5, 1, 20, 1500)] == ["500 ms", "1 s", "20 s", "1,500 s"]
