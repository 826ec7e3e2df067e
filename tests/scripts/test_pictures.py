"""The scripts that draw the documentation's pictures: what they run exists, and what they keep is there, twice."""

from __future__ import annotations

import json

from cbatch.cli.bench.command import bench
from scripts.pictures.picture_bench import DRAWINGS, FOLDER, rows


def test_drawings_can_be_repeated() -> None:
    """Guards the documented commands: their options exist, and what they draw is there for light and dark pages."""
    for drawing in DRAWINGS.values():
        bench.make_context("bench", drawing.arguments.split())
    kept = [name for drawing in DRAWINGS.values() for name in drawing.keeps if "." not in name]
    assert all((FOLDER / f"{name}{end}.svg").is_file() for name in kept for end in ("", "-dark"))
    assert len(rows().splitlines()) == 32 and "Felix" in json.loads(rows().splitlines()[0])["prompt"]
