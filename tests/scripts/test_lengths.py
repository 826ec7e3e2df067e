"""The lengths of published data: read from its forms, and the gain that slots would have on them."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from statistics import mean

import pytest

from cbatch.cli.bench.workload import skewed_lengths
from scripts.benchmarks.harness import main
from scripts.benchmarks.lengths import Lengths, mean_longest, read_lengths, skew_of_gain


def test_lengths_of_every_form(tmp_path: Path) -> None:
    """Guards the readers: numbers and texts of CSV, JSON Lines and an array, without those below 1."""
    (tmp_path / "a.csv").write_text("TIMESTAMP,GeneratedTokens\n1,44\n2,0\n3,109\n")
    rows = [{"output": "four"}, {"output": ""}, {"output": 7}]
    (tmp_path / "b.json").write_text(json.dumps(rows))
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_lengths(tmp_path / "a.csv", "GeneratedTokens") == [44, 109]
    assert read_lengths(tmp_path / "b.json", "output") == read_lengths(tmp_path / "c.jsonl", "output") == [4, 7]
    with pytest.raises(ValueError, match="row 1: there is no column 'text', but output"):
        read_lengths(tmp_path / "b.json", "text")


def test_the_longest_of_several() -> None:
    """Guards the gain against all batches counted one by one, and the skew against that of made-up lengths."""
    lengths = [1.0, 2.0, 4.0, 10.0]
    counted = mean(max(batch) for batch in itertools.product(lengths, repeat=3))
    assert mean_longest(lengths, 3) == pytest.approx(counted) and mean_longest([5.0, 5.0], 8) == 5
    found = Lengths.of("made up", skewed_lengths(2000, 100, 0.8), [8])
    assert found.deviation == pytest.approx(0.8, abs=0.01) and found.mean == 100
    assert found.skew == pytest.approx(0.8, abs=0.02) and skew_of_gain(1.0, 8) == 0 and skew_of_gain(99.0, 8) == 3
    assert found.median == pytest.approx(100 * math.exp(-(0.8**2) / 2), rel=0.02)


def test_a_table_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the command: a line for each file."""
    (tmp_path / "a.csv").write_text("n\n1\n3\n")
    assert main(["lengths", str(tmp_path / "a.csv"), "--column", "n", "--slots", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["a.csv", "2", "2", "2", "3", "0.55", "1.25", "0.46"]
