"""How far ahead rows are read, unless somebody says it."""

from __future__ import annotations

from cbatch.engine.batch.window import default_window


def test_the_default_window() -> None:
    """Guards the order of the last rows, which needs many of them, and the memory of engines with many slots."""
    assert [default_window(slots) for slots in (1, 32, 128, 256, 1000)] == [16, 512, 2048, 2048, 4000]
