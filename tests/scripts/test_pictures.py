"""The scripts that draw the documentation's pictures: what they run exists, and what they keep is there, twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cbatch.cli.bench.command import bench
from scripts.pictures import look_at_page
from scripts.pictures.picture_bench import DRAWINGS, FOLDER, rows


def test_drawings_can_be_repeated() -> None:
    """Guards the documented commands: their options exist, and what they draw is there for light and dark pages."""
    for drawing in DRAWINGS.values():
        bench.make_context("bench", drawing.arguments.split())
    kept = [name for drawing in DRAWINGS.values() for name in drawing.keeps if "." not in name]
    assert all((FOLDER / f"{name}{end}.svg").is_file() for name in kept for end in ("", "-dark"))
    assert len(rows().splitlines()) == 32 and "Felix" in json.loads(rows().splitlines()[0])["prompt"]


@pytest.mark.slow
def test_wide_pages_are_found(tmp_path: Path) -> None:
    """Guards the look at a page: what reaches beyond a narrow screen is named, unless it lies in a box that scrolls."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("Chromium is not installed")
    wide = "<p style='width: 500px'>too wide</p>"
    boxed = f"<div class='wide' style='overflow-x: auto'>{wide}</div>"
    target = tmp_path / "screen.png"
    assert look_at_page.look(browser, boxed, 400, target, dark=False, top=True) == []
    assert target.stat().st_size > 0
    found = look_at_page.look(browser, boxed + wide, 400, target, dark=True, top=True)
    assert "wider than the screen: P too wide" in found
