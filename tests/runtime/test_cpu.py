"""Facts read about the processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from cbatch.runtime import cpu


@pytest.mark.parametrize(
    ("files", "size"),
    [
        ({"index0": ("1", "48K"), "index2": ("2", "2048K")}, 2**21),
        ({"index2": ("2", "8K")}, 2**18),
        ({"index2": ("2", "65536K")}, 2**22),
        ({"index2": ("2", "much")}, 2**20),
        ({"index3": ("3", "32768K")}, 2**20),
        ({}, 2**20),
    ],
)
def test_the_size_of_the_second_cache(
    files: dict[str, tuple[str, str]], size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards sizes of blocks: a system that says nothing or nonsense does not break the kernels."""
    for name, (level, text) in files.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "level").write_text(f"{level}\n")
        (tmp_path / name / "size").write_text(f"{text}\n")
    monkeypatch.setattr(cpu, "_CACHES", tmp_path)
    assert cpu.second_cache_bytes() == size
