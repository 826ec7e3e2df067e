"""Guards which rows are run again."""

from __future__ import annotations

import pytest

from cbatch.cli.verify.options import Sample


def test_sizes() -> None:
    """Guards shares that give less than a row, and numbers above that of the rows."""
    assert [Sample.parse("5%").size(total) for total in (1, 20, 21, 1000)] == [1, 1, 2, 50]
    assert [Sample.parse("100").size(total) for total in (1, 99, 5000)] == [1, 99, 100]
    assert Sample.parse("100%").size(7) == 7 and Sample.parse("0.1%").size(5000) == 5


def test_the_same_seed_takes_the_same_rows() -> None:
    """Guards a report that somebody else repeats."""
    sample = Sample.parse("10")
    assert sample.choose(1000, 0) == sample.choose(1000, 0) != sample.choose(1000, 1)
    assert sample.choose(1000, 0) == sorted(set(sample.choose(1000, 0))) and len(sample.choose(1000, 0)) == 10


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "0%", "101%", "nan%", "inf%", "%", "", "many"])
def test_what_is_no_sample_is_refused(text: str) -> None:
    """Guards against a typing error that verifies nothing."""
    with pytest.raises(ValueError, match="neither a number of rows"):
        Sample.parse(text)
